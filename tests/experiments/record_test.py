"""Tests of `record`, which finds finished runs by their settings and writes cells and pictures."""

import json

import pytest

from experiments import reproduce
from experiments.papers import agreement, picture, record
from experiments.papers.table import cells_of
from experiments.papers.tables import TABLES
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.settings import configuration
from tests.commands import Flags
from tests.report.comparison_test import write_run as write_comparison_run

pytestmark = pytest.mark.slow("runs of a small table")

NAME = "pfedla/table1"
TABLE = {NAME: TABLES[NAME]._replace(variants=("ditto",))}
HEAD = {"about": "ours", "cells": []}


def write_run(path, row, score, rounds=(5, 10), finished=True, **changes):
    """Writes a run directory with the settings of pFedLA's table 1, CIFAR-10, ten clients."""
    config = TABLES[NAME].settings(row, "cifar10-n10", "cifar10", None)
    config.update({"rounds": rounds[-1], "seed": 0} | changes)
    settings = json.loads(json.dumps(configuration.resolve(config)))
    return write_comparison_run(path, [score] * 3, settings, finished, rounds=rounds)


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "cells.json").write_text(json.dumps(HEAD))
    return folder


def cells(results):
    """Returns the recorded cells by row, and the lines of the file."""
    text = (results / "cells.json").read_text()
    record = json.loads(text)
    assert record["about"] == "ours"
    return {cell["row"]: cell for cell in record["cells"]}, text.splitlines()


@pytest.mark.slow("compares with the settings of all tables")
def test_a_seed_that_counts_later_keeps_its_partition(tmp_path, results):
    """Seed 0 is first shorter than seed 1 and evaluated in no common round, so it is left out."""
    for folder, runs in (("a", {0: (5,), 1: (10, 20)}), ("b", {2: (5,)})):
        (tmp_path / folder).mkdir()
        for seed, rounds in runs.items():
            write_run(tmp_path / folder / str(seed), "local", 0.6, rounds, seed=seed)
        record.record(TABLE, tmp_path / folder, results)
    cell = cells(results)[0]["local"]
    assert (cell["rounds"], list(cell["measured"])) == (5, ["0", "2"])
    (read,) = agreement.read(results, TABLE)
    assert read.partitions == 1


@pytest.mark.slow("compares with the settings of all tables")
def test_runs_are_cells_by_their_settings(tmp_path, results):
    runs = tmp_path / "runs"
    runs.mkdir()
    write_run(runs / "a", "local", 0.6, eval_every=5, data_dir="elsewhere")
    (runs / "a" / "provenance.json").write_text('{"commit": "abc1234", "versions": "jax 1"}')
    write_run(runs / "b", "local", 0.7, seed=2, partition_seed=2)
    write_run(runs / "c", "pfedla", 0.8, rounds=(10, 20))
    write_run(runs / "d", "pfedla", 0.1, rounds=(5,), seed=1)  # shorter
    write_run(runs / "e", "fedavg", 0.1, learning_rate=0.5)  # not the published settings
    write_run(runs / "f", "fedrep", 0.1, finished=False)
    write_run(runs / "g", "ditto", 0.9)  # a row that is not in the paper
    for name, row, place in (("h", "fedavg", -1), ("i", "local", -1), ("a", "local", 0)):
        if name != "a":  # which has a mean of the remaining clients before the end
            write_run(runs / name, row, 0.4, seed=5, partition_seed=5)
        file = runs / name / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        lines[place]["after"] |= {"accuracy_mean": None if place else 0.9, "not_finite": 9}
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    messages = record.record(TABLE, runs, results)
    assert messages == [
        f"{NAME} local/cifar10-n10: 10 rounds, seeds 0, 2; left out: seeds 5, which diverged",
        f"{NAME} fedavg/cifar10-n10: left out, it diverged",
        f"{NAME} pfedla/cifar10-n10: 20 rounds, seeds 0",
        f"{NAME} ditto/cifar10-n10: 10 rounds, seeds 0",
    ]
    assert (results / "gaps-pfedla.png").stat().st_size > 1000
    recorded, lines = cells(results)
    assert recorded.pop("ditto")["measured"] == {"0": 90.0}
    assert recorded == {
        "local": {
            "table": NAME,
            "row": "local",
            "column": "cifar10-n10",
            "measured": {"0": 60.0, "2": 70.0},
            "second": {"0": 65.0, "2": 75.0},
            "partition_seeds": {"0": 0, "2": 2},
            "rounds": 10,
            "published_rounds": 600,
        },
        "pfedla": {
            "table": NAME,
            "row": "pfedla",
            "column": "cifar10-n10",
            "measured": {"0": 80.0},
            "second": {"0": 85.0},
            "partition_seeds": {"0": 0, "1": 0},  # seed 1 is in the curves
            "rounds": 20,
            "published_rounds": 600,
        },
    }
    assert len(lines) == 6  # one for each cell, and three around them
    curve_file = json.loads((results / "pfedla-table1-full.json").read_text())
    curve = curve_file["curves"]["local/cifar10-n10"]["0"]
    assert curve == {
        "commit": "abc1234",
        "versions": "jax 1",
        "round": [10],
        "before": [60.0],
        "after": [65.0],
        "best_round": None,
        "megabytes": 25.0,
    }
    assert curve_file["curves"]["local/cifar10-n10"]["2"]["commit"] == "unknown"
    assert (results / "pfedla-table1-full.png").is_file()
    summary = agreement.summary(results, TABLE)
    assert "76 numbers. 2 were run" in summary  # the variant has no published number
    (comparison,) = agreement.comparison(results, TABLE, NAME, ["cifar10-n10"], ["ditto"])
    assert comparison.rows == []
    assert comparison.variants == [["ditto", "-", "90.00", "95.00", "1", "1", "10 of 600", "-"]]
    assert "ditto" not in agreement.not_run(results, TABLE, NAME, ["emnist_digits-n10"])

    # Later runs: another seed is added, a longer run replaces one, a shorter run is left out.
    later = tmp_path / "later"
    later.mkdir()
    write_run(later / "a", "local", 0.5, seed=1)
    write_run(later / "c", "local", 0.6, seed=2)
    write_run(later / "d", "local", 0.7, seed=2, partition_seed=2)
    write_run(later / "e", "local", 0.8, seed=2, partition_seed=1)
    write_run(later / "b", "pfedla", 0.9, rounds=(10, 20, 30), seed=1)
    assert record.record(TABLE, later, results) == [
        f"{NAME} local/cifar10-n10: 10 rounds, seeds 0, 1, 2",
        f"{NAME} pfedla/cifar10-n10: 20 rounds, seeds 0, 1",
    ]
    recorded, _ = cells(results)
    assert recorded["local"]["measured"] == {"0": 60.0, "1": 50.0, "2": 70.0}
    assert recorded["local"]["partition_seeds"] == {"0": 0, "1": 0, "2": 2}
    assert recorded["pfedla"]["measured"] == {"0": 80.0, "1": 60.0}  # two thirds of 90
    assert recorded["pfedla"]["rounds"] == 20
    curves = json.loads((results / "pfedla-table1-full.json").read_text())["curves"]
    assert {label: [*by_seed] for label, by_seed in curves.items()} == {
        "local/cifar10-n10": ["0", "1", "2"],
        "pfedla/cifar10-n10": ["0", "1"],
        "ditto/cifar10-n10": ["0"],
    }
    shorter = tmp_path / "shorter"
    shorter.mkdir()
    write_run(shorter / "a", "pfedla", 0.1, rounds=(5, 10), seed=1)
    (message,) = record.record(TABLE, shorter, results)
    assert message == f"{NAME} pfedla/cifar10-n10: left out, longer runs are recorded"
    assert cells(results)[0] == recorded


def test_accuracies_are_those_at_the_last_round_of_three_seeds(tmp_path, results):
    """Two seeds stop at round 10; later three have reached 20. Accuracies grow linearly."""
    runs = tmp_path / "runs"
    runs.mkdir()
    for seed, (score, rounds) in enumerate([(0.8, (10, 20, 30)), (0.6, (5, 10)), (0.7, (5, 10))]):
        write_run(runs / str(seed), "local", score, rounds=rounds, seed=seed)
    assert record.record(TABLE, runs, results) == [
        f"{NAME} local/cifar10-n10: 10 rounds, seeds 0, 1, 2"
    ]
    assert cells(results)[0]["local"]["measured"] == {"0": 26.67, "1": 60.0, "2": 70.0}
    write_run(runs / "3", "local", 0.9, rounds=(10, 20), seed=3)
    write_run(runs / "1" / "longer", "local", 0.5, rounds=(10, 20), seed=1)
    assert record.record(TABLE, runs, results) == [
        f"{NAME} local/cifar10-n10: 20 rounds, seeds 0, 1, 3"
    ]
    assert cells(results)[0]["local"]["measured"] == {"0": 53.33, "1": 50.0, "3": 90.0}
    assert cells(results)[0]["local"]["partition_seeds"] == {"0": 0, "1": 0, "2": 0, "3": 0}


def test_one_run_is_recorded_in_all_of_its_cells(tmp_path, results):
    """Table 3 without retained layers is pFedLA's cell of table 1."""
    write_run(tmp_path / "runs", "pfedla", 0.8)
    write_run(
        tmp_path / "runs" / "longer", "pfedla", 0.9, rounds=(60, 600)
    )  # bytes are of 75 rounds
    tables = {name: TABLES[name] for name in (NAME, "pfedla/table3")}
    assert record.record(tables, tmp_path / "runs", results) == [
        f"{NAME} pfedla/cifar10-n10: 600 rounds, seeds 0",
        "pfedla/table3 k=0/cifar10-accuracy: 600 rounds, seeds 0",
        "pfedla/table3 k=0/cifar10-MiB: 10 rounds, seeds 0",
    ]


def test_only_the_longest_runs_count_if_a_measure_is_known_at_the_end_alone(tmp_path, results):
    tables = {"pfedla/table3": TABLES["pfedla/table3"]}
    cell = "pfedla/table3 k=0/cifar10-"
    write_run(tmp_path / "runs" / "0", "pfedla", 0.8, rounds=(5, 10), seed=0)
    record.record(tables, tmp_path / "runs", results)
    write_run(tmp_path / "runs" / "1", "pfedla", 0.8, rounds=(10, 20), seed=1)
    assert record.record(tables, tmp_path / "runs", results) == [
        f"{cell}accuracy: 10 rounds, seeds 0, 1",
        f"{cell}MiB: 20 rounds, seeds 1",
    ]
    write_run(tmp_path / "later", "pfedla", 0.8, rounds=(5, 15), seed=0)
    left_out = f"{cell}MiB: left out, longer runs are recorded"
    assert record.record(tables, tmp_path / "later", results)[1] == left_out


def test_a_longer_seed_continues_as_a_thin_line():
    stages = {"after": [1.0] * 3}
    curves = {
        "local/cifar10-n10": {
            "0": {"round": [5, 10, 20], "before": [30.0, 60.0, 62.0], **stages},
            "1": {"round": [5, 10], "before": [40.0, 70.0], "after": [1.0] * 2},
        }
    }
    (axes,) = picture.picture(NAME, TABLE[NAME], curves).axes
    mean, longer = axes.lines[:2]
    assert mean.get_xydata().tolist() == [[5, 35], [10, 65]]
    assert longer.get_xydata().tolist() == [[10, 60], [20, 62]]
    assert longer.get_linewidth() < mean.get_linewidth()
    assert longer.get_color() == mean.get_color()


def test_picture_has_our_curves_and_the_published_numbers():
    """Lines are means over seeds. Both seeds of Local were evaluated at rounds 5 and 10."""
    curves = {
        "local/cifar10-n10": {
            "0": {"round": [5, 10], "before": [30.0, 60.0], "after": [1.0, 1.0]},
            "1": {"round": [2, 5, 10], "before": [9.0, 40.0, 70.0], "after": [1.0, 1.0, 1.0]},
        },
        "pfedla/cifar10-n10": {"0": {"round": [10], "before": [65.0], "after": [1.0]}},
        "local/emnist_digits-n10": {"0": {"round": [10], "before": [90.0], "after": [1.0]}},
        "ditto/emnist_digits-n10": {"0": {"round": [10], "before": [91.0], "after": [1.0]}},
    }
    sheet = picture.picture(NAME, TABLE[NAME], curves)
    emnist, cifar = sheet.axes
    assert [axes.get_title() for axes in sheet.axes] == ["emnist_digits-n10", "cifar10-n10"]
    lines = {line.get_label(): line.get_xydata().tolist() for line in cifar.lines[:2]}
    assert lines == {"local": [[5, 35], [10, 65]], "pfedla": [[10, 65]]}
    (local, pfedla), (emnist_local,) = cifar.containers, emnist.containers
    heights = [line[0].get_ydata().tolist() for line in (local, pfedla, emnist_local)]
    assert heights == [[59.44], [61.43], [89.01]]
    assert local[0].get_color() == emnist_local[0].get_color() != pfedla[0].get_color()
    # The axes hold the published and our last values: 59.04 to 70, and 88.54 to 91. The start of
    # Local at 35 is cut off.
    assert cifar.get_ylim() == pytest.approx((59.04 - 10.96, 70 + 1.096))
    assert emnist.get_ylim() == pytest.approx((88.54 - 0.4, 91 + 0.4))
    assert emnist.lines[1].get_xydata().tolist() == [[10, 91]]
    labels = [text.get_text() for text in sheet.legends[0].get_texts()]
    assert labels == ["local", "pfedla", "ditto (variant of this library)"]


def test_lines_and_points_of_ten_rows_differ():
    rows = [row for row in TABLE[NAME].cells if row != "fedbn"]
    curve = {"0": {"round": [5, 10], "before": [90.0, 91.0], "after": [1.0, 1.0]}}
    curves = {f"{row}/emnist_digits-n10": curve for row in rows}
    (axes,) = picture.picture(NAME, TABLE[NAME], curves).axes
    lines = axes.lines[: len(rows)]
    points = [container[0] for container in axes.containers]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(rows) == 9
    assert len({(point.get_color(), point.get_marker()) for point in points}) == 9
    assert axes.get_xticks().max() <= 10.25  # no ticks below the points, which have no round


def test_panels_of_one_dataset_have_one_scale():
    """Published for ten and for a hundred clients: 89.01 ± .47 and 91.25 ± .18.

    The start of a curve is cut off if it is far below the end, but not if it is above the end.
    """
    by_seed = {
        "0": {"round": [2, 3, 5, 10], "before": [10.0, 95.0, 90.0, 90.0], "after": [1.0] * 4}
    }
    curves = {
        f"local/{column}": by_seed
        for column in ("emnist_digits-n10", "emnist_digits-n100", "cifar10-n10")
    }
    ten, hundred, cifar = picture.picture(NAME, TABLE[NAME], curves).axes
    assert ten.get_ylim() == hundred.get_ylim() == pytest.approx((88.54 - 6.46, 95 + 0.646))
    assert cifar.get_ylim() != ten.get_ylim()
    # The axes end just below the lowest value of the dataset, 87 at the start.
    level = {"0": {"round": [2, 3, 5, 10], "before": [90.0] * 4}}
    below = {"0": {"round": [2, 3, 5, 10], "before": [87.0, 90.0, 90.0, 90.0]}}
    curves = {"local/emnist_digits-n10": level, "local/emnist_digits-n100": below}
    ten, hundred = picture.picture(NAME, TABLE[NAME], curves).axes
    assert ten.get_ylim() == hundred.get_ylim() == pytest.approx((87 - 0.4, 91.43 + 0.4))


def test_a_diverged_run_of_a_table_of_best_rounds_is_left_out(tmp_path, results):
    name = "pfedhn/table1"
    cell = cells_of(TABLES[name])[0]
    dataset = TABLES[name].dataset(cell.column)
    config = TABLES[name].settings(cell.row, cell.column, dataset, None)
    config.update(rounds=10, seed=0)
    settings = json.loads(json.dumps(configuration.resolve(config)))
    run = write_comparison_run(tmp_path / "runs" / "a", [0.4] * 3, settings, rounds=(5, 10))
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace('"before": {', '"before": {"not_finite": 1, '))
    assert record.record({name: TABLES[name]}, tmp_path / "runs", results) == [
        f"{name} {cell.row}/{cell.column}: left out, it diverged"
    ]


def test_bytes_have_no_panel():
    bytes_only = {"k=0/emnist_digits-MiB": {"0": {"round": [10], "before": [65.0]}}}
    table = TABLES["pfedla/table3"]
    assert picture.picture("pfedla/table3", table, bytes_only) is None
    curves = {**bytes_only, "k=0/emnist_digits-accuracy": bytes_only["k=0/emnist_digits-MiB"]}
    (axes,) = picture.picture("pfedla/table3", table, curves).axes
    assert axes.get_title() == "emnist_digits-accuracy"


def test_diagnostics_are_recorded_and_null_if_missing(tmp_path, results):
    """`moving` is null at the first evaluation, because it compares with the previous one."""
    run = write_run(tmp_path / "runs", "pfedla", 0.8)
    first, last = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    first["diagnostics"] = {"one_hot": 0.5, "peers": {"conv1": 3.21}}
    last["diagnostics"] = {"one_hot": 1.0, "peers": {"conv1": 1.0}, "moving": 0.0}
    last["diagnostics"]["rank"] = {"fc1": 0.25}
    (run / "metrics.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n")
    record.record(TABLE, tmp_path / "runs", results)
    curve_file = json.loads((results / "pfedla-table1-full.json").read_text())
    curve = curve_file["curves"]["pfedla/cifar10-n10"]["0"]
    assert curve["one_hot"] == [0.5, 1.0]
    assert curve["peers"] == {"conv1": [3.21, 1.0]}
    assert curve["moving"] == [None, 0.0]
    assert curve["rank"] == {"fc1": [None, 0.25]}


def test_nothing_is_written_without_finished_runs(tmp_path, results):
    write_run(tmp_path / "runs", "local", 0.6, finished=False)
    with pytest.raises(UsageError, match="runs has no finished run of a published cell"):
        record.record(TABLE, tmp_path / "runs", results)
    assert [path.name for path in results.iterdir()] == ["cells.json"]
    write_run(tmp_path / "runs" / "b", "local", 0.6)
    with pytest.raises(UsageError, match=r"nowhere has no cells\.json: work in a checkout"):
        record.record(TABLE, tmp_path / "runs", tmp_path / "nowhere")
    (results / "pfedla-table1-full.png").mkdir()
    with pytest.raises(UsageError, match="results cannot be written"):
        record.record(TABLE, tmp_path / "runs", results)
    assert cells(results)[0] == {}


def test_the_command_prints_the_recorded_cells(monkeypatch, capsys):
    monkeypatch.setattr(record, "record", lambda tables, folder, results: [f"{folder}: all"])
    monkeypatch.setattr(reproduce.flags, "FLAGS", Flags(record=True, out="runs/full"))
    reproduce.main(["reproduce"])
    assert capsys.readouterr().out == "runs/full: all\n"


def test_recorded_cells_have_the_published_lengths_of_the_tables():
    recorded = agreement.load(agreement.RESULTS)["cells"]
    assert len(recorded) > 90
    for entry in recorded:
        table = TABLES[entry["table"]]
        place = (entry["row"], entry["column"])
        cell = next(c for c in cells_of(table) if (c.row, c.column) == place)
        assert entry["published_rounds"] == record.published_rounds(table, cell), place
