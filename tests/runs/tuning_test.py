"""Settings chosen on validation examples: what is planned, and the runs that are chosen from."""

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import tune as tune
from experiments.papers.pfedhn import presets as pfedhn
from fedjax_pfl import algorithms
from fedjax_pfl.config import configuration
from fedjax_pfl.config.custom import added
from fedjax_pfl.report import comparison
from fedjax_pfl.report.run_index import Known
from fedjax_pfl.runs import checkpoints, runner
from fedjax_pfl.runs.tuning import choice, grids, own, search, show, trials
from fedjax_pfl.runs.tuning.trials import Job
from tests.experiments.launch_test import message
from tests.experiments.tune_test import loaded, plain
from tests.runs.common import BASE, contents, read_metrics, undisturbed, untimed

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")
ROOT = Path(__file__).parents[2]
SMALL = {
    **BASE,
    "synthetic": {"shape": (4, 4, 1), "classes": 3, "examples": 240, "test_examples": 0},
    "clients_per_round": None, "rounds": 2, "eval_every": 1, "dropout": 0.0, "local_epochs": 3,
    "evaluate_after": False,
}  # fmt: skip
RATES = ["learning_rate=1e-6,.1"]

# What is planned.


def test_a_method_has_the_settings_of_its_word_and_the_command_line():
    source = str(ROOT / "experiments/configs/pfedhn.py") + ":digits-n5"
    config = pfedhn.get_config("digits-n5")
    config.batch_size = 9
    methods = ["pfedhn", "per_fedavg", "pfedme"]
    made = tune.configured(source, config, {"batch_size": 9}, methods)
    assert [one.algorithm for one in made.values()] == methods
    assert {(one.clients, one.batch_size) for one in made.values()} == {(5, 9)}
    assert [one.momentum for one in made.values()] == [0.9, 0.0, 0.0]
    assert made["pfedme"].pfedme.inner_steps == 3
    assert [one.clients_per_round for one in made.values()] == [1, 5, 5]


def test_a_file_without_such_words_gives_another_algorithm(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def get_config():\n    raise RuntimeError\n")
    base = configuration.complete({"clients": 3})
    made = tune.configured(str(file), base, {}, ["fedavg", "local"])
    assert plain(made["local"]) == {**plain(base), "algorithm": "local"}


@pytest.mark.parametrize(
    ("phases", "wanted"),
    [
        ((), [20]),
        (({"algorithm": "fedavg", "rounds": 50}, {}), [7, 13]),  # of 150
        (({"rounds": 10}, {"rounds": 10}), [10, 10]),
    ],
)
def test_phases_keep_their_shares_of_fewer_rounds(phases, wanted):
    config = configuration.complete({"phases": phases, "rounds": 100})
    trials.shorten({"fedavg": config}, 20)
    assert [one.rounds for one in configuration.phases(config)] == wanted
    assert trials.length(config) == 20
    if phases:
        assert "too few for 2 phases" in message(trials.shorten, {"fedavg": config}, 1)


@pytest.fixture
def hypernetworks():
    """The methods of the preset, as they are tuned: equal visits in rounds of other sizes."""
    source = str(ROOT / "experiments/configs/pfedhn.py") + ":digits"
    methods = ["pfedhn", "fedavg", "lg_fedavg", "local"]
    return tune.configured(source, pfedhn.get_config("digits"), {}, methods)


def each_of(function, made):
    return [function(config) for config in made.values()]


def test_presets_keep_their_ratio_of_client_visits(hypernetworks):
    """pFedHN has 500 rounds of one client, FedAvg 100 of five, on purpose."""
    made = hypernetworks
    assert each_of(trials.visits, made) == [500, 500, 600, 40]
    search.plan(made, ["learning_rate=.1"], None, None, as_preset=True)
    assert each_of(trials.visits, made) == [500, 500, 600, 40]
    assert each_of(trials.evaluations, made) == [4, 4, 4, 4]  # as many as Local's four rounds allow
    search.plan(made, ["learning_rate=.1"], 100, None, as_preset=True)
    assert each_of(trials.cohorts, made) == [[(100, 1)], [(20, 5)], [(20, 5), (4, 5)], [(1, 10)]]
    assert len(set(each_of(trials.evaluations, made))) == 1
    assert show.head({"pfedhn": [], "fedavg": []}, 1, made).endswith(
        "Client visits of a run: pfedhn 100 (100 rounds of 1); fedavg 100 (20 rounds of 5); "
        "lg_fedavg 120 (20 rounds of 5 and 4 rounds of 5); local 10 (1 round of 10)."
    )


def test_rounds_that_would_make_equal_visits_unequal_are_refused(hypernetworks):
    given = hypernetworks, ["learning_rate=.1"], 17, None
    assert message(lambda: search.plan(*given, as_preset=True)) == (
        "17 rounds would give pfedhn 17 client visits and fedavg 15, which have as many otherwise; "
        "give a multiple of 5"
    )


def test_a_length_for_all_methods_alike_does_not_make_budgets_equal(hypernetworks):
    """What --config.rounds=100 does: 100 client visits, and 500, and 600, and 1,000."""
    for config in hypernetworks.values():
        config.update(rounds=100, phases=())
    line = message(search.plan, hypernetworks, ["learning_rate=.1"], None, None)
    assert line.startswith(
        "the methods' runs have different client visits (pfedhn 100, fedavg 500, lg_fedavg 500, "
        "local 1000), and budgets are equal; leave config.clients_per_round and config.rounds to "
        "the presets"
    )


@pytest.mark.parametrize(
    ("rounds", "every", "wanted"),
    [
        ((10, 20), (5, 5), 2),
        ((10, 20), (1, 1), 10),
        ((10, 7), (2, 1), 4),  # of ten rounds five, of seven as many as four
        ((20, 20), (9, 9), 3),
        ((500, 3), (50, 1), 3),
    ],
)
def test_all_methods_have_as_many_evaluations_to_be_best_in(rounds, every, wanted):
    made = {
        str(i): configuration.complete({"rounds": n, "eval_every": e})
        for i, (n, e) in enumerate(zip(rounds, every, strict=True))
    }
    trials.evaluate_alike(made)
    assert each_of(trials.evaluations, made) == [wanted, wanted]
    if len(set(rounds)) == 1:
        assert [one.eval_every for one in made.values()] == list(every)  # as it was


def planned(texts=RATES, methods=("fedavg",), rounds=None, budget=None, **given):
    made = {m: configuration.complete({**SMALL, "algorithm": m, **given}) for m in methods}
    return search.plan(made, texts, rounds, budget)


def test_what_cannot_be_compared_is_refused():
    line = message(lambda: planned(validation_fraction=0.0))
    assert line == (
        "there are no validation examples, by which to choose; set validation_fraction to 0.2"
    )
    assert "learning_rate is -1.0; it must be above 0" in message(planned, ["learning_rate=-1"])
    assert "(fedavg 1, pfedla 2)" in message(planned, ["pfedla.rate=1,2"], ["fedavg", "pfedla"])
    each = {m: configuration.complete({**SMALL, "algorithm": m}) for m in ("fedavg", "local")}
    each["local"].rounds = 7
    for rounds in (None, 2):
        line = message(search.plan, each, RATES, rounds, None)
        assert line.startswith(
            "the methods' runs have different client visits (fedavg 6, local 21), and budgets are "
        )
    each["local"].update(rounds=2, partition_seed=1)
    assert "the preset gives local other examples than fedavg" in message(
        search.plan, each, RATES, None, None
    )


@pytest.fixture
def cached(monkeypatch):
    """What runs are built of is kept between tests, for the checks before them too."""
    once = runner.build
    monkeypatch.setattr(trials, "build", lambda *points, words: once(*points, words=words))


def test_what_only_shows_when_it_is_built_is_said_before_anything_is_written(tmp_path):
    made = planned(["pfedla.normalise=softmax,nothing"], ["pfedla"])
    assert message(trials.run, made, 1, tmp_path, None).startswith("pfedla: ")
    made = planned(validation_fraction=1e-9)
    assert "no client has validation examples" in message(trials.run, made, 1, tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_programs_are_as_few_as_the_method_allows():
    """Whether there is momentum is a choice; both rates, and the seeds, are numbers."""
    (one,) = planned(["momentum=0,.9; learning_rate=.1,.2; batch_size=4,8"])
    jobs = [Job(one.method, point, config, "", frozenset())
            for point, each in trials.configs(one, 1) for config in each]  # fmt: skip
    alike = trials._alike(jobs)
    assert [len(group) for group in alike] == [4, 4]
    found = trials._programs(alike[0])
    assert [[job.point["momentum"] for job in program] for program in found] == [[0, 0], [0.9, 0.9]]
    assert [job.point["learning_rate"] for job in found[0]] == [0.1, 0.2]
    assert [len(part) for part in trials._parts(jobs, 3)] == [3, 3, 2]
    assert [len(part) for part in trials._parts(jobs, None)] == [8]


def test_a_number_that_shapes_the_program_makes_several():
    (one,) = planned(["learning_rate=.1,.2; pfedpara.gamma=.1,.9"], ["pfedpara"])
    jobs = [Job(one.method, point, config, "", frozenset())
            for point, each in trials.configs(one, 1) for config in each]  # fmt: skip
    (alike,) = trials._alike(jobs)
    found = [[tuple(job.point.values()) for job in program] for program in trials._programs(alike)]
    assert found == [[(0.1, 0.1), (0.2, 0.1)], [(0.1, 0.9), (0.2, 0.9)]]


def test_what_stands_at_other_rounds_goes_on_in_a_program_of_its_own():
    saved = {"a": (1, 2), "b": (), "c": (2, 3), "d": (5,), "e": (), "f": (3,)}
    point = {"learning_rate": 0.1}
    jobs = [Job("fedavg", point, None, name, frozenset(at)) for name, at in saved.items()]
    found = [[job.name for job in group] for group in trials._alike(jobs)]
    assert found == [["a", "c"], ["b", "e"], ["d"], ["f"]]


# Real training.


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Rates of which one is clearly right, for two methods and two seeds."""
    out = tmp_path_factory.mktemp("tune") / "out"
    made = planned(methods=["fedavg", "local"])
    assert search.tune(made, seeds=2, out=out, texts=RATES) == 0
    return made, out


def test_the_rate_that_learns_is_chosen(tuned):
    made, out = tuned
    rows = list(csv.DictReader((out / "tune.csv").read_text().splitlines()))
    best = {row["method"]: row for row in rows if row["chosen"] == "1"}
    assert {m: row["learning_rate"] for m, row in best.items()} == {"fedavg": "0.1", "local": "0.1"}
    means = [float(row["validation_mean"]) for row in rows]
    assert means[0] > means[1] + 0.2
    assert means[2] > means[3] + 0.2
    assert {p.name for p in out.iterdir()} == {
        "fedavg", "local", "tune.txt", "tune.md", "tune.csv", "tune.png", "tune.html", "tuned.py"
    }  # fmt: skip
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
    path = Known(out).find(configuration.complete({**SMALL, "learning_rate": 0.1, "seed": 1}))[1]
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
    monkeypatch.setattr(runner, "run_points", forbidden)
    search.tune(made, seeds=2, out=out, texts=RATES)
    shown = capsys.readouterr()
    assert "8 runs: 8 are there, 0 go on, 0 are missing\n" in shown.err
    assert f"Chosen: --config={out / 'tuned.py'}:METHOD" in shown.out
    assert contents(out) == before


def test_only_show_neither_runs_nor_writes(tuned, monkeypatch, capsys, tmp_path):
    made, out = tuned
    monkeypatch.setattr(runner, "run_points", forbidden)
    before = contents(out)
    search.tune(made, seeds=3, out=out, only_show=True)
    assert "2 of its runs are missing" in capsys.readouterr().out
    assert contents(out) == before
    search.tune(made, seeds=1, out=tmp_path / "none", only_show=True)
    assert capsys.readouterr().out.count("not run") == 4
    assert not (tmp_path / "none").exists()


def test_another_grid_uses_the_runs_that_are_there(tuned, monkeypatch, cached):
    _, out = tuned
    asked = []
    monkeypatch.setattr(runner, "run_points", lambda points, *_, **__: asked.extend(points))
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
    search.tune(made, seeds=2, out=tmp_path / "out")
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
    assert "0 are there, 0 go on, 4 are missing, in 1 program\n" in capsys.readouterr().err
    assert choice.chosen(trials.collect(made[0], 2, tmp_path)) is None
    trials.run(made, 2, tmp_path, None)
    assert "0 are there, 4 go on, 0 are missing, in 1 program\n" in capsys.readouterr().err
    for path in (tmp_path / "fedavg").iterdir():
        assert untimed(read_metrics(path)) == untimed(read_metrics(out / "fedavg" / path.name))


def slowed(model, task, training, federation, *, share: float = 0.5):
    rate = training.rate
    slower = training._replace(rate=lambda t: share * rate(t))
    return algorithms.fedavg(model, task, slower, federation)


def tune_slowed(out, grid, **given):
    config = {**SMALL, "learning_rate": 0.2, "seed": 5, "evaluate_after": False}
    return own.tune(config, grid, out, methods=["slowed", "fedavg"], algorithm=slowed, **given)


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
    words, given = added(found["slowed"], algorithm=slowed)
    configuration.specify(configuration.complete(given, words), words)
    # A second time, all runs are known.
    monkeypatch.setattr(runner, "run_points", forbidden)
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
    line = message(lambda: own.tune(SMALL, {"learning_rate": [1]}, methods="fedavg"))
    assert line == "methods is 'fedavg'; give a list of names"
    assert not (tmp_path / "none").exists()
    line = message(lambda: own.tune(SMALL, {"learning_rate": [1]}, methods=["slowed"]))
    assert line.startswith("there is no method 'slowed'; ")


def test_the_command_ends_with_one_line(tmp_path):
    command = [sys.executable, "-m", "experiments.tune", "--grid=learning_rate=.1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == ("error: there are no validation examples, by which to choose; set "
                            "validation_fraction to 0.2\n")  # fmt: skip
    assert list(tmp_path.iterdir()) == []
