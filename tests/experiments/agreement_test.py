"""Tests of the agreement with published numbers, on small worked examples."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.papers import agreement
from experiments.papers.table import Quick, Table
from experiments.papers.tables import TABLES as PAPERS
from fedjax_pfl.core.errors import UsageError

NUMBERS = {
    "fedavg": {"a": [50.0, 3.0], "b": [60.0, 2.0]},
    "local": {"a": [40.0, 0.5], "b": 70.0},
    "pfedla": {"a": [55.0, 1.0], "b": None},
}


def table(numbers: dict) -> Table:
    return Table("", "", numbers, str, None, None, "after", Quick((), 1))  # type: ignore[arg-type]


TABLES = {"paper/table1": table(NUMBERS), "paper/table2": table({"local": {"a": [1.0, 0.1]}})}
SPREAD_OF_4 = (-4.0, 0.0, 4.0)  # sample deviation 4


def cell(row: str, column: str, measured: list[float], rounds: int, **entries: Any) -> dict:
    place = {"table": "paper/table1", "row": row, "column": column}
    by_seed = {str(seed): value for seed, value in enumerate(measured)}
    partitions = entries.pop("partitions", range(len(measured)))
    seeds = {str(seed): partition for seed, partition in enumerate(partitions)}
    lengths = {"rounds": rounds, "published_rounds": 600}
    return place | {"measured": by_seed, "partition_seeds": seeds} | entries | lengths


def write(folder: Path, *cells: dict) -> None:
    (folder / "cells.json").write_text(json.dumps({"cells": cells}))


@pytest.fixture
def folder(tmp_path):
    """Six cells, three of them with three seeds."""
    write(
        tmp_path,
        cell("fedavg", "a", [55 + x for x in SPREAD_OF_4], 600, partitions=[0, 0, 0]),
        cell("local", "a", [41.0, 40.2, 40.6], 60),
        cell("pfedla", "a", [55.0], 60),
        cell("fedavg", "b", [57.0], 600, second={"0": 58.0}),
        cell("local", "b", [70.0, 70.0, 70.0], 600),
        cell("pfedla", "b", [1.0], 600),  # no published number
    )
    return tmp_path


def verdicts(folder: Path) -> dict[str, str]:
    cells = agreement.read(folder, TABLES)
    return {f"{run_cell.row}/{run_cell.column}": run_cell.verdict for run_cell in cells}


@pytest.mark.parametrize(("gap", "verdict"), [(5.0, "yes"), (5.01, "no"), (-5.0, "yes")])
def test_a_cell_agrees_within_both_deviations_combined(gap, verdict, tmp_path):
    """Published 50 ± 3, ours with deviation 4: the root of 9 + 16 is 5."""
    write(tmp_path, cell("fedavg", "a", [50 + gap + x for x in SPREAD_OF_4], 600))
    assert verdicts(tmp_path) == {"fedavg/a": verdict}


def test_a_cell_of_fewer_than_three_seeds_or_without_a_published_deviation_has_no_verdict(folder):
    write(folder, cell("fedavg", "a", [50.0, 50.0], 600), cell("local", "b", [70.0] * 3, 600))
    assert verdicts(folder) == {"fedavg/a": "few seeds", "local/b": "-"}


def test_summary_counts_cells(folder):
    """Six numbers are published and five were run; two have three seeds and a deviation.

    FedAvg is at 55 ± 4 (published 50 ± 3), Local at 40.6 ± 0.4 (40 ± 0.5): both agree.
    """
    text = agreement.summary(folder, TABLES)
    head = " ".join(text.split("\n\n")[0].split())
    assert head.startswith(
        "The papers' tables have 6 numbers. 5 were run in the paper's settings: 3 at the published "
        "length, 2 shorter. 2 can be judged, and 2 of them agree."
    )
    assert "root of the sum of their squares" in head
    assert "at least three seeds" in head
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "paper/table1 5 3 2 2 of 2 2 of 5 0.6 1 to 3 1 to 3" in rows  # gaps 5, 0.6, 0, -3, 0
    assert "paper/table2 1 0 0" in rows


def test_bytes_have_no_gap_in_points(tmp_path):
    """Of a gap of 1 point and one of 500 MiB, only the first counts."""
    tables = {"paper/table1": table({"local": {"x-accuracy": [50.0, 1.0], "x-MiB": 100.0}})}
    cells = cell("local", "x-accuracy", [51.0], 600), cell("local", "x-MiB", [600.0], 600)
    write(tmp_path, *cells)
    rows = [" ".join(line.split()) for line in agreement.summary(tmp_path, tables).splitlines()]
    assert "paper/table1 2 2 0 1 of 1 1.0 1 1" in rows


def test_comparison_with_published_cells(folder):
    (comparison,) = agreement.comparison(folder, TABLES, "paper/table1", ["a", "b"])
    assert comparison.heads == ["published", "ours", "seeds", "partitions", "rounds", "agrees"]
    assert comparison.rows == [
        ["fedavg, a", "50.00 ± 3.00", "55.00 ± 4.00", "3", "1", "600 of 600", "yes"],
        ["fedavg, b", "60.00 ± 2.00", "57.00", "1", "1", "600 of 600", "few seeds"],
        ["local, a", "40.00 ± 0.50", "40.60 ± 0.40", "3", "3", "60 of 600", "yes"],
        ["local, b", "70.00", "70.00 ± 0.00", "3", "3", "600 of 600", "-"],
        ["pfedla, a", "55.00 ± 1.00", "55.00", "1", "1", "60 of 600", "few seeds"],
        ["pfedla, b", "-", "1.00", "1", "1", "600 of 600", "-"],
    ]
    (two_rows,) = agreement.comparison(folder, TABLES, "paper/table1", ["b"], ["pfedla", "local"])
    assert [row[0] for row in two_rows.rows] == ["pfedla", "local"]
    (second,) = agreement.comparison(folder, TABLES, "paper/table1", ["b"], ["fedavg"])
    assert second.heads[2] == "after"
    assert second.rows[0][3] == "58.00"
    with pytest.raises(UsageError, match="no cell of paper/table1 was run in fedrep, c"):
        agreement.comparison(folder, TABLES, "paper/table1", ["a", "c"], ["local", "fedrep"])


def test_rows_that_were_not_run_are_named(folder):
    """Local was run in both columns; pFedLA has no published number in column b."""
    assert agreement.not_run(folder, TABLES, "paper/table1", ["a", "b"]) == []
    write(folder, cell("local", "a", [41.0], 60))
    assert agreement.not_run(folder, TABLES, "paper/table1", ["a"]) == ["fedavg", "pfedla"]
    assert agreement.not_run(folder, TABLES, "paper/table1", ["b"]) == ["fedavg", "local"]


def test_errors_of_the_cells_file(tmp_path):
    with pytest.raises(UsageError, match=r"has no cells.json"):
        agreement.summary(tmp_path, TABLES)
    write(tmp_path, cell("pfedlo", "a", [1.0], 60))
    with pytest.raises(UsageError, match=r"cells.json: no table has a cell paper/table1/pfedlo/a"):
        agreement.summary(tmp_path, TABLES)
    write(tmp_path, cell("local", "a", [41.0], 60), cell("local", "a", [40.0], 600))
    with pytest.raises(UsageError, match=r"cells.json has paper/table1/local/a twice"):
        agreement.summary(tmp_path, TABLES)


def test_the_papers_tables_have_449_numbers():
    """76 + 76 + 14 of pFedLA, 101 of pFedHN, 32 of FedMN, 72 + 16 + 62 of Factorized-FL."""
    counts = {name: len(agreement.numbers(table)) for name, table in PAPERS.items()}
    assert counts == {
        "pfedla/table1": 76,  # ten methods, eight columns, no FedBN on four of them
        "pfedla/table2": 76,
        "pfedla/table3": 14,  # accuracy and traffic of three and four values of k
        "pfedhn/table1": 56,
        "pfedhn/table2": 30,
        "pfedhn/table3": 12,
        "pfedhn/table4": 3,
        "fedmn/table2": 32,
        # Nine methods: eight accuracies on two datasets and six on the domains; costs, which Local
        # does not have, once for each of the three.
        "factorized_fl/table1": 9 * (8 + 6) + 8 * 3,
    }
    assert sum(counts.values()) == 449
