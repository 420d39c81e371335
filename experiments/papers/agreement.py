"""Agreement of our cells with the published numbers, counted over cells.json.

The list `cells` of that file has the cells that were run on their own data in the paper's settings,
except for the number of rounds. The keys of a cell are "table", "row", "column", "measured",
"second", "partition_seeds", "rounds" and "published_rounds". "measured" and "second" hold a value
per seed in the table's unit; "partition_seeds" has the seed of each one's partition, and of runs
that do not count yet. `record` writes the file.

A cell agrees if its mean differs from the published one by at most √(s² + t²). Here s is the
published deviation, and t ours over at least three seeds. A cell with fewer seeds or without a
published deviation cannot be judged. A deviation over one partition is too small and makes
agreement harder, so such cells are judged; the table shows the number of partitions.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from experiments.papers.table import Cell, Published, Table, cells_of, mean_of
from experiments.papers.table import cell as format_cell
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import text_tables
from fedjax_pfl.simulation.summaries import mean_std

RESULTS = Path(__file__).parent.parent / "results"
CELLS = "cells.json"
SEEDS = 3  # fewest seeds that give a deviation to judge by
RULE = (
    "A cell agrees if the means differ by at most both deviations combined, the root of the sum of "
    "their squares. It can be judged if the paper states a deviation and ours is over at least "
    "three seeds."
)


class RunCell(NamedTuple):
    """A cell that was run, with the published number."""

    table: str
    row: str
    column: str
    published: Published
    measured: Sequence[float]  # one for each seed
    second: Sequence[float]  # the table's second measure, likewise, or empty
    partitions: int  # how many different partitions the seeds have
    rounds: int
    published_rounds: int

    @property
    def gap(self) -> float:
        """Our mean minus the published number, which must exist."""
        assert self.published is not None
        return mean_std(self.measured)["mean"] - mean_of(self.published)

    @property
    def is_accuracy(self) -> bool:
        """Returns False for a column of bytes."""
        return not self.column.endswith(("-MiB", "-GB"))

    @property
    def judged(self) -> bool:
        """Returns True if both deviations are known."""
        return isinstance(self.published, Sequence) and len(self.measured) >= SEEDS

    @property
    def agrees(self) -> bool:
        """Returns True for a judged cell whose gap is at most both deviations combined."""
        if not self.judged:
            return False
        assert isinstance(self.published, Sequence)
        combined = math.hypot(self.published[1], mean_std(self.measured)["std"])
        return abs(self.gap) <= combined * (1 + 1e-9)  # equal up to rounding is equal

    @property
    def verdict(self) -> str:
        """Returns the text of the column "agrees"."""
        if self.judged:
            return "yes" if self.agrees else "no"
        return "few seeds" if isinstance(self.published, Sequence) else "-"

    @property
    def full_length(self) -> bool:
        """Returns True if the run has the published number of rounds."""
        return self.rounds >= self.published_rounds


def read(folder: Path, tables: Mapping[str, Table]) -> list[RunCell]:
    """Returns all cells of a folder's file."""
    cells = [_run_cell(cell, tables) for cell in load(folder)["cells"]]
    places = [(cell.table, cell.row, cell.column) for cell in cells]
    if repeated := [place for place in places if places.count(place) > 1]:
        raise UsageError(f"{CELLS} has {'/'.join(repeated[0])} twice")
    return cells


def load(folder: Path) -> dict[str, Any]:
    """Returns the content of cells.json; raises UsageError if the folder has none."""
    try:
        return json.loads((folder / CELLS).read_text(encoding="utf-8"))
    except OSError:
        raise UsageError(f"{folder} has no {CELLS}: work in a checkout of the library") from None


def _run_cell(cell: Mapping[str, Any], tables: Mapping[str, Table]) -> RunCell:
    name, row, column = cell["table"], cell["row"], cell["column"]
    table = tables.get(name)
    if table is None or row not in table.rows or column not in table.columns:
        raise UsageError(f"{CELLS}: no table has a cell {name}/{row}/{column}")
    return RunCell(
        table=name,
        row=row,
        column=column,
        published=table.published(row, column),
        measured=list(cell["measured"].values()),
        second=list(cell.get("second", {}).values()),
        partitions=len({cell["partition_seeds"][seed] for seed in cell["measured"]}),
        rounds=cell["rounds"],
        published_rounds=cell["published_rounds"],
    )


def numbers(table: Table) -> list[Cell]:
    """Returns the cells of a table that have a published number."""
    return [cell for cell in cells_of(table) if cell.published is not None]


def _range(values: Sequence[int]) -> str:
    ends = dict.fromkeys((min(values), max(values))) if values else {}
    return " to ".join(map(str, ends))


def _counts(name: str, published: int, cells: Sequence[RunCell]) -> list[str]:
    judged = [cell for cell in cells if cell.judged]
    gaps = [cell.gap for cell in cells if cell.is_accuracy]
    full = sum(cell.full_length for cell in cells)
    return [
        name,
        str(published),
        str(full),
        str(len(cells) - full),
        f"{sum(cell.agrees for cell in judged)} of {len(judged)}" if judged else "",
        f"{sum(gap > 0 for gap in gaps)} of {len(gaps)}" if gaps else "",
        f"{statistics.median(map(abs, gaps)):.1f}" if gaps else "",
        _range([len(cell.measured) for cell in cells]),
        _range([cell.partitions for cell in cells]),
    ]


def summary(folder: Path, tables: Mapping[str, Table], form: str = "text") -> str:
    """Returns how many published numbers were run and how many agree, as text or Markdown."""
    cells = [cell for cell in read(folder, tables) if cell.published is not None]
    published = {name: len(numbers(table)) for name, table in tables.items()}
    full, judged = sum(cell.full_length for cell in cells), sum(cell.judged for cell in cells)
    head = (
        f"The papers' tables have {sum(published.values())} numbers. {len(cells)} were run in the "
        f"paper's settings: {full} at the published length, {len(cells) - full} shorter. {judged} "
        f"can be judged, and {sum(cell.agrees for cell in cells)} of them agree. {RULE}"
    )
    heads = ["published", "full", "shorter", "agree", "above", "median gap"]
    heads += ["seeds", "partitions"]
    rows = [
        _counts(name, count, [cell for cell in cells if cell.table == name])
        for name, count in published.items()
    ]
    body = [text_tables.Table("", heads, rows)]
    if form == "markdown":
        return f"{head}\n\n{text_tables.markdown(body)}"
    return f"{text_tables.fill_paragraph(head)}\n\n{text_tables.text(body)}"


def comparison(
    folder: Path,
    tables: Mapping[str, Table],
    table: str,
    columns: Sequence[str],
    rows: Sequence[str] = (),
) -> list[text_tables.Table]:
    """Returns a table of published and own numbers, their length and whether they agree.

    It shows `rows` (default: all that were run) and `columns` of the table named `table`, and its
    second measure if all these cells have it. `folder` has cells.json.
    """
    cells = {(cell.row, cell.column): cell for cell in read(folder, tables) if cell.table == table}
    places = product(rows or tables[table].rows, columns)
    selected = [cells[place] for place in places if place in cells]
    names = {name for cell in selected for name in (cell.row, cell.column)}
    if missing := [name for name in (*rows, *columns) if name not in names]:
        raise UsageError(f"no cell of {table} was run in {', '.join(missing)}")
    second = [tables[table].second] if all(cell.second for cell in selected) else []
    heads = ["published", "ours", *second, "seeds", "partitions", "rounds", "agrees"]
    lines, variants = list[list[str]](), list[list[str]]()
    for cell in selected:
        label = f"{cell.row}, {cell.column}" if len(columns) > 1 else cell.row
        part = variants if cell.row in tables[table].variants else lines
        part.append(
            [
                label,
                format_cell(cell.published),
                format_cell(mean_std(cell.measured)),
                *(format_cell(mean_std(cell.second)) for _ in second),
                str(len(cell.measured)),
                str(cell.partitions),
                f"{cell.rounds:,} of {cell.published_rounds:,}",
                cell.verdict,
            ]
        )
    return [text_tables.Table(caption="", heads=heads, rows=lines, variants=variants)]


def not_run(
    folder: Path, tables: Mapping[str, Table], table: str, columns: Sequence[str]
) -> list[str]:
    """Returns the rows with a number published in these columns that was not run."""
    run = {(cell.row, cell.column) for cell in read(folder, tables) if cell.table == table}
    missing = [cell for cell in numbers(tables[table]) if cell.column in columns]
    return list(dict.fromkeys(cell.row for cell in missing if (cell.row, cell.column) not in run))
