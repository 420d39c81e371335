"""Tests that several seeds and settings in one program equal single runs."""

import re

import jax
import numpy as np
import pytest

from fedjax_pfl import algorithms, arrays
from fedjax_pfl.cli import train
from fedjax_pfl.core.errors import UsageError, require
from fedjax_pfl.runs import build, checkpoints, run_directory, runner
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation import execution_plan
from tests.commands import message
from tests.runs.common import (
    BASE,
    PHASES,
    assert_same_bits,
    assert_same_run,
    at_call,
    contents,
    kill,
    undisturbed,
)

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

# Evaluation after local training doubles the time of compilation; the second test has it.
QUICK = {**BASE, "evaluate_after": False}
SEEDS = {**QUICK, "seeds": 2}


def assert_seeds(results, count, directory=None, base=QUICK):
    """Compares runs with different seeds with single runs."""
    for seed in range(count):
        folder = directory and directory / f"seed={seed}"
        assert_same_run(results[f"seed={seed}"], undisturbed({**base, "seed": seed}), folder)


def test_the_seed_does_not_change_the_program():
    """Tests compile one program for all seeds."""
    first, second = (
        build.build(configuration.complete({**QUICK, "seed": seed, "partition_seed": 0}))
        for seed in (0, 1)
    )
    assert_same_bits(first.data, second.data)
    assert_same_bits(first.federation, second.federation)
    phases = first.phases + second.phases
    assert phases[0].key != phases[1].key
    texts = [phase.rounds.init.lower(phases[0].key).as_text() for phase in phases]
    assert texts[0] == texts[1]


def test_seeds_and_learning_rates_equal_single_runs(tmp_path, capsys):
    results = runner.run_all({**BASE, "seeds": 2, "sweep": "learning_rate=.1,.02"}, tmp_path)
    assert sorted(results) == sorted(path.name for path in tmp_path.iterdir())
    for rate in (0.1, 0.02):
        for seed in (0, 1):
            name = f"learning_rate={rate},seed={seed}"
            expected = undisturbed({**BASE, "learning_rate": rate, "seed": seed})
            assert results[name].config == expected.config
            assert_same_run(results[name], expected, tmp_path / name)
    train.show(tmp_path, results)
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.startswith("learning_rate=")]
    assert [row[0] for row in rows[:2]] == ["learning_rate=0.1", "learning_rate=0.02"]
    assert [row[-2:] for row in rows[:2]] == [["6", "2"]] * 2
    assert (tmp_path / "compare/compare.html").is_file()


OWN = {**QUICK, "seeds": 2, "own_partitions": True}


def assert_own_partitions(results, directory=None, base=QUICK):
    """Compares two seeds that have their own partitions with single runs."""
    for seed in (0, 1):
        single = undisturbed({**base, "seed": seed, "partition_seed": seed})
        result = results[f"seed={seed}"]
        assert_same_run(result, single, directory and directory / f"seed={seed}")
        assert_same_bits(result.data, single.data)
        assert_same_bits(result.federation.class_counts, single.federation.class_counts)
    first, second = (results[name].data for name in ("seed=0", "seed=1"))
    assert not np.array_equal(first.train.rows, second.train.rows)


def test_seeds_with_their_own_partitions_equal_single_runs(tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(runner, "build", lambda *a, **k: built.append(a) or build.build(*a, **k))
    results = runner.run_all(OWN, tmp_path / "whole")
    assert [len(configs) for configs in built] == [2]  # one program
    assert_own_partitions(results, tmp_path / "whole")
    with kill(checkpoints.Store, "save", at_call(4)):
        runner.run_all(OWN, tmp_path / "killed")
    results = runner.run_all(OWN, tmp_path / "killed")
    assert results["seed=0"].resumed_at
    assert_own_partitions(results, tmp_path / "killed")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"partition": "dirichlet"}, "clients have other numbers of examples in another partition"),
        ({"attack": "label_flip", "attack_share": 0.4}, "the attackers depend on the partition"),
        ({"evaluate_clients": 2}, "the evaluated clients depend on the partition"),
    ],
)
def test_partitions_that_need_their_own_programs_have_them(changes, reason):
    lines, base = [], {**QUICK, "rounds": 1, "eval_every": 1, **changes}
    results = runner.run_all({**base, "seeds": 2, "own_partitions": True}, tell=lines.append)
    assert lines[0] == f"{reason}, so there is one program for each partition_seed"
    assert_own_partitions(results, base=base)


def test_every_seed_has_its_own_best_model_and_phases():
    phases = {**PHASES, "evaluate_after": False}
    assert_seeds(runner.run_all({**phases, "seeds": 2}), 2, base=phases)


def test_vmapped_runs_equal_single_runs(monkeypatch):
    """Imitates an accelerator, where runs and their clients are vmapped."""
    single = {**QUICK, "rounds": 1, "eval_every": 1, "dropout": 0.0}
    monkeypatch.setattr(execution_plan, "default_chunk", lambda count: count)
    results = runner.run_all({**single, "seeds": 3, "sweep": "momentum=.9,.5"})
    own_partitions = {**single, "momentum": 0.5, "seed": 1, "partition_seed": 1}
    own = runner.run_all({**own_partitions, "seeds": 2, "own_partitions": True})
    monkeypatch.undo()
    expectations = [(own["seed=2"], {**own_partitions, "seed": 2, "partition_seed": 2})]
    for name, result in results.items():
        momentum, seed = re.fullmatch(r"momentum=(.*),seed=(.*)", name).groups()
        single_run = {**single, "momentum": float(momentum), "seed": int(seed)}
        expectations.append((result, single_run))
    for result, single_run in expectations:
        expected = undisturbed(single_run)
        for a, b in zip(*map(jax.tree.leaves, (result.state, expected.state)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("saves", "resumed_at"), [(1, [1, None, None]), (4, [1, 1, 1])])
def test_a_killed_sweep_resumes(saves, resumed_at, tmp_path):
    """Kills after the first save of one run, and after the first save of all runs."""
    with kill(checkpoints.Store, "save", at_call(saves + 1)):
        runner.run_all({**QUICK, "seeds": 3}, tmp_path)
    results = runner.run_all({**QUICK, "seeds": 3}, tmp_path)
    assert [results[f"seed={seed}"].resumed_at for seed in range(3)] == resumed_at
    assert_seeds(results, 3, tmp_path)


def test_finished_runs_are_only_read(tmp_path, monkeypatch):
    runner.run_all(SEEDS, tmp_path)
    run_directory.write_observations(tmp_path / "seed=1", {"alpha": ([2], [np.ones(3)])})
    files, stores, save = contents(tmp_path), [], checkpoints.Store.save
    monkeypatch.setattr(
        checkpoints.Store, "save", lambda self, *args: (stores.append(self), save(self, *args))
    )
    results = runner.run_all(SEEDS, tmp_path)
    assert (contents(tmp_path), stores) == (files, [])
    assert [list(result.observations) for result in results.values()] == [[], ["alpha"]]
    with_third_seed = runner.run_all({**SEEDS, "seeds": 3}, tmp_path)
    assert {store.folder for store in stores} == {tmp_path / "seed=2" / "checkpoints"}
    assert_seeds(with_third_seed, 3)


def kill_in_round_4(directory):
    """Kills a sweep of two seeds before files of round 4 are written."""
    with kill(run_directory, "append_metrics", lambda _, line: line["round"] == 4):
        runner.run_all(SEEDS, directory)


def test_a_damaged_checkpoint_sets_all_runs_back(tmp_path, capsys):
    kill_in_round_4(tmp_path)
    (tmp_path / "seed=1/checkpoints/3/meta/metadata").write_text("{}")
    results = runner.run_all(SEEDS, tmp_path)
    assert "The checkpoint of round 3 of seed=1 is damaged" in capsys.readouterr().err
    assert [results[f"seed={seed}"].resumed_at for seed in (0, 1)] == [2, 2]
    assert_seeds(results, 2)


def test_seeds_are_added_to_killed_and_damaged_runs(tmp_path):
    kill_in_round_4(tmp_path)
    results = runner.run_all({**QUICK, "seeds": 3}, tmp_path)
    assert [results[f"seed={seed}"].resumed_at for seed in range(3)] == [3, 3, None]
    newest = max((tmp_path / "seed=0/checkpoints").iterdir(), key=lambda path: int(path.name))
    (newest / "meta/metadata").write_text("{}")
    results = runner.run_all({**QUICK, "seeds": 4}, tmp_path)
    assert results["seed=0"].resumed_at < int(newest.name)
    assert_seeds(results, 4, tmp_path)


def test_diagnostics_belong_to_their_run():
    """Compares the matched weights of Factorized-FL, which depend on its scale."""
    base = {**QUICK, "algorithm": "factorized_fl", "dropout": 0.0, "rounds": 1, "eval_every": 1}
    results = runner.run_all({**base, "sweep": "factorized_fl.scale=1,20"})
    for scale in (1.0, 20.0):
        result = results[f"factorized_fl.scale={scale},seed=0"]
        assert result.phases[0].config.factorized_fl.scale == scale
    single = runner.run({**base, "factorized_fl": {"scale": 20.0}})
    weights = [r.observations["weights"][1] for r in (*results.values(), single)]
    np.testing.assert_allclose(weights[1], weights[2], rtol=1e-5)
    assert np.abs(weights[0][-1] - weights[1][-1]).max() > 1e-3


def test_errors_of_a_user_defined_method_are_not_changed():
    def broken(model, training, federation, *, rate: float = 1.0):
        fedavg = algorithms.fedavg(model, training, federation)
        return fedavg._replace(send=lambda *args: None + 1)

    for settings in ({"seeds": 2}, {"sweep": "broken.rate=1,2"}):
        with pytest.raises(TypeError, match="unsupported operand"):
            runner.run_all({**QUICK, **settings}, algorithm=broken)


def test_a_user_defined_method_is_swept_in_a_phase():
    def scaled(model, training, federation, *, rate: float = 1.0):
        fedavg = algorithms.fedavg(model, training, federation)
        return fedavg._replace(
            receive=lambda *args: jax.tree.map(lambda a: rate * a, fedavg.receive(*args))
        )

    phases = ({"algorithm": "fedavg", "rounds": 1}, {"algorithm": "scaled", "rounds": 1})
    settings = {**QUICK, "eval_every": 1, "phases": phases, "sweep": "scaled.rate=1,.5"}
    results = runner.run_all(settings, algorithm=scaled)
    full, half = (results[f"scaled.rate={rate},seed=0"].state.server for rate in (1.0, 0.5))
    for a, b in zip(*map(jax.tree.leaves, (full, half)), strict=True):
        np.testing.assert_allclose(0.5 * a, b, rtol=1e-6)


def _chooses(model, training, federation, *, rate: float = 1.0, share: float = 0.5):
    """Multiplies with `share`, and branches on `rate` in Python."""
    require(share > 0, f"share is {share}")
    require(share <= 1, f"share is {share}")
    fedavg = algorithms.fedavg(model, training, federation)

    def send(*arguments):
        return jax.tree.map(lambda a: share * a, fedavg.send(*arguments))

    return fedavg._replace(send=send) if rate > 0.5 else fedavg


@pytest.mark.parametrize(
    ("sweep", "line"),
    [
        ("_chooses.share=1,2", "share is 2.0"),
        ("_chooses.rate=1,2", "_chooses.rate cannot differ in one program"),
        ("_chooses.share=1,.5; _chooses.rate=1,2", "_chooses.rate cannot differ in one program"),
    ],
)
def test_a_setting_that_needs_another_program_is_named(sweep, line):
    with pytest.raises(UsageError, match=f"^{line}") as caught:
        runner.run_all({**QUICK, "sweep": sweep}, algorithm=_chooses)
    assert getattr(caught.value, "names", ("_chooses.rate",)) == ("_chooses.rate",)


def test_swept_numbers_are_float32():
    """A single run computes 1 - beta in float64; parameters differ by 1e-6 after six rounds."""
    base = {**BASE, "algorithm": "pfedme", "dropout": 0.0, "eval_every": 6}
    results = runner.run_all({**base, "sweep": "pfedme.beta=.9,.99"})
    for beta in (0.9, 0.99):
        single = runner.run({**base, "pfedme": {"beta": beta}}).state.server
        server = results[f"pfedme.beta={beta},seed=0"].state.server
        for a, b in zip(*map(jax.tree.leaves, (server, single)), strict=True):
            assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)


def _exploding(**changes):
    """Runs a regression whose first step gives a finite model and a loss that is not finite."""
    x = np.linspace(-1, 1, 60, dtype=np.float32)[:, None]
    config = {**QUICK, "local_epochs": None, "local_steps": 1, **changes}
    config = {k: v for k, v in config.items() if k not in ("dataset", "synthetic")}
    results = runner.run_all(config, dataset=arrays(x, 2 * x, name="line")).values()
    return [[line["before"]["loss"] for line in result.metrics] for result in results]


def test_a_loss_that_is_not_finite_ends_no_run():
    finite, infinite = _exploding(sweep="learning_rate=.01,1e18")
    assert all(np.isfinite(finite))
    assert None in infinite
    (single,) = _exploding(learning_rate=1e18)
    assert single[-1] is None


@pytest.mark.parametrize(
    ("changes", "line"),
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
        ({"own_partitions": True}, "own_partitions is for several seeds; set seeds"),
        ({"seeds": 0}, "seeds is 0; it must be at least 1"),
        ({"seeds": 9, "seed": 2**31 - 1}, "seed is 2147483648; it must be at most"),
        ({"seeds": 600, "sweep": "learning_rate=.1,.2"}, "request 1200 runs; use at most 1000"),
    ],
)
def test_invalid_sweeps_are_refused_before_anything_is_written(changes, line, tmp_path):
    assert line in message(runner.run_all, {**BASE, **changes}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_run_refuses_a_sweep(tmp_path):
    assert "run_all" in message(runner.run, SEEDS, tmp_path / "run")
    for seeds in ("2", None, 2.5):
        line = message(runner.run, {**BASE, "seeds": seeds}, tmp_path / "run")
        assert line.startswith(f"seeds is {seeds!r}; it must be")
    assert "seeds is 0; it must be at least 1" in message(
        runner.run, {**BASE, "seeds": 0}, tmp_path / "run"
    )
    assert not (tmp_path / "run").exists()
