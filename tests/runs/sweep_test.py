"""Several seeds and settings in one program: each run is what it would be alone."""

import re

import jax
import numpy as np
import pytest

from fedjax_pfl import algorithms, arrays
from fedjax_pfl.cli import train
from fedjax_pfl.core.errors import UsageError, require
from fedjax_pfl.runs import build, checkpoints, run_directory, runner, sweep_settings
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation import execution_plan
from tests.runs.common import (
    BASE,
    PHASES,
    assert_same_bits,
    assert_same_run,
    contents,
    undisturbed,
)

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

# Evaluating after local training is one more program's worth of compiling; the first test has it.
QUICK = {**BASE, "evaluate_after": False}
SEEDS = {**QUICK, "seeds": 2}


def test_a_seed_is_a_key_and_changes_no_program():
    """So that tests may compile one program for all seeds."""
    one, other = (
        build.build(configuration.complete({**QUICK, "seed": seed, "partition_seed": 0}))
        for seed in (0, 1)
    )
    assert_same_bits(one.data, other.data)
    assert_same_bits(one.federation, other.federation)
    (ours,), (theirs,) = one.phases, other.phases
    assert ours.key != theirs.key
    text, other_text = (phase.rounds.init.lower(ours.key).as_text() for phase in (ours, theirs))
    assert text == other_text


def test_seeds_and_rates_are_runs_of_their_own(tmp_path, capsys):
    """In one program, of the same bits as one by one, and with the same files."""
    results = runner.run_all({**BASE, "seeds": 2, "sweep": "learning_rate=.1,.02"}, tmp_path)
    assert sorted(results) == sorted(path.name for path in tmp_path.iterdir())
    for rate in (0.1, 0.02):
        for seed in (0, 1):
            name = f"learning_rate={rate},seed={seed}"
            alone = undisturbed({**BASE, "learning_rate": rate, "seed": seed})
            assert results[name].config == alone.config
            assert_same_run(results[name], alone, tmp_path / name)
    train.show(tmp_path, results)
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines() if line.startswith("learning_rate=")]
    assert [row[0] for row in rows[:2]] == ["learning_rate=0.02", "learning_rate=0.1"][::-1]
    assert [row[-2:] for row in rows[:2]] == [["6", "2"]] * 2
    assert (tmp_path / "compare/compare.html").is_file()


def test_every_point_has_its_own_best_model_and_phases(tmp_path):
    phases = {**PHASES, "evaluate_after": False}
    results = runner.run_all({**phases, "seeds": 2})
    for seed in (0, 1):
        assert_same_run(results[f"seed={seed}"], undisturbed({**phases, "seed": seed}))


def test_all_at_once_is_as_one_after_the_other(monkeypatch):
    """As on an accelerator: points are vmapped, and so are a point's clients."""
    one = {**QUICK, "rounds": 1, "eval_every": 1, "dropout": 0.0}
    monkeypatch.setattr(execution_plan, "default_chunk", lambda count: count)
    together = runner.run_all({**one, "seeds": 3, "sweep": "momentum=.9,.5"})
    monkeypatch.undo()
    for name, result in together.items():
        momentum = float(name.split(",")[0].split("=")[1])
        alone = undisturbed({**one, "momentum": momentum, "seed": int(name[-1])})
        for a, b in zip(*map(jax.tree.leaves, (result.state, alone.state)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class Stop(BaseException):
    """Stands for a kill."""


@pytest.mark.parametrize("saves", [1, 4])
def test_a_kill_between_two_saves_goes_on_where_all_are(saves, tmp_path, monkeypatch):
    """After the first of all saves one run goes on and the others begin; or all go on together."""
    save, done = checkpoints.Store.save, []

    def counted(self, step, trees, facts):
        if len(done) == saves:
            raise Stop
        done.append(step)
        save(self, step, trees, facts)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Store, "save", counted)
        with pytest.raises(Stop):
            runner.run_all({**QUICK, "seeds": 3}, tmp_path)
    results = runner.run_all({**QUICK, "seeds": 3}, tmp_path)
    for seed in range(3):
        result = results[f"seed={seed}"]
        assert result.resumed_at == (1 if saves == 4 or seed == 0 else None)
        assert_same_run(result, undisturbed({**QUICK, "seed": seed}), tmp_path / f"seed={seed}")


def test_what_is_finished_is_only_read(tmp_path, monkeypatch):
    runner.run_all(SEEDS, tmp_path)
    run_directory.write_observations(tmp_path / "seed=1", {"alpha": ([2], [np.ones(3)])})
    before = contents(tmp_path)
    saved, save = [], checkpoints.Store.save
    monkeypatch.setattr(
        checkpoints.Store, "save", lambda self, *rest: (saved.append(self), save(self, *rest))
    )
    again = runner.run_all(SEEDS, tmp_path)
    assert (contents(tmp_path), saved) == (before, [])
    assert [list(result.observations) for result in again.values()] == [[], ["alpha"]]
    more = runner.run_all({**SEEDS, "seeds": 3}, tmp_path)
    assert {store.folder for store in saved} == {tmp_path / "seed=2" / "checkpoints"}
    for seed in range(3):
        assert_same_run(more[f"seed={seed}"], undisturbed({**QUICK, "seed": seed}))
    assert_same_bits(again["seed=1"].state, more["seed=1"].state)


def _stopped_at_four(directory, monkeypatch):
    """Two seeds, killed before anything of round 4 is written."""
    append = run_directory.append_metrics

    def stop(directory, line):
        if line["round"] == 4:
            raise Stop
        append(directory, line)

    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "append_metrics", stop)
        with pytest.raises(Stop):
            runner.run_all(SEEDS, directory)


def test_a_damaged_checkpoint_of_one_sets_all_back(tmp_path, monkeypatch, capsys):
    _stopped_at_four(tmp_path, monkeypatch)
    (tmp_path / "seed=1/checkpoints/3/meta/metadata").write_text("{}")
    results = runner.run_all(SEEDS, tmp_path)
    assert "The checkpoint of round 3 of seed=1 is damaged" in capsys.readouterr().err
    for seed in (0, 1):
        assert results[f"seed={seed}"].resumed_at == 2
        assert_same_run(results[f"seed={seed}"], undisturbed({**QUICK, "seed": seed}))


def test_more_points_leave_what_has_come_further_alone(tmp_path, monkeypatch):
    """A stopped sweep of two seeds goes on as three; and one of whose finished runs a checkpoint
    is damaged, which goes on from the one before while a new one begins."""
    _stopped_at_four(tmp_path, monkeypatch)
    results = runner.run_all({**QUICK, "seeds": 3}, tmp_path)
    assert [results[f"seed={seed}"].resumed_at for seed in range(3)] == [3, 3, None]
    newest = max((tmp_path / "seed=0/checkpoints").iterdir(), key=lambda path: int(path.name))
    (newest / "meta/metadata").write_text("{}")
    results = runner.run_all({**QUICK, "seeds": 4}, tmp_path)
    assert results["seed=0"].resumed_at < int(newest.name)
    for seed in range(4):
        alone = undisturbed({**QUICK, "seed": seed})
        assert_same_run(results[f"seed={seed}"], alone, tmp_path / f"seed={seed}")


def test_what_a_method_shows_of_itself_is_of_each_point():
    """The matched weights of Factorized-FL depend on its scale."""
    base = {**QUICK, "algorithm": "factorized_fl", "dropout": 0.0, "rounds": 1, "eval_every": 1}
    results = runner.run_all({**base, "sweep": "factorized_fl.scale=1,20"})
    for scale in (1.0, 20.0):
        mine = results[f"factorized_fl.scale={scale},seed=0"]
        assert mine.phases[0].config.factorized_fl.scale == scale
    alone = runner.run({**base, "factorized_fl": {"scale": 20.0}})
    np.testing.assert_allclose(
        mine.observations["weights"][1], alone.observations["weights"][1], rtol=1e-5
    )
    one, other = (result.observations["weights"][1][-1] for result in results.values())
    assert np.abs(one - other).max() > 1e-3


def test_a_methods_own_fault_is_not_the_sweeps():
    def broken(model, training, federation, *, rate: float = 1.0):
        usual = algorithms.fedavg(model, training, federation)
        return usual._replace(send=lambda *rest: None + 1)

    for more in ({"seeds": 2}, {"sweep": "broken.rate=1,2"}):
        with pytest.raises(TypeError, match="unsupported operand"):
            runner.run_all({**QUICK, **more}, algorithm=broken)


def test_a_method_of_ones_own_can_be_swept_in_a_phase():
    def star(model, training, federation, *, rate: float = 1.0):
        usual = algorithms.fedavg(model, training, federation)

        def later(*rest):
            return jax.tree.map(lambda a: rate * a, usual.receive(*rest))

        return usual._replace(receive=later)

    phases = ({"algorithm": "fedavg", "rounds": 1}, {"algorithm": "star", "rounds": 1})
    results = runner.run_all(
        {**QUICK, "eval_every": 1, "phases": phases, "sweep": "star.rate=1,.5"}, algorithm=star
    )
    one, half = (results[f"star.rate={rate},seed=0"].state.server for rate in (1.0, 0.5))
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(half), strict=True)
    for a, b in leaves:
        np.testing.assert_allclose(0.5 * a, b, rtol=1e-6)


def _chooses(model, training, federation, *, rate: float = 1.0, share: float = 0.5):
    """Its `share` is multiplied with only; of its `rate` it makes a choice in Python."""
    require(share > 0, f"share is {share}")
    require(share <= 1, f"share is {share}")
    usual = algorithms.fedavg(model, training, federation)

    def less(*rest):
        return jax.tree.map(lambda a: share * a, usual.send(*rest))

    return usual._replace(send=less) if rate > 0.5 else usual


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("_chooses.share=1,2", "share is 2.0"),
        ("_chooses.rate=1,2", "_chooses.rate cannot differ in one program"),
        ("_chooses.share=1,.5; _chooses.rate=1,2", "_chooses.rate cannot differ in one program"),
    ],
)
def test_the_setting_that_makes_other_programs_is_named(sweep, message):
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        runner.run_all({**QUICK, "sweep": sweep}, algorithm=_chooses)
    assert getattr(caught.value, "names", ("_chooses.rate",)) == ("_chooses.rate",)


def test_numbers_are_float32_in_the_program_of_a_sweep():
    """1 − β is taken before the program of a single run, and in that of a sweep: it rounds apart.

    That is what may differ. In six rounds a parameter comes to differ by less than 1e-6 of itself.
    """
    base = {**BASE, "algorithm": "pfedme", "dropout": 0.0, "eval_every": 6}
    together = runner.run_all({**base, "sweep": "pfedme.beta=.9,.99"})
    for beta in (0.9, 0.99):
        alone = runner.run({**base, "pfedme": {"beta": beta}}).state.server
        server = together[f"pfedme.beta={beta},seed=0"].state.server
        for a, b in zip(*map(jax.tree.leaves, (server, alone)), strict=True):
            assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)


def _exploding(**changes):
    """A regression whose first step leaves a model that is finite and a loss that is not."""
    x = np.linspace(-1, 1, 60, dtype=np.float32)[:, None]
    config = {**QUICK, "local_epochs": None, "local_steps": 1, **changes}
    config = {k: v for k, v in config.items() if k not in ("dataset", "synthetic")}
    return runner.run_all(config, dataset=arrays(x, 2 * x, name="line")).values()


def test_a_score_that_is_no_number_ends_no_other_run():
    results = _exploding(sweep="learning_rate=.01,1e18")
    good, bad = ([line["before"]["loss"] for line in r.metrics] for r in results)
    assert all(np.isfinite(good))
    assert None in bad


def test_a_score_that_is_no_number_ends_no_run():
    (alone,) = _exploding(learning_rate=1e18)
    assert alone.metrics[-1]["before"]["loss"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sweep": "learning_rat=1,2"}, "no setting learning_rat; did you mean learning_rate?"),
        (
            {"sweep": "lr=1,2", "algorithm": "fedprox"},
            "sweep: there is no setting lr; there are clip_norm, fedprox.mu, learning_rate, moment",
        ),
        ({"sweep": "learning_rate"}, "'learning_rate', which is no NAME=NUMBER,NUMBER"),
        ({"sweep": "learning_rate=1;learning_rate=2"}, "sweep has learning_rate twice"),
        ({"sweep": "learning_rate=fast"}, "which is no NAME=NUMBER,NUMBER"),
        ({"sweep": "clients=3,4"}, "sweep: clients is of type int, and only real-valued settings"),
        ({"sweep": "test_fraction=.1,.2"}, "test_fraction cannot differ in one program"),
        ({"sweep": "learning_rate=.1,-1"}, "learning_rate is -1.0; it must be above 0"),
        ({"sweep": "momentum=0,.9"}, "momentum is 0 or 0.9, which makes different programs"),
        ({"sweep": "weight_decay=.1,0,.2"}, "weight_decay is 0.1 or 0 or 0.2, which makes diff"),
        ({"sweep": "fedprox.mu=1,2"}, "fedprox.mu is read by no phase"),
        ({"algorithm": "fedprox", "sweep": "fedprox.mu=1,-2"}, "fedprox.mu is -2"),
        ({"algorithm": "pfedpara", "sweep": "pfedpara.gamma=.1,.9"}, "pfedpara.gamma shapes the"),
        (
            {"algorithm": "fedmn", "sweep": "fedmn.dropout=.1,.9", "fedmn": {"layout": (1, 1, 1)}},
            "fedmn.dropout cannot differ in",
        ),
        ({"seeds": 0}, "seeds is 0; it must be at least 1"),
        ({"seeds": 9, "seed": 2**31 - 1}, "seed is 2147483648; it must be at most"),
        ({"seeds": 600, "sweep": "learning_rate=.1,.2"}, "request 1200 runs; use at most 1000"),
    ],
)
def test_what_cannot_be_one_program_is_said_before_anything_is_written(changes, message, tmp_path):
    with pytest.raises(UsageError, match=re.escape(message)):
        runner.run_all({**BASE, **changes}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_run_is_for_one(tmp_path):
    with pytest.raises(UsageError, match="run_all"):
        runner.run(SEEDS, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_names_of_points_can_be_folders():
    config = configuration.complete({**BASE, "algorithm": "pfedla", "sweep": "pfedla.rate=.5,1"})
    assert list(sweep_settings.expand(config)) == [
        "pfedla.rate=0.5,seed=0",
        "pfedla.rate=1.0,seed=0",
    ]
