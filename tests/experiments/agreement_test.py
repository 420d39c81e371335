"""The count of cells that agree with the papers, on a folder made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.papers import agreement
from experiments.papers.table import Quick, Table
from fedjax_pfl.core.errors import UsageError

CELLS = {
    "fedavg": {"a": [50.0, 1.0], "b": [60.0, 2.0]},
    "local": {"a": [40.0, 0.5], "b": 70.0},
    "pfedla": {"a": [55.0, 1.0], "b": None},
}
TABLES = {
    "paper/table1": Table("", "", CELLS, str, None, None, "after", Quick((), 1)),  # type: ignore[arg-type]
}


def cell(row: str, column: str, ours: list[float], rounds: int, **more: Any) -> dict:
    where = {"table": "paper/table1", "row": row, "column": column}
    seeds = {str(seed): value for seed, value in enumerate(ours)}
    return where | {"ours": seeds} | more | {"rounds": rounds, "published_rounds": 600}


def write(folder: Path, *cells: dict) -> None:
    (folder / "cells.json").write_text(json.dumps({"cells": cells}))


@pytest.fixture
def folder(tmp_path):
    """Of four cells with a spread two agree, one at its edge and at the published length."""
    write(
        tmp_path,
        cell("fedavg", "a", [51.0, 51.0], 600, beside={"0": 52.0, "1": 53.0}),
        cell("local", "a", [41.0, 40.2, 40.6], 60),
        cell("pfedla", "a", [54.5], 60),
        cell("fedavg", "b", [57.0], 600, beside={"0": 58.0}),
        cell("local", "b", [70.0], 600),
        cell("pfedla", "b", [1.0], 600),
    )
    return tmp_path


def test_cells_are_counted_by_hand(folder):
    text = agreement.summary(folder, TABLES)
    assert text.startswith(
        "2 of 4 cells agree with the published number within its spread; "
        "at the published length 1 of 2.\n"
    )
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "paper/table1 a 2 of 3 1 of 1 2 of 3 0.6 1 to 3" in rows
    assert "paper/table1 b 0 of 1 0 of 1 0 of 1 3.0 1" in rows


def test_a_step_over_the_edge_does_not_agree(folder):
    write(folder, cell("fedavg", "a", [51.02], 600), cell("pfedla", "a", [54.5], 60))
    assert agreement.summary(folder, TABLES).startswith("1 of 2 cells")


def test_cells_stand_beside_the_published_ones(folder):
    (table,) = agreement.beside(folder, TABLES, "paper/table1", ["a", "b"])
    assert table.heads == ["published", "ours", "seeds", "rounds", "agrees"]
    assert table.rows == [
        ["fedavg, a", "50.00 ± 1.00", "51.00 ± 0.00", "2", "600 of 600", "yes"],
        ["fedavg, b", "60.00 ± 2.00", "57.00", "1", "600 of 600", "no"],
        ["local, a", "40.00 ± 0.50", "40.60 ± 0.40", "3", "60 of 600", "no"],
        ["local, b", "70.00", "70.00", "1", "600 of 600", "-"],
        ["pfedla, a", "55.00 ± 1.00", "54.50", "1", "60 of 600", "yes"],
        ["pfedla, b", "-", "1.00", "1", "600 of 600", "-"],
    ]
    (some,) = agreement.beside(folder, TABLES, "paper/table1", ["b"], ["pfedla", "local"])
    assert [row[0] for row in some.rows] == ["pfedla", "local"]
    (whole,) = agreement.beside(folder, TABLES, "paper/table1", ["a", "b"], ["fedavg"])
    assert whole.heads == ["published", "ours", "after", "seeds", "rounds", "agrees"]
    assert [row[3] for row in whole.rows] == ["52.50 ± 0.71", "58.00"]
    with pytest.raises(UsageError, match="no cell of paper/table1 was run in fedrep, c"):
        agreement.beside(folder, TABLES, "paper/table1", ["a", "c"], ["local", "fedrep"])


def test_rows_that_were_not_run_are_named(folder):
    """Local was run in both columns; pFedLA's in b is not published."""
    assert agreement.not_run(folder, TABLES, "paper/table1", ["a", "b"]) == []
    write(folder, cell("local", "a", [41.0], 60))
    assert agreement.not_run(folder, TABLES, "paper/table1", ["a"]) == ["fedavg", "pfedla"]
    assert agreement.not_run(folder, TABLES, "paper/table1", ["b"]) == ["fedavg", "local"]


def test_what_is_wrong_is_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"has no cells.json"):
        agreement.summary(tmp_path, TABLES)
    write(tmp_path, cell("pfedlo", "a", [1.0], 60))
    with pytest.raises(UsageError, match=r"cells.json: no table has a cell paper/table1/pfedlo/a"):
        agreement.summary(tmp_path, TABLES)
    write(tmp_path, cell("local", "a", [41.0], 60), cell("local", "a", [40.0], 600))
    with pytest.raises(UsageError, match=r"cells.json: paper/table1/local/a is there twice"):
        agreement.summary(tmp_path, TABLES)
    write(tmp_path, cell("local", "b", [70.0], 600))
    with pytest.raises(UsageError, match=r"cells.json has no cell with a published spread"):
        agreement.summary(tmp_path, TABLES)
