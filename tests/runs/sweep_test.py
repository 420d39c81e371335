"""Several seeds and settings in one program: each run is what it would be alone."""

import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import launch
from fedjax_pfl import build, checkpoints, rundir, runner, sweep
from fedjax_pfl import config as configuration
from fedjax_pfl.errors import UsageError
from fedjax_pfl.sweep import Swept
from tests import cases, tiny
from tests.cases import CASES, NAMES
from tests.runs.common import (
    BASE,
    PHASES,
    assert_same_bits,
    assert_same_run,
    contents,
    undisturbed,
)

SEEDS = {**BASE, "seeds": 2}


def test_seeds_and_rates_are_runs_of_their_own(tmp_path, capsys):
    """In one program, of the same bits as one by one, and with the same files."""
    results = runner.run_all({**SEEDS, "sweep": "learning_rate=.1,.02"}, tmp_path)
    assert sorted(results) == sorted(path.name for path in tmp_path.iterdir())
    for rate in (0.1, 0.02):
        for seed in (0, 1):
            name = f"learning_rate={rate},seed={seed}"
            alone = undisturbed({**BASE, "learning_rate": rate, "seed": seed})
            assert results[name].config == alone.config
            assert_same_run(results[name], alone, tmp_path / name)
    launch._side_by_side(tmp_path, list(results))
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines() if line.startswith("learning_rate=")]
    assert [row[0] for row in rows[:2]] == ["learning_rate=0.02", "learning_rate=0.1"][::-1]
    assert [row[-2:] for row in rows[:2]] == [["6", "2"]] * 2
    assert (tmp_path / "compare/compare.html").is_file()


def test_every_point_has_its_own_best_model_and_phases(tmp_path):
    results = runner.run_all({**PHASES, "seeds": 2})
    for seed in (0, 1):
        assert_same_run(results[f"seed={seed}"], undisturbed({**PHASES, "seed": seed}))


def test_all_at_once_is_as_one_after_the_other(monkeypatch):
    """As on an accelerator: points are vmapped, and so are a point's clients."""
    one = {**BASE, "rounds": 1, "eval_every": 1, "dropout": 0.0}
    monkeypatch.setattr(build, "_at_once", lambda count: count)
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
    """Of the round of the first save no run but one has a checkpoint; or of the third one."""
    save, done = checkpoints.Store.save, []

    def counted(self, step, trees, facts):
        if len(done) == saves:
            raise Stop
        done.append(step)
        save(self, step, trees, facts)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Store, "save", counted)
        with pytest.raises(Stop):
            runner.run_all({**BASE, "seeds": 3}, tmp_path)
    results = runner.run_all({**BASE, "seeds": 3}, tmp_path)
    for seed in range(3):
        result = results[f"seed={seed}"]
        assert result.resumed_at == (None if saves == 1 else 1)
        assert_same_run(result, undisturbed({**BASE, "seed": seed}), tmp_path / f"seed={seed}")


def test_what_is_finished_is_only_read(tmp_path, monkeypatch):
    runner.run_all(SEEDS, tmp_path)
    rundir.write_observations(tmp_path / "seed=1", {"alpha": ([2], [np.ones(3)])})
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
        assert_same_run(more[f"seed={seed}"], undisturbed({**BASE, "seed": seed}))
    assert_same_bits(again["seed=1"].state, more["seed=1"].state)


def test_a_damaged_checkpoint_of_one_sets_all_back(tmp_path, monkeypatch, capsys):
    append = rundir.append_metrics

    def stop(directory, line):
        if line["round"] == 4:
            raise Stop
        append(directory, line)

    with monkeypatch.context() as patch:
        patch.setattr(rundir, "append_metrics", stop)
        with pytest.raises(Stop):
            runner.run_all(SEEDS, tmp_path)
    (tmp_path / "seed=1/checkpoints/3/meta/metadata").write_text("{}")
    results = runner.run_all(SEEDS, tmp_path)
    assert "The checkpoint of round 3 of seed=1 is damaged" in capsys.readouterr().err
    for seed in (0, 1):
        assert results[f"seed={seed}"].resumed_at == 2
        assert_same_run(results[f"seed={seed}"], undisturbed({**BASE, "seed": seed}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sweep": "learning_rat=1,2"}, "no setting learning_rat; did you mean learning_rate?"),
        ({"sweep": "learning_rate"}, "'learning_rate', which is no NAME=NUMBER,NUMBER"),
        ({"sweep": "learning_rate=fast"}, "which is no NAME=NUMBER,NUMBER"),
        ({"sweep": "clients=3,4"}, "clients is 3.0; it must be of type int"),
        ({"sweep": "test_fraction=.1,.2"}, "test_fraction cannot differ in one program"),
        ({"sweep": "learning_rate=.1,-1"}, "learning_rate is -1.0; it must be above 0"),
        ({"sweep": "momentum=0,.9"}, "momentum is 0 or 0.9, which makes different programs"),
        ({"sweep": "fedprox.mu=1,2"}, "fedprox.mu is read by no phase"),
        ({"algorithm": "fedprox", "sweep": "fedprox.mu=1,-2"}, "fedprox.mu is -2"),
        ({"algorithm": "pfedpara", "sweep": "pfedpara.gamma=.1,.9"}, "pfedpara.gamma shapes the"),
        ({"algorithm": "fedmn", "sweep": "fedmn.dropout=.1,.9"}, "fedmn.dropout cannot differ in"),
        ({"seeds": 0}, "seeds is 0; it must be at least 1"),
        ({"seeds": 9, "seed": 2**31 - 1}, "seed is 2147483648; it must be at most"),
        ({"seeds": 600, "sweep": "learning_rate=.1,.2"}, "ask for 1200 runs; at most 1000"),
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


def _real(name):
    """An algorithm's real-valued settings with two values each that all of them allow."""
    settings = {**configuration.settings(cases.FACTORIES[name]), **CASES[name].settings}
    structural = {"pfedpara": {"gamma"}, "fedmn": {"dropout"}}.get(name, set())
    return {k: v for k, v in settings.items() if type(v) is float and k not in structural}


@pytest.mark.parametrize("name", [name for name in NAMES if _real(name)])
def test_every_real_setting_of_every_algorithm_can_be_swept(name):
    """A round and an evaluation are traced with all of them swept at once."""
    data, federation = tiny.federated()
    real = {key: (value, value / 2 or 0.0) for key, value in _real(name).items()}

    def round_of(now):
        settings = {
            **CASES[name].settings,
            **{key: Swept(key, values, now[i]) for i, (key, values) in enumerate(real.items())},
        }
        training = cases.training(**(CASES[name].training or {}))
        make = cases.FACTORIES[name]
        made = make(tiny.Net(), cases.TASK, training, federation, **settings)
        rounds = build.plain_rounds(made, cases.TASK, federation, cohort=tiny.CLIENTS)
        state = rounds.init(jax.random.key(0))
        state, _ = rounds.run(jax.random.key(0), state, data, jnp.int32(0), jnp.int32(1))
        return rounds.evaluate(jax.random.key(0), state, data, jnp.int32(1))

    shapes = jax.eval_shape(round_of, jnp.zeros(len(real)))
    assert shapes.before.score.shape == (tiny.CLIENTS,)


class TestSwept:
    """One setting, two points, the second of which is computed."""

    rate = Swept("rate", (0.5, 2.0), jnp.float32(2))

    @pytest.mark.parametrize("f", [operator.add, operator.sub, operator.mul, operator.truediv])
    def test_arithmetic_is_that_of_the_point(self, f):
        array = jnp.array([1.0, 3.0])
        np.testing.assert_array_equal(f(self.rate, array), f(2.0, array))
        np.testing.assert_array_equal(f(array, self.rate), f(array, 2.0))
        assert (f(self.rate, 4).values, f(4, self.rate).values) == (
            (f(0.5, 4), f(2.0, 4)),
            (f(4, 0.5), f(4, 2.0)),
        )
        assert float(f(4, self.rate).now) == f(4, 2.0)
        assert float(f(self.rate, self.rate).now) == f(2.0, 2.0)

    def test_a_choice_is_made_where_all_agree(self):
        assert self.rate > 0
        assert not self.rate * 2 <= 1 - 0.5
        assert self.rate
        for choice in (lambda: self.rate > 1, lambda: self.rate == 2.0, lambda: not self.rate - 2):
            with pytest.raises(UsageError, match="which makes different programs"):
                choice()

    def test_against_an_array_it_is_compared_in_the_program(self):
        np.testing.assert_array_equal(jnp.array([1.0, 3.0]) < self.rate, [True, False])

    def test_a_check_names_the_values(self):
        assert f"{self.rate}" == "0.5 or 2"


def test_names_of_points_can_be_folders():
    config = configuration.complete({**BASE, "algorithm": "pfedla", "sweep": "pfedla.rate=.5,1"})
    assert list(sweep.expand(config)) == ["pfedla.rate=0.5,seed=0", "pfedla.rate=1.0,seed=0"]
