"""Tests of the runs and results of a grid search."""

import csv
import re
import shutil
import signal

import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.report import comparison
from fedjax_pfl.report.run_index import RunIndex
from fedjax_pfl.runs import checkpoints, interrupt, run_directory, runner, sweep_settings
from fedjax_pfl.runs.tuning import choice, grids, search, trials
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.custom import register
from tests.commands import message, run_here
from tests.runs.common import at_call, contents, kill, read_metrics, undisturbed, untimed
from tests.runs.tuning_plan_test import RATES, SMALL, plan, results_settings

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A search over two learning rates, two methods and two seeds, and its folder."""
    out = tmp_path_factory.mktemp("tune") / "an out"
    planned = plan(methods=["fedavg", "local"])
    search.run_search(planned, seeds=2, out=out, texts=RATES)
    return planned, out


@pytest.fixture
def cached(monkeypatch):
    """Caches experiments between tests, also for the checks before the runs."""
    build = runner.build
    monkeypatch.setattr(
        trials, "build", lambda *configs, registry: build(*configs, registry=registry)
    )


def read_table(out):
    return list(csv.DictReader((out / "tune.csv").read_text().splitlines()))


def test_the_best_learning_rate_is_chosen(tuned):
    planned, out = tuned
    rows = read_table(out)
    best = [(row["method"], row["learning_rate"]) for row in rows if row["chosen"] == "1"]
    assert best == [("fedavg", "0.1"), ("local", "0.1")]
    means = [float(row["validation_mean"]) for row in rows]
    assert means[0] > means[1] + 0.2
    assert means[2] > means[3] + 0.2
    files = {f"tune.{suffix}" for suffix in ("txt", "md", "csv", "png", "html")}
    assert {p.name for p in out.iterdir()} == files | {"fedavg", "local", "tuned.py"}
    text = " ".join((out / "tune.txt").read_text().split())
    assert "fedavg: learning_rate 0.1 is the largest tried" in text
    assert "Each method has 2 points, 2 seeds and 2 evaluations to be best in." in text
    assert "fedavg, local 6 (2 rounds of 3)." in text
    scope = {}
    exec((out / "tuned.py").read_text(), scope)
    for trial in planned:
        expected = grids.apply(trial.config, {"learning_rate": 0.1})
        config = scope["get_config"](trial.method)
        assert results_settings(config) == results_settings(expected)


def test_a_point_equals_a_single_run(tuned):
    _, out = tuned
    settings = {**SMALL, "learning_rate": 0.1, "seed": 1}
    single = undisturbed(settings)
    path = RunIndex(out).find(configuration.complete(settings))[1]
    assert re.fullmatch(r"learning_rate=0.1,seed=1-[0-9a-f]{8}", path.name)
    assert path.parent == out / "fedavg"
    assert untimed(read_metrics(path)) == untimed(single.metrics)
    assert comparison.read(path).config == single.config
    best = single.metrics[single.metrics[-1]["best_round"] - 1]
    assert choice.score(comparison.read(path)) == best["validation"]["accuracy_mean"]


def forbidden(*_, **__):
    raise AssertionError


def test_a_finished_search_is_only_read(tuned, monkeypatch, capsys, tmp_path):
    planned, out = tuned
    files = contents(out)
    monkeypatch.setattr(runner, "run_configs", forbidden)
    search.run_search(planned, seeds=2, out=out, texts=RATES)
    output = capsys.readouterr()
    assert "8 runs: 8 finished, 0 to resume, 0 to start\n" in output.err
    assert f"Chosen: --config='{out / 'tuned.py'}':METHOD" in output.out
    search.run_search(planned, seeds=3, out=out, only_show=True)
    assert "2 of its runs are missing" in capsys.readouterr().out
    assert contents(out) == files
    search.run_search(planned, seeds=1, out=tmp_path / "none", only_show=True)
    assert capsys.readouterr().out.count("not run") == 4
    assert not (tmp_path / "none").exists()


def test_a_larger_grid_reuses_finished_runs(tuned, monkeypatch, cached):
    _, out = tuned
    names = []
    monkeypatch.setattr(runner, "run_configs", lambda points, *_, **__: names.extend(points))
    trials.run(plan(["learning_rate=.1,.05; momentum=.9"]), 2, out, None)
    assert [re.sub("-[^-]*$", "", name) for name in names] == [
        f"fedavg/learning_rate=0.05,momentum=0.9,seed={seed}" for seed in (0, 1)
    ]


def test_seeds_of_a_point_can_have_their_own_partitions(tmp_path, monkeypatch, cached):
    """A search has one program for all of them, or one for each partition."""
    programs = []
    monkeypatch.setattr(
        runner, "run_configs", lambda configs, *_, **__: programs.append(list(configs.values()))
    )
    for partition, seeds in (("iid", [[0, 1, 0, 1]]), ("dirichlet", [[0, 0], [1, 1]])):
        (trial,) = plan()
        trial.config.update(own_partitions=True, partition=partition)
        trials.run([trial], 2, tmp_path, None)
        configs = [[(c.seed, c.partition_seed) for c in program] for program in programs]
        assert configs == [[(seed, seed) for seed in program] for program in seeds]
        programs.clear()
        for result in trials.collect(trial, 2, tmp_path):
            chosen = result.config  # other seeds of it have other partitions too
            assert (chosen.own_partitions, chosen.seeds, chosen.partition_seed) == (True, 2, 0)
            expanded = sweep_settings.expand(chosen)
            assert [c.partition_seed for c in expanded.values()] == [0, 1]


def test_results_of_another_grid_are_removed(tuned, tmp_path, monkeypatch, cached, capsys):
    """Starts another search in the folder and stops it before its first run."""
    _, out = tuned
    shutil.copytree(out, tmp_path / "out")
    monkeypatch.setattr(trials, "run", lambda *_: None)
    search.run_search(plan(["learning_rate=.05"]), seeds=2, out=tmp_path / "out")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names & {"tune.txt", "tune.html", "tune.png", "tuned.py"} == {"tune.txt", "tune.html"}
    assert "Chosen:" not in capsys.readouterr().out


def test_a_killed_search_resumes(tuned, tmp_path, cached, capsys):
    """Kills after the first round of all runs."""
    _, out = tuned
    planned = plan()
    with kill(checkpoints.Store, "save", at_call(5)):
        trials.run(planned, 2, tmp_path, None)
    assert "0 finished, 0 to resume, 4 to start, in 1 program\n" in capsys.readouterr().err
    assert choice.best_point(trials.collect(planned[0], 2, tmp_path)) is None
    trials.run(planned, 2, tmp_path, None)
    assert "0 finished, 4 to resume, 0 to start, in 1 program\n" in capsys.readouterr().err
    for path in (tmp_path / "fedavg").iterdir():
        assert untimed(read_metrics(path)) == untimed(read_metrics(out / "fedavg" / path.name))


def test_ctrl_c_in_python_stops_a_search_that_resumes(tmp_path, capfd):
    append, grid = run_directory.append_metrics, {"learning_rate": [0.1, 0.2]}

    def press_and_append(directory, line):
        if line["round"] == 1 and "0.2" in directory.name:
            signal.raise_signal(signal.SIGINT)
        append(directory, line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_directory, "append_metrics", press_and_append)
        with pytest.raises(interrupt.Stopped, match="stopped at round 1; run the same call again"):
            search.tune(SMALL, grid, tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert "2 of its runs are missing" in capfd.readouterr().out
    assert list(search.tune(SMALL, grid, tmp_path)) == ["fedavg"]
    assert "0 finished, 2 to resume, 0 to start" in capfd.readouterr().err


def test_finished_runs_on_other_examples_are_refused(tmp_path):
    file = tmp_path / "t.csv"
    changes = {"dataset": f"csv:{file}", "csv": {"label": "label"}, "rounds": 1, "eval_every": 1}
    settings = {key: value for key, value in SMALL.items() if key != "synthetic"} | changes
    for shift in (0, 1):
        rows = [f"{i},{-i},{(i + shift) % 2}" for i in range(30)]
        file.write_text("\n".join(["a,b,label", *rows]) + "\n")
        if not shift:
            search.tune(settings, {"learning_rate": [0.1]}, tmp_path / "out")
    line = message(search.tune, settings, {"learning_rate": [0.1]}, tmp_path / "out")
    assert "was begun with other examples: the files that it reads have changed since" in line


def slowed(model, training, federation, *, share: float = 0.5):
    """FedAvg with a fraction of the learning rate."""
    rate = training.rate
    return algorithms.fedavg(model, training._replace(rate=lambda t: share * rate(t)), federation)


def tune_slowed(out, grid, **options):
    config = {**SMALL, "learning_rate": 0.2, "seed": 5, "evaluate_after": False}
    return search.tune(config, grid, out, methods=["slowed", "fedavg"], algorithm=slowed, **options)


def test_a_user_defined_method_is_tuned_with_a_built_in_one(tmp_path, monkeypatch, capsys):
    """Compares half of the learning rate 0.2 with the learning rate 0.1."""
    grid = {"slowed.share": [1e-6, 0.5], "fedavg.learning_rate": [0.1, 1e-6]}
    best = tune_slowed(tmp_path, grid)
    assert "tuned.py" not in {p.name for p in tmp_path.iterdir()}
    assert "--config" not in capsys.readouterr().out
    assert {m: (c["learning_rate"], c.get(m)) for m, c in best.items()} == {
        "slowed": (0.2, {"share": 0.5}),
        "fedavg": (0.1, None),
    }
    for method, settings in best.items():
        assert (settings["algorithm"], settings["rounds"]) == (method, 2)
        assert "seed" not in settings
    means = {(row["method"], row["chosen"]): row["validation_mean"] for row in read_table(tmp_path)}
    assert means["slowed", "1"] == means["fedavg", "1"] > means["slowed", "0"]
    registry, settings = register(best["slowed"], algorithm=slowed)
    configuration.specify(configuration.complete(settings, registry), registry)
    monkeypatch.setattr(runner, "run_configs", forbidden)
    assert tune_slowed(tmp_path, grid) == best


GRID = {"slowed.share": [0.5], "fedavg.learning_rate": [0.1]}


@pytest.mark.parametrize(
    ("grid", "options", "line"),
    [
        ({"slowed.shar": [1]}, {}, "there is no setting slowed.shar; did you mean slowed.share?"),
        ({"fedavg.learning_rate": [0.1, 0.2]}, {}, "slowed 1"),
        (GRID, {"seeds": 0}, "seeds is 0; it must be at least 1"),
        (GRID, {"runs_per_program": 0}, "runs_per_program is 0; it must be at least 1"),
        ({"slowed.share": 0.5}, {}, "the grid has 0.5 for slowed.share; give a list of values"),
        ({"slowed.share": []}, {}, "the grid has [] for slowed.share; "),
    ],
)
def test_invalid_grids_are_refused(grid, options, line, tmp_path):
    assert line in message(lambda: tune_slowed(tmp_path / "none", grid, **options))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("methods", "line"),
    [
        ("fedavg", "methods is 'fedavg'; give a list of names"),
        (["slowed"], "there is no method 'slowed'; "),
    ],
)
def test_invalid_methods_are_refused(methods, line):
    error = message(lambda: search.tune(SMALL, {"learning_rate": [1]}, methods=methods))
    assert error.startswith(line)


@pytest.mark.filterwarnings("ignore:the load_module")  # of configuration files
def test_the_command_refuses_a_search_without_validation_examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message(run_here, "tune", "--grid=learning_rate=.1") == (
        "there are no validation examples, by which to choose; set validation_fraction to 0.2"
    )
    assert list(tmp_path.iterdir()) == []
