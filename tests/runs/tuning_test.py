"""Settings chosen on validation examples: the runs that are chosen from."""

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.report import comparison
from fedjax_pfl.report.run_index import RunIndex
from fedjax_pfl.runs import checkpoints, runner
from fedjax_pfl.runs.tuning import choice, grids, search, trials
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.custom import register
from tests.commands import message
from tests.experiments.tune_test import loaded, plain
from tests.runs.common import contents, read_metrics, undisturbed, untimed
from tests.runs.tuning_plan_test import RATES, SMALL, planned

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Rates of which one is clearly right, for two methods and two seeds."""
    out = tmp_path_factory.mktemp("tune") / "out"
    made = planned(methods=["fedavg", "local"])
    assert search.run_search(made, seeds=2, out=out, texts=RATES) == 0
    return made, out


@pytest.fixture
def cached(monkeypatch):
    """What runs are built of is kept between tests, for the checks before them too."""
    once = runner.build
    monkeypatch.setattr(
        trials, "build", lambda *configs, registry: once(*configs, registry=registry)
    )


def test_the_rate_that_learns_is_chosen(tuned):
    made, out = tuned
    rows = list(csv.DictReader((out / "tune.csv").read_text().splitlines()))
    best = {row["method"]: row for row in rows if row["chosen"] == "1"}
    assert {m: row["learning_rate"] for m, row in best.items()} == {"fedavg": "0.1", "local": "0.1"}
    means = [float(row["validation_mean"]) for row in rows]
    assert means[0] > means[1] + 0.2
    assert means[2] > means[3] + 0.2
    assert {p.name for p in out.iterdir()} == {
        "fedavg",
        "local",
        "tune.txt",
        "tune.md",
        "tune.csv",
        "tune.png",
        "tune.html",
        "tuned.py",
    }
    text = (out / "tune.txt").read_text()
    assert "fedavg: learning_rate 0.1 is the largest tried" in text
    assert "Each method has 2 points, 2 seeds and 2 evaluations to be best in." in " ".join(
        text.split()
    )
    assert "fedavg, local 6 (2 rounds of 3)." in text
    get_config = loaded((out / "tuned.py").read_text())
    for trial in made:
        wanted = grids.apply(trial.config, {"learning_rate": 0.1})
        assert plain(get_config(trial.method)) == plain(wanted)


def test_a_point_is_the_run_that_its_settings_alone_give(tuned):
    _, out = tuned
    alone = undisturbed({**SMALL, "learning_rate": 0.1, "seed": 1})
    path = RunIndex(out).find(configuration.complete({**SMALL, "learning_rate": 0.1, "seed": 1}))[1]
    assert re.fullmatch(r"learning_rate=0.1,seed=1-[0-9a-f]{8}", path.name)
    assert path.parent == out / "fedavg"
    assert untimed(read_metrics(path)) == untimed(alone.metrics)
    assert comparison.read(path).config == alone.config
    score = alone.metrics[alone.metrics[-1]["best_round"] - 1]["validation"]["accuracy_mean"]
    assert choice.score(comparison.read(path)) == score


def forbidden(*_, **__):
    raise AssertionError


def test_what_is_finished_is_only_read(tuned, monkeypatch, capsys):
    made, out = tuned
    before = contents(out)
    monkeypatch.setattr(runner, "run_configs", forbidden)
    search.run_search(made, seeds=2, out=out, texts=RATES)
    shown = capsys.readouterr()
    assert "8 runs: 8 finished, 0 to resume, 0 to start\n" in shown.err
    assert f"Chosen: --config={out / 'tuned.py'}:METHOD" in shown.out
    assert contents(out) == before


def test_only_show_neither_runs_nor_writes(tuned, monkeypatch, capsys, tmp_path):
    made, out = tuned
    monkeypatch.setattr(runner, "run_configs", forbidden)
    before = contents(out)
    search.run_search(made, seeds=3, out=out, only_show=True)
    assert "2 of its runs are missing" in capsys.readouterr().out
    assert contents(out) == before
    search.run_search(made, seeds=1, out=tmp_path / "none", only_show=True)
    assert capsys.readouterr().out.count("not run") == 4
    assert not (tmp_path / "none").exists()


def test_another_grid_uses_the_runs_that_are_there(tuned, monkeypatch, cached):
    _, out = tuned
    asked = []
    monkeypatch.setattr(runner, "run_configs", lambda points, *_, **__: asked.extend(points))
    trials.run(planned(["learning_rate=.1,.05; momentum=.9"]), 2, out, None)
    assert [re.sub("-[^-]*$", "", name) for name in asked] == [
        f"fedavg/learning_rate=0.05,momentum=0.9,seed={seed}" for seed in (0, 1)
    ]


def test_nothing_of_another_grid_is_left(tuned, tmp_path, monkeypatch, cached, capsys):
    """A wider grid that was cut has chosen nothing, and a single point makes no picture."""
    _, out = tuned
    shutil.copytree(out, tmp_path / "out")
    monkeypatch.setattr(trials, "run", lambda *_: None)  # cut before the first of them
    made = planned(["learning_rate=.05"])
    search.run_search(made, seeds=2, out=tmp_path / "out")
    left = {p.name for p in (tmp_path / "out").iterdir()}
    assert left & {"tune.txt", "tune.html", "tune.png", "tuned.py"} == {"tune.txt", "tune.html"}
    assert "Chosen:" not in capsys.readouterr().out


class Stop(BaseException):
    """Stands for a kill."""


def test_a_kill_goes_on(tuned, tmp_path, monkeypatch, cached, capsys):
    """After the first round of all runs; the end is that of runs that were not cut."""
    _, out = tuned
    save, done = checkpoints.Store.save, []

    def counted(self, step, trees, facts):
        if len(done) == 4:
            raise Stop
        done.append(step)
        save(self, step, trees, facts)

    made = planned()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Store, "save", counted)
        with pytest.raises(Stop):
            trials.run(made, 2, tmp_path, None)
    assert "0 finished, 0 to resume, 4 to start, in 1 program\n" in capsys.readouterr().err
    assert choice.best_point(trials.collect(made[0], 2, tmp_path)) is None
    trials.run(made, 2, tmp_path, None)
    assert "0 finished, 4 to resume, 0 to start, in 1 program\n" in capsys.readouterr().err
    for path in (tmp_path / "fedavg").iterdir():
        assert untimed(read_metrics(path)) == untimed(read_metrics(out / "fedavg" / path.name))


def slowed(model, training, federation, *, share: float = 0.5):
    rate = training.rate
    slower = training._replace(rate=lambda t: share * rate(t))
    return algorithms.fedavg(model, slower, federation)


def tune_slowed(out, grid, **given):
    config = {**SMALL, "learning_rate": 0.2, "seed": 5, "evaluate_after": False}
    return search.tune(config, grid, out, methods=["slowed", "fedavg"], algorithm=slowed, **given)


def test_a_method_of_ones_own_is_tuned_beside_ours(tmp_path, monkeypatch, capsys):
    """Half of a rate of .2 is a rate of .1; what is chosen can be run as it is."""
    grid = {"slowed.share": [1e-6, 0.5], "fedavg.learning_rate": [0.1, 1e-6]}
    found = tune_slowed(tmp_path, grid)
    assert "tuned.py" not in {p.name for p in tmp_path.iterdir()}
    assert "--config" not in capsys.readouterr().out
    shares = {m: (one["learning_rate"], one.get(m)) for m, one in found.items()}
    assert shares == {"slowed": (0.2, {"share": 0.5}), "fedavg": (0.1, None)}
    assert {one["algorithm"] for one in found.values()} == set(found)
    assert all("seed" not in one and one["rounds"] == 2 for one in found.values())
    rows = list(csv.DictReader((tmp_path / "tune.csv").read_text().splitlines()))
    means = {(row["method"], row["chosen"]): row["validation_mean"] for row in rows}
    assert means["slowed", "1"] == means["fedavg", "1"] > means["slowed", "0"]
    words, given = register(found["slowed"], algorithm=slowed)
    configuration.specify(configuration.complete(given, words), words)
    # A second time, all runs are known.
    monkeypatch.setattr(runner, "run_configs", forbidden)
    assert tune_slowed(tmp_path, grid) == found


def test_what_one_may_say_of_a_method_of_ones_own(tmp_path):
    def asked(grid, **given):
        return message(lambda: tune_slowed(tmp_path / "none", grid, **given))

    nearest = "there is no setting slowed.shar; did you mean slowed.share?"
    assert asked({"slowed.shar": [1]}) == nearest
    assert "slowed 1" in asked({"fedavg.learning_rate": [0.1, 0.2]})
    few = {"slowed.share": [0.5], "fedavg.learning_rate": [0.1]}
    assert asked(few, seeds=0) == "seeds is 0; it must be at least 1"
    assert asked(few, together=0) == "together is 0; it must be at least 1"
    listed = "the grid has 0.5 for slowed.share; give a list of values"
    assert asked({"slowed.share": 0.5}) == listed
    assert asked({"slowed.share": []}).startswith("the grid has [] for slowed.share; ")
    line = message(lambda: search.tune(SMALL, {"learning_rate": [1]}, methods="fedavg"))
    assert line == "methods is 'fedavg'; give a list of names"
    assert not (tmp_path / "none").exists()
    line = message(lambda: search.tune(SMALL, {"learning_rate": [1]}, methods=["slowed"]))
    assert line.startswith("there is no method 'slowed'; ")


def test_the_command_ends_with_one_line(tmp_path):
    command = [sys.executable, "-m", "experiments.tune", "--grid=learning_rate=.1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "error: there are no validation examples, by which to choose; set "
        "validation_fraction to 0.2\n"
    )
    assert list(tmp_path.iterdir()) == []
