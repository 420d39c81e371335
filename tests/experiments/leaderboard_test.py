"""Tests of the leaderboard: planned trials, ranking, files, and one line that is run."""

import os
import re
from functools import partial
from types import SimpleNamespace

import pytest

from experiments import leaderboard
from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import leaderboard as board
from fedjax_pfl.runs.tuning import choice
from fedjax_pfl.settings import configuration
from tests.commands import message


def spread(mean, std=0.01):
    return {"mean": mean, "std": std, "seeds": 3}


def line(before, after=None, settings="learning_rate=0.1"):
    return {
        "settings": settings,
        "points": 2,
        "validation": 0.5,
        "seeds": [100, 101, 102],
        "before": spread(before),
        "after": spread(after) if after else {},
        "worst tenth": spread(before - 0.2),
        "megabytes": 12.3456,
        "seconds": 4.5,
        "commit": "abc1234",
    }


RECORD = {
    "columns": {
        "digits": {
            "about": {"words": "digits-n10", "rounds": 30, "local_epochs": 2, "budget": 2},
            "methods": {
                "local": line(0.8, 0.81),
                "fedbn": {"cannot": "it has no <BatchNorm>", "commit": "abc1235"},
                "fedavg": line(float("nan")),
                "ditto": line(0.9, settings="ditto.penalty=0.5"),
            },
        },
        "mnist": {"about": {}, "methods": {}},
    },
}


ALL = pytest.param(
    list(configuration.ALGORITHMS), marks=pytest.mark.slow("a hundred configurations")
)


@pytest.mark.parametrize("methods", [["fedavg", "ditto", "fedbn"], ALL], ids=["three", "all"])
def test_every_method_has_the_same_number_of_trials(methods):
    """Four points for each method. Methods with a grid of their settings vary these settings."""
    configs = leaderboard.configured(leaderboard.COLUMNS["digits"], methods)
    trials = leaderboard.plan(configs, 4)
    assert {trial.method: len(trial.points) for trial in trials} == dict.fromkeys(configs, 4)
    for trial in trials:
        method_settings = {key for point in trial.points for key in point if "." in key}
        assert bool(method_settings) == (trial.method in leaderboard.GRIDS), trial.method
    assert set(leaderboard.GRIDS) < set(configuration.ALGORITHMS)
    assert configs["fedbn"].small.batch_norm
    assert not configs["fedavg"].small.batch_norm
    (small,) = leaderboard.configured(leaderboard.COLUMNS["mnist"], ["fedbn"]).values()
    assert (small.model, small.small.kernels, small.classes.examples) == ("small", (4, 8), 200)
    assert small.small.batch_norm


def test_ranks_and_cells():
    (first, *following) = board.ranked(RECORD["columns"]["digits"]["methods"])
    assert [first[0], *(name for name, _ in following)] == ["ditto", "local", "fedbn", "fedavg"]
    rows = board.table("digits", RECORD["columns"]["digits"]).rows
    assert rows[0] == [
        "Ditto",
        "90.00 ± 1.00",
        "–",
        "70.00 ± 1.00",
        "12.3",
        "4.5",
        "ditto.penalty=0.5",
    ]
    assert rows[2] == ["FedBN", *"–––––", "it has no <BatchNorm>"]
    assert "mnist" not in board.text(RECORD)
    assert board.text({"columns": {}}) == "no method has finished yet"


def test_another_number_of_seeds_is_shown():
    """Two methods have three seeds; the third has one, so its score has no deviation."""
    single = {**line(0.7), "seeds": [100], "before": spread(0.7, None)}
    methods = {**RECORD["columns"]["digits"]["methods"], "fedper": single}
    column = {**RECORD["columns"]["digits"], "methods": methods}
    table = board.table("digits", column)
    labels = {row[0]: row[1] for row in table.rows}
    assert labels["FedPer, 1 seed"] == "70.00"
    assert {"Ditto", "Local", "FedBN", "FedAvg"} < set(labels)
    assert "over 3 seeds unless stated otherwise. Settings" in table.caption
    ticks = board.draw("digits", column).figure.axes[0].get_yticklabels()
    assert "FedPer, 1 seed" in [text.get_text() for text in ticks]
    caption = board.table("digits", RECORD["columns"]["digits"]).caption
    assert "accuracy in per cent, mean ± sample standard deviation over 3 seeds. Set" in caption
    lines = {"local": line(0.8) | {"seeds": [100]}}
    column = {"about": RECORD["columns"]["digits"]["about"], "methods": lines}
    assert "accuracy in per cent, of 1 seed. Set" in board.table("digits", column).caption
    assert board.draw("digits", column).figure.axes[0].get_xlabel() == "accuracy (%), of 1 seed"


def test_variants_of_this_library_stand_below_a_line(monkeypatch):
    monkeypatch.setitem(METHODS, "ditto", METHODS["ditto"]._replace(variant_of=METHODS["fedavg"]))
    column = RECORD["columns"]["digits"]
    table = board.table("digits", column)
    assert [row[0] for row in table.rows] == ["Local", "FedBN", "FedAvg"]
    assert [row[0] for row in table.variants] == ["Ditto (variant of this library)"]
    picture = board.draw("digits", column)
    assert picture.alt.endswith("best before training is Ditto (variant of this library).")
    axes = picture.figure.axes[0]
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == ["Ditto (variant of this library)", "FedAvg", "Local"]
    assert [line.get_ydata() for line in axes.lines if len(set(line.get_ydata())) == 1][-1] == [
        0.5,
        0.5,
    ]
    page = board.page(RECORD)
    assert (
        page.index(">Local</th>") < page.index("Variants of this library:") < page.index("Ditto (")
    )


def test_files_of_the_leaderboard(tmp_path):
    board.write(RECORD, tmp_path)
    page = (tmp_path / "leaderboard.html").read_text()
    assert "it has no &lt;BatchNorm&gt;" in page
    assert "commit abc1234, abc1235" in page
    assert not re.search(r"(src|href)=\"http", page)
    svg = (tmp_path / "digits.svg").read_text()
    assert svg.startswith("<?xml")
    assert "Ditto</text>" in svg
    board.write(RECORD, tmp_path)
    assert (tmp_path / "digits.svg").read_text() == svg
    assert "ditto" in board.read(tmp_path)["columns"]["digits"]["methods"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "digits.svg",
        "leaderboard.html",
        "leaderboard.json",
        "leaderboard.txt",
    ]


def test_results_of_earlier_calls_stay(tmp_path):
    """Keeps other splits and methods, and the commit of a line that has not changed."""
    assert board.read(tmp_path) == {"columns": {}}
    board.write(RECORD, tmp_path)
    record = board.read(tmp_path)
    about = RECORD["columns"]["digits"]["about"]
    methods = board.column(record, "digits", about)["methods"]
    assert methods == board.read(tmp_path)["columns"]["digits"]["methods"]
    same_line = {key: value for key, value in line(0.8, 0.81).items() if key != "commit"}
    assert board.with_commit(same_line, "new", methods["local"])["commit"] == "abc1234"
    assert (
        board.with_commit(same_line | {"seconds": 5.0}, "new", methods["local"])["commit"] == "new"
    )
    assert board.with_commit(same_line, "new", None)["commit"] == "new"
    assert board.column(record, "digits", {**about, "budget": 3})["methods"] == {}
    changed_about = {**about, "settings": {"kernels": (4, 8)}}
    board.column(record, "cifar10", changed_about)["methods"]["local"] = line(0.5)
    board.write(record, tmp_path)
    record = board.read(tmp_path)
    assert list(board.column(record, "cifar10", changed_about)["methods"]) == ["local"]
    assert "digits-n10, kernels=[4, 8]), 30 rounds" in board.text(record)
    assert list(record["columns"]) == ["digits", "mnist", "cifar10"]


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Calls the command with runs that take no time; `during_run` happens while one trains."""

    def call(during_run=lambda: None, **options):
        def run_trial(*_, **__):
            during_run()
            return line(0.7)

        values = {"columns": ["digits"], "methods": ["fedavg"], "budget": 4, "seeds": 3}
        values |= {"out": str(tmp_path), "only_show": False, "data_dir": None} | options
        monkeypatch.setattr(leaderboard, "run_trial", run_trial)
        monkeypatch.setattr(leaderboard.flags, "FLAGS", SimpleNamespace(**values))
        with pytest.raises(SystemExit):
            leaderboard.main(["leaderboard"])
        columns = board.read(tmp_path)["columns"]
        return {name: (c["about"]["budget"], list(c["methods"])) for name, c in columns.items()}

    return call


def test_a_line_has_the_commit_of_the_library(call, tmp_path, monkeypatch):
    """It is read in the root of the repository."""
    monkeypatch.setattr(leaderboard.rivals, "commit", lambda path: str(sorted(os.listdir(path))))
    call()
    commit = board.read(tmp_path)["columns"]["digits"]["methods"]["fedavg"]["commit"]
    assert "'setup.cfg'" in commit


def test_calls_at_the_same_time_keep_each_others_lines(call):
    during_run = partial(call, columns=["mnist"], methods=["ditto"])
    during_run = partial(call, during_run, methods=["local"])
    assert call(during_run) == {"mnist": (4, ["ditto"]), "digits": (4, ["local", "fedavg"])}


def test_an_error_replaces_no_scores(call, tmp_path, capsys):
    """On another machine the data may be missing; the first error of a method is its line."""

    def fail():
        raise UsageError("no data")

    call()
    assert call(fail, methods=["fedavg", "ditto"]) == {"digits": (4, ["fedavg", "ditto"])}
    lines = board.read(tmp_path)["columns"]["digits"]["methods"]
    assert lines["fedavg"]["seeds"]
    assert lines["ditto"]["cannot"] == "no data"
    assert "digits: fedavg: no data" in capsys.readouterr().err


def test_another_budget_is_refused_before_any_run(call, tmp_path):
    """The results of a split would else be dropped; other splits are free."""
    call()
    values = {"columns": ["mnist", "digits"], "methods": ["ditto"], "budget": 8}
    line = message(partial(call, lambda: pytest.fail("a run has started"), **values))
    assert line == (
        f"{tmp_path} has results of digits with budget 4, not 8; give --budget=4 or another --out"
    )
    assert call(columns=["mnist"], budget=8) == {
        "digits": (4, ["fedavg"]),
        "mnist": (8, ["fedavg"]),
    }


def test_fewer_seeds_are_refused_before_any_run(call, tmp_path):
    """A method with more seeds keeps them; others are free."""
    call()
    values = {"methods": ["ditto", "fedavg"], "seeds": 1}
    line = message(partial(call, lambda: pytest.fail("a run has started"), **values))
    assert line == (
        f"{tmp_path} has results of fedavg on digits with 3 seeds, not 1; give --seeds=3, other "
        "--methods or another --out"
    )
    call(only_show=True, **values)
    assert call(methods=["ditto"], seeds=1) == {"digits": (4, ["fedavg", "ditto"])}


def test_only_show_writes_nothing(call, tmp_path, capsys):
    call()
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert call(only_show=True) == {"digits": (4, ["fedavg"])}
    assert "best of 4" in " ".join(capsys.readouterr().out.split())
    line = message(partial(call, only_show=True, budget=3))
    assert line == (
        f"{tmp_path} has results of digits with budget 4, not 3; give --budget=4 or another --out"
    )
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize("text", ["", "[]", '{"columns": {"digits": {"methods": {"local": {}}}}}'])
def test_a_damaged_file_is_named(text, tmp_path):
    (tmp_path / "leaderboard.json").write_text(text)
    line = message(board.read, tmp_path)
    assert "leaderboard.json is damaged; bring it back from a copy, or move it away" in line
    (tmp_path / "leaderboard.json").rename(tmp_path / "elsewhere")
    assert board.read(tmp_path) == {"columns": {}}


@pytest.mark.parametrize(
    ("flag", "choices"), [("columns", leaderboard.COLUMNS), ("methods", {"fedavg": 1})]
)
def test_unknown_names_are_refused(flag, choices):
    assert f"--{flag} has 'fedav'" in message(leaderboard.select, ["fedav"], choices, flag)
    assert leaderboard.select([], choices, flag) == list(choices)


@pytest.mark.slow("four small runs; tuning and running have tests of their own")
def test_a_finished_line_is_not_run_again(tmp_path, monkeypatch):
    column = leaderboard.Column("iris-n3", 2, 1)
    configs = leaderboard.configured(column, ["fedavg"])
    (trial,) = leaderboard.plan(configs, 2)
    assert leaderboard.run_trial(trial, 2, tmp_path, only_show=True) == {}
    result = leaderboard.run_trial(trial, 2, tmp_path)
    assert (result["seeds"], result["points"]) == ([100, 101], 2)
    assert result["after"]["mean"] > 0.2
    monkeypatch.setattr(
        choice, "score", lambda run: 0.0
    )  # now the first point is best, and is not run
    assert leaderboard.run_trial(trial, 2, tmp_path, only_show=True)["points"] == 2
    monkeypatch.setattr(choice, "score", lambda run: float("nan"))  # all points diverged
    assert leaderboard.run_trial(trial, 2, tmp_path, only_show=True) == {
        "cannot": "no point of its grid has a finite score"
    }
