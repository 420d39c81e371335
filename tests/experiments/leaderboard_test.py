"""The leaderboard: what is planned, how lines are ranked and shown, and one that is made."""

import re

import pytest

from experiments import leaderboard
from fedjax_pfl.algorithms import METHODS
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


WHOLE = {
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
def test_every_method_is_tried_at_as_many_points_of_what_it_has(methods):
    """Four each; where it has settings of its own in the grid they are among what is tried."""
    each = leaderboard.configured(leaderboard.COLUMNS["digits"], methods)
    made = leaderboard.plan(each, 4)
    assert {trial.method: len(trial.points) for trial in made} == dict.fromkeys(each, 4)
    for trial in made:
        own = {key for point in trial.points for key in point if "." in key}
        assert bool(own) == (trial.method in leaderboard.GRIDS), trial.method
    assert set(leaderboard.GRIDS) < set(configuration.ALGORITHMS)
    assert each["fedbn"].small.batch_norm
    assert not each["fedavg"].small.batch_norm
    (small,) = leaderboard.configured(leaderboard.COLUMNS["mnist"], ["fedbn"]).values()
    assert (small.model, small.small.kernels, small.classes.examples) == ("small", (4, 8), 200)
    assert small.small.batch_norm


def test_ranks_and_cells():
    (first, *others) = board.ranked(WHOLE["columns"]["digits"]["methods"])
    assert [first[0], *(name for name, _ in others)] == ["ditto", "local", "fedbn", "fedavg"]
    rows = board.table("digits", WHOLE["columns"]["digits"]).rows
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
    assert "mnist" not in board.text(WHOLE)
    assert board.text({"columns": {}}) == "no method has finished yet"


def test_variants_of_this_library_stand_below_a_line(monkeypatch):
    monkeypatch.setitem(METHODS, "ditto", METHODS["ditto"]._replace(variant_of=METHODS["fedavg"]))
    column = WHOLE["columns"]["digits"]
    table = board.table("digits", column)
    assert [row[0] for row in table.rows] == ["Local", "FedBN", "FedAvg"]
    assert [row[0] for row in table.variants] == ["Ditto (variant of this library)"]
    axes = board.draw("digits", column).figure.axes[0]
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == ["Ditto (variant of this library)", "FedAvg", "Local"]
    assert [line.get_ydata() for line in axes.lines if len(set(line.get_ydata())) == 1][-1] == [
        0.5,
        0.5,
    ]
    page = board.page(WHOLE)
    assert (
        page.index(">Local</th>") < page.index("Variants of this library:") < page.index("Ditto (")
    )


def test_what_is_written(tmp_path):
    board.write(WHOLE, tmp_path)
    page = (tmp_path / "leaderboard.html").read_text()
    assert "it has no &lt;BatchNorm&gt;" in page
    assert "commit abc1234, abc1235" in page
    assert not re.search(r"(src|href)=\"http", page)
    drawn = (tmp_path / "digits.svg").read_text()
    assert drawn.startswith("<?xml")
    assert "Ditto</text>" in drawn
    board.write(WHOLE, tmp_path)
    assert (tmp_path / "digits.svg").read_text() == drawn
    assert "ditto" in board.read(tmp_path)["columns"]["digits"]["methods"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "digits.svg",
        "leaderboard.html",
        "leaderboard.json",
        "leaderboard.txt",
    ]


def test_what_earlier_calls_have_made_stays(tmp_path):
    """Other splits and methods, and the commit of a line that has not changed."""
    assert board.read(tmp_path) == {"columns": {}}
    board.write(WHOLE, tmp_path)
    whole = board.read(tmp_path)
    about = WHOLE["columns"]["digits"]["about"]
    there = board.column(whole, "digits", about)["methods"]
    assert there == board.read(tmp_path)["columns"]["digits"]["methods"]
    again = {key: value for key, value in line(0.8, 0.81).items() if key != "commit"}
    assert board.with_commit(again, "new", there["local"])["commit"] == "abc1234"
    assert board.with_commit(again | {"seconds": 5.0}, "new", there["local"])["commit"] == "new"
    assert board.with_commit(again, "new", None)["commit"] == "new"
    assert board.column(whole, "digits", {**about, "budget": 3})["methods"] == {}
    some = {**about, "settings": {"kernels": (4, 8)}}
    board.column(whole, "cifar10", some)["methods"]["local"] = line(0.5)
    board.write(whole, tmp_path)
    whole = board.read(tmp_path)
    assert list(board.column(whole, "cifar10", some)["methods"]) == ["local"]
    assert "digits-n10, kernels=[4, 8]), 30 rounds" in board.text(whole)
    assert list(whole["columns"]) == ["digits", "mnist", "cifar10"]


@pytest.mark.parametrize("text", ["", "[]", '{"columns": {"digits": {"methods": {"local": {}}}}}'])
def test_a_damaged_file_is_named(text, tmp_path):
    (tmp_path / "leaderboard.json").write_text(text)
    line = message(board.read, tmp_path)
    assert "leaderboard.json is damaged; bring it back from a copy, or move it away" in line
    (tmp_path / "leaderboard.json").rename(tmp_path / "elsewhere")
    assert board.read(tmp_path) == {"columns": {}}


@pytest.mark.parametrize(
    ("flag", "known"), [("columns", leaderboard.COLUMNS), ("methods", {"fedavg": 1})]
)
def test_unknown_names_are_refused(flag, known):
    assert f"--{flag} has 'fedav'" in message(leaderboard.select, ["fedav"], known, flag)
    assert leaderboard.select([], known, flag) == list(known)


@pytest.mark.slow("four small runs; tuning and running are tested where they are")
def test_a_line_is_made_once_and_read_afterwards(tmp_path, monkeypatch):
    column = leaderboard.Column("iris-n3", 2, 1)
    each = leaderboard.configured(column, ["fedavg"])
    (trial,) = leaderboard.plan(each, 2)
    assert leaderboard.run_trial(trial, 2, tmp_path, only_show=True) == {}
    made = leaderboard.run_trial(trial, 2, tmp_path)
    assert (made["seeds"], made["points"]) == ([100, 101], 2)
    assert made["after"]["mean"] > 0.2
    monkeypatch.setattr(choice, "score", lambda run: 0.0)  # the first is chosen then, not run again
    assert leaderboard.run_trial(trial, 2, tmp_path, only_show=True)["points"] == 2
