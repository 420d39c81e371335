"""Tests of `gaps`: all published numbers of a paper next to ours, with reasons."""

import json
from pathlib import Path

import pytest

from experiments.papers import gaps
from experiments.papers.tables import TABLES as PAPERS
from fedjax_pfl.core.errors import UsageError
from tests.experiments.agreement_test import NUMBERS, SPREAD_OF_4, cell, table, write

TABLES = {"paper/table1": table(NUMBERS), "paper/table2": table({"k=2": {"c": [10.0, 1.0]}})}


@pytest.fixture
def columns(tmp_path):
    """FedAvg agrees, Local disagrees, and pFedLA has one short run; column c has its own row."""
    write(
        tmp_path,
        cell("fedavg", "a", [55 + x for x in SPREAD_OF_4], 600),
        cell("local", "a", [41.0, 42.0, 43.0], 600),
        cell("pfedla", "a", [55.0], 60),
        cell("pfedla", "b", [1.0], 600),  # no published number
        cell("k=2", "c", [11.0, 11.0, 11.0], 600) | {"table": "paper/table2"},
    )
    return gaps.columns_of(tmp_path, TABLES, "paper")


def test_the_table_has_ours_and_the_published_number(columns):
    """Local is at 42 ± 1, published 40 ± 0.5."""
    table = gaps.table(columns)
    assert table.heads == ["table1 a", "table2 c"]
    assert table.rows == [
        ["fedavg", "**55.00 ± 4.00** (50.00 ± 3.00)", ""],
        ["local", "42.00 ± 1.00 (40.00 ± 0.50)", ""],
        ["pfedla", "55.00*† (55.00 ± 1.00)", ""],
        ["k=2", "", "**11.00 ± 0.00** (10.00 ± 1.00)"],
    ]


def test_a_page_part_needs_a_cell(tmp_path):
    write(tmp_path)
    assert gaps.columns_of(tmp_path, TABLES, "paper") == {}
    with pytest.raises(UsageError, match="no cell of the tables of paper was run"):
        gaps.page_part(tmp_path, TABLES, "paper")


def test_a_published_zero_is_a_number(tmp_path):
    """Local sends nothing: 0 bytes."""
    write(tmp_path, cell("local", "GB", [0.0], 600))
    tables = {"paper/table1": table({"local": {"GB": 0.0}})}
    part = gaps.page_part(tmp_path, tables, "paper")
    assert "| local | 0.00* (0.00) |" in part
    assert "reasons" not in part


def reasons(columns, folder: Path, *entries: tuple[str, str]) -> list[str]:
    (folder / "paper").mkdir(exist_ok=True)
    records = [{"cells": [pattern], "reason": reason} for pattern, reason in entries]
    (folder / "paper" / "reasons.json").write_text(json.dumps(records))
    return gaps.reasons(columns, "paper", folder)


def test_every_disagreement_and_no_other_cell_has_a_reason(columns, tmp_path):
    (line,) = reasons(columns, tmp_path, ("table1/local/*", "The rate differs."))
    assert line == "`local` (table1 a): The rate differs."
    with pytest.raises(UsageError, match="give a reason for table1/local/a"):
        reasons(columns, tmp_path)
    with pytest.raises(UsageError, match="no cell like table1/fedavg/a disagrees; delete it"):
        reasons(columns, tmp_path, ("table1/*", "Yes."), ("table1/fedavg/a", "No."))


def test_the_picture_has_a_panel_for_each_column(columns):
    figure = gaps.picture(columns, "paper")
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["table1\na", "table2\nc"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "k=2",
        "pfedla",
        "local",
        "fedavg",
    ]
    points = [
        (c.lines[0].get_xdata()[0], c.lines[0].get_color()) for c in figure.axes[0].containers
    ]
    assert points == [
        (55.0, gaps.drawing.INK),  # pFedLA, the lowest row: published, then ours
        (55.0, gaps.NOT_JUDGED[1]),
        (40.0, gaps.drawing.INK),
        (42.0, gaps.DISAGREES[1]),
        (50.0, gaps.drawing.INK),
        (55.0, gaps.AGREES[1]),
    ]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["published", "ours, agrees", "ours, disagrees", "ours, not judged"]


def test_all_files_of_reasons_belong_to_a_paper():
    papers = {name.partition("/")[0] for name in PAPERS}
    files = gaps.PAPERS.glob("*/reasons.json")
    assert {path.parent.name for path in files} <= papers
