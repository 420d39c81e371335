"""How many of the published numbers ours agree with: a count over cells.json.

It has a list `cells`, each {"table", "row", "column", "ours" and "beside" (by seed, in the table's
own unit), "rounds", "published_rounds"}: a cell that was run on its own data, in the published
settings but for the length, which is in communication rounds. `record` writes it.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from experiments.papers.table import Published, Table
from experiments.papers.table import cell as shown
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.engine.metrics import mean_std
from fedjax_pfl.report import text_tables

RESULTS = Path(__file__).parent.parent / "results"
CELLS = "cells.json"


class Ran(NamedTuple):
    """A cell that was run, beside the published one."""

    table: str
    row: str
    column: str
    published: Published
    ours: Sequence[float]  # one for each seed
    beside: Sequence[float]  # the table's second number, likewise; or nothing
    rounds: int
    published_rounds: int

    @property
    def has_spread(self) -> bool:
        """Whether the published number has one; without it nothing says what agrees."""
        return isinstance(self.published, Sequence)

    @property
    def gap(self) -> float:
        """Ours less published."""
        assert isinstance(self.published, Sequence)
        return mean_std(self.ours)["mean"] - self.published[0]

    @property
    def agrees(self) -> bool:
        """Within the published spread, its end included."""
        assert isinstance(self.published, Sequence)
        return abs(self.gap) <= self.published[1]

    @property
    def whole(self) -> bool:
        """At the published length."""
        return self.rounds >= self.published_rounds


def read(folder: Path, tables: Mapping[str, Table]) -> list[Ran]:
    """All cells of a folder's file."""
    cells = [_ran(cell, tables) for cell in load(folder)["cells"]]
    places = [(one.table, one.row, one.column) for one in cells]
    if twice := [place for place in places if places.count(place) > 1]:
        raise UsageError(f"{CELLS}: {'/'.join(twice[0])} is there twice")
    return cells


def load(folder: Path) -> dict[str, Any]:
    """The file itself; UsageError where there is none, as in a library that was installed."""
    try:
        return json.loads((folder / CELLS).read_text(encoding="utf-8"))
    except OSError:
        raise UsageError(f"{folder} has no {CELLS}: work in a checkout of the library") from None


def _ran(cell: Mapping[str, Any], tables: Mapping[str, Table]) -> Ran:
    table, row, column = cell["table"], cell["row"], cell["column"]
    own = tables.get(table)
    if own is None or row not in own.rows or column not in own.columns:
        raise UsageError(f"{CELLS}: no table has a cell {table}/{row}/{column}")
    ours, second = cell["ours"].values(), cell.get("beside", {}).values()
    lengths = cell["rounds"], cell["published_rounds"]
    return Ran(table, row, column, own.published(row, column), list(ours), list(second), *lengths)


def _of(cells: Sequence[Ran]) -> str:
    return f"{sum(one.agrees for one in cells)} of {len(cells)}"


def _line(cells: Sequence[Ran]) -> str:
    whole = [one for one in cells if one.whole]
    said = f"{_of(cells)} cells agree with the published number within its spread"
    return f"{said}; at the published length {_of(whole)}."


def counted(cells: Sequence[Ran]) -> list[text_tables.Table]:
    """A row for each column of a table."""
    groups: dict[tuple[str, str], list[Ran]] = {}
    for one in cells:
        groups.setdefault((one.table, one.column), []).append(one)
    rows = []
    for (table, column), own in groups.items():
        gaps = [one.gap for one in own]
        above = sum(gap > 0 for gap in gaps)
        middle = sorted(map(abs, gaps))[len(gaps) // 2]
        many = sorted({len(one.ours) for one in own})
        seeds = " to ".join(map(str, dict.fromkeys((many[0], many[-1]))))
        rows.append([f"{table} {column}", _of(own), _of([one for one in own if one.whole]),
                     f"{above} of {len(own)}", f"{middle:.1f}", seeds])  # fmt: skip
    heads = ["agree", "at the published length", "ours is above", "median distance", "seeds"]
    return [text_tables.Table("", heads, rows)] if rows else []


def summary(folder: Path, tables: Mapping[str, Table], form: str = "text") -> str:
    """The count, and the table of it."""
    cells = [one for one in read(folder, tables) if one.has_spread]
    if not cells:
        raise UsageError(f"{folder / CELLS} has no cell with a published spread")
    body = counted(cells)
    table = text_tables.markdown(body) if form == "markdown" else text_tables.text(body)
    return f"{_line(cells)}\n\n{table}"


def beside(
    folder: Path,
    tables: Mapping[str, Table],
    table: str,
    columns: Sequence[str],
    rows: Sequence[str] = (),
) -> list[text_tables.Table]:
    """Cells of a table that were run: published, ours, how long, and whether they agree.

    The table's second number stands beside ours where all of them have one.

    rows: which of them; all where none is named.
    """
    cells = {(one.row, one.column): one for one in read(folder, tables) if one.table == table}
    every = product(rows or tables[table].rows, columns)
    chosen = [cells[name] for name in every if name in cells]
    there = {word for one in chosen for word in (one.row, one.column)}
    if missing := [word for word in (*rows, *columns) if word not in there]:
        raise UsageError(f"no cell of {table} was run in {', '.join(missing)}")
    second = [tables[table].beside] if all(one.beside for one in chosen) else []
    heads = ["published", "ours", *second, "seeds", "rounds", "agrees"]
    lines = []
    for one in chosen:
        label = f"{one.row}, {one.column}" if len(columns) > 1 else one.row
        also = [shown(mean_std(one.beside)) for _ in second]
        lines.append([label, shown(one.published), shown(mean_std(one.ours)), *also,
                      str(len(one.ours)), f"{one.rounds:,} of {one.published_rounds:,}",
                      ("yes" if one.agrees else "no") if one.has_spread else "-"])  # fmt: skip
    return [text_tables.Table("", heads, lines)]


def not_run(
    folder: Path, tables: Mapping[str, Table], table: str, columns: Sequence[str]
) -> list[str]:
    """The rows that are published in these columns and of which a cell was not run."""
    there = {(one.row, one.column) for one in read(folder, tables) if one.table == table}
    return [
        row
        for row, cells in tables[table].cells.items()
        if any(cells.get(one) is not None and (row, one) not in there for one in columns)
    ]
