"""Our numbers next to the published ones, for all tables of a paper: a table, a picture, reasons.

A paper's reasons.json has the likely reasons of disagreements: a list of {"cells": patterns of
TABLE/ROW/COLUMN, "reason": a sentence}. Every cell that disagrees needs one.
"""

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.papers.agreement import RunCell, read
from experiments.papers.table import PAPERS, Table, mean_of
from experiments.papers.table import cell as format_cell
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import drawing, text_tables
from fedjax_pfl.simulation.summaries import mean_std

NOTE = (
    "Ours, and the published number in brackets. Bold: agrees. *: fewer than three seeds or no "
    "published deviation, so not judged. †: fewer rounds than published."
)
# Label and colour of our number in pictures.
AGREES, DISAGREES = ("ours, agrees", "#009E73"), ("ours, disagrees", "#D55E00")
NOT_JUDGED = ("ours, not judged", "#56B4E9")
Columns = dict[tuple[str, str], dict[str, RunCell]]  # by (table, column), then row


def columns_of(results: Path, tables: Mapping[str, Table], paper: str) -> Columns:
    """Returns a paper's published cells that were run, in the order of its tables and columns.

    `results` is the folder of cells.json.
    """
    cells, columns = read(results, tables), Columns()
    for name, table in tables.items():
        for column in table.columns if name.partition("/")[0] == paper else ():
            by_row = {c.row: c for c in cells if (c.table, c.column) == (name, column)}
            rows = [
                row for row in table.cells if row in by_row and by_row[row].published is not None
            ]
            if rows:
                columns[name.partition("/")[2], column] = {row: by_row[row] for row in rows}
    return columns


def page_part(results: Path, tables: Mapping[str, Table], paper: str) -> str:
    """Returns the table of a paper and the reasons of disagreements, in Markdown.

    Raises UsageError if no cell of the paper was run.
    """
    columns = columns_of(results, tables, paper)
    if not columns:
        raise UsageError(f"no cell of the tables of {paper} was run")
    parts = [text_tables.markdown([table(columns)]), NOTE]
    if lines := reasons(columns, paper):
        parts += ["Most likely reasons of disagreements:", "\n".join(f"- {x}" for x in lines)]
    return "\n\n".join(parts)


def _rows(columns: Columns) -> list[str]:
    """Returns the rows of all columns, longest column first so that its order is kept."""
    ordered = sorted(columns.values(), key=len, reverse=True)
    return list(dict.fromkeys(row for by_row in ordered for row in by_row))


def _text(cell: RunCell) -> str:
    ours = format_cell(mean_std(cell.measured))
    marked = f"**{ours}**" if cell.agrees else ours
    marks = "*" * (not cell.judged) + "†" * (not cell.full_length)
    return f"{marked}{marks} ({format_cell(cell.published)})"


def table(columns: Columns) -> text_tables.Table:
    """Returns a table with a row for each row and a column for each column of the paper's tables.

    `NOTE` explains its cells.
    """
    rows = [
        [row, *(_text(by_row[row]) if row in by_row else "" for by_row in columns.values())]
        for row in _rows(columns)
    ]
    return text_tables.Table(caption="", heads=[" ".join(key) for key in columns], rows=rows)


def reasons(columns: Columns, paper: str, folder: Path = PAPERS) -> list[str]:
    """Returns a line for each reason in a paper's file, with the cells that it explains.

    Raises UsageError if a cell that disagrees has no reason, or a reason has no such cell.
    """
    path = folder / paper / "reasons.json"
    entries = json.loads(path.read_text("utf-8")) if path.is_file() else []
    disagreeing = [
        f"{table}/{row}/{column}"
        for (table, column), by_row in columns.items()
        for row, cell in by_row.items()
        if cell.verdict == "no"
    ]
    lines, explained = [], set[str]()
    for entry in entries:
        cells = [c for c in disagreeing if any(fnmatchcase(c, p) for p in entry["cells"])]
        if not cells:
            raise UsageError(f"{path}: no cell like {entry['cells'][0]} disagrees; delete it")
        explained |= {*cells}
        lines.append(f"{_in_words(cells)}: {entry['reason']}")
    if missing := [cell for cell in disagreeing if cell not in explained]:
        raise UsageError(f"{path}: give a reason for {', '.join(missing)}")
    return lines


def _in_words(cells: Sequence[str]) -> str:
    """Returns cells grouped by row: `row` (table column, table column), ..."""
    places: dict[str, list[str]] = {}
    for cell in cells:
        table, row, column = cell.split("/")
        places.setdefault(row, []).append(f"{table} {column}")
    return "; ".join(f"`{row}` ({', '.join(columns)})" for row, columns in places.items())


def picture(columns: Columns, paper: str) -> Figure:
    """Draws a panel for each column: published numbers and ours, with deviations, by row."""
    rows = _rows(columns)[::-1]
    width = max(drawing.WIDTH, 1.6 + 2.3 * len(columns))
    title = f"{paper}: published numbers and ours"
    figure = drawing.new_figure(title, width, 1.6 + 0.32 * len(rows))
    panels = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
    for axes, (key, by_row) in zip(panels, columns.items(), strict=True):
        drawing.style_axes(axes).set_title("\n".join(key), fontsize=10)
        for y, row in enumerate(rows):
            if row in by_row:
                _draw_cell(axes, y, by_row[row])
    panels[0].set_yticks(range(len(rows)), rows)
    panels[0].set_ylim(-0.6, len(rows) - 0.4)
    used = {_style(cell) for by_row in columns.values() for cell in by_row.values()}
    styles = [style for style in (AGREES, DISAGREES, NOT_JUDGED) if style in used]
    published = Line2D([], [], color=drawing.INK, marker="|", linestyle="", markersize=9)
    handles = [Line2D([], [], color=colour, marker="o", linestyle="") for _, colour in styles]
    figure.legend(
        [published, *handles],
        ["published", *(label for label, _ in styles)],
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=9,
    )
    return figure


def _style(cell: RunCell) -> tuple[str, str]:
    """Returns the label and the colour of our number in pictures."""
    if not cell.judged:
        return NOT_JUDGED
    return AGREES if cell.agrees else DISAGREES


def _draw_cell(axes: Axes, y: int, cell: RunCell) -> None:
    """Draws a published number just above the line y, and ours just below."""
    assert cell.published is not None
    score, (_, ours) = mean_std(cell.measured), _style(cell)
    deviation = cell.published[1] if isinstance(cell.published, Sequence) else None
    for mean, std, height, marker, size, colour in (
        (mean_of(cell.published), deviation, y + 0.14, "|", 9, drawing.INK),
        (score["mean"], score["std"], y - 0.14, "o", 4, ours),
    ):
        axes.errorbar(
            mean,
            height,
            xerr=std,
            fmt=marker,
            markersize=size,
            color=colour,
            capsize=2,
            linewidth=1.2,
        )
