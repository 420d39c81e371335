"""How many of the published numbers ours agree with: a count over files of results.

A file counts where it is JSON with a list `cells`, each {"table", "row", "column", "ours" (by seed,
in the table's own unit), "rounds", "published_rounds"}: a cell that was run on its own data, in the
published settings but for the length, which is in communication rounds.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.papers.table import Published, Table
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.engine.metrics import mean_std
from fedjax_pfl.report import text_tables

RESULTS = Path(__file__).parent.parent / "results"


class Judged(NamedTuple):
    """A cell that was run, beside the published one."""

    table: str
    row: str
    column: str
    seeds: int
    whole: bool  # at the published length
    gap: float  # ours less published
    spread: float  # of the published

    @property
    def agrees(self) -> bool:
        """Within the published spread, its end included."""
        return abs(self.gap) <= self.spread


def read(folder: Path, tables: Mapping[str, Table]) -> list[Judged]:
    """All cells of a folder's files whose published number has a spread."""
    found: dict[tuple[str, str, str], tuple[Path, Judged | None]] = {}
    for path in sorted(folder.glob("*.json")):
        whole = json.loads(path.read_text(encoding="utf-8"))
        for cell in whole.get("cells", ()) if isinstance(whole, dict) else ():
            name = (cell["table"], cell["row"], cell["column"])
            if name in found:
                raise UsageError(f"{'/'.join(name)} is in {found[name][0].name} and {path.name}")
            found[name] = (path, _judged(cell, _published(tables, *name, path), name))
    return [one for _, one in found.values() if one is not None]


def _published(
    tables: Mapping[str, Table], table: str, row: str, column: str, path: Path
) -> Published:
    try:
        return tables[table].cells[row][column]
    except KeyError:
        raise UsageError(f"{path.name}: no table has a cell {table}/{row}/{column}") from None


def _judged(cell: Mapping[str, Any], there: Published, name: tuple[str, str, str]) -> Judged | None:
    if there is None or isinstance(there, int | float):
        return None
    seeds = list(cell["ours"].values())
    gap = mean_std(seeds)["mean"] - there[0]
    whole = cell["rounds"] >= cell["published_rounds"]
    return Judged(*name, len(seeds), whole, gap, there[1])


def _of(cells: Sequence[Judged]) -> str:
    return f"{sum(one.agrees for one in cells)} of {len(cells)}"


def _line(cells: Sequence[Judged]) -> str:
    whole = [one for one in cells if one.whole]
    said = f"{_of(cells)} cells agree with the published number within its spread"
    return f"{said}; at the published length {_of(whole)}."


def counted(cells: Sequence[Judged]) -> list[text_tables.Table]:
    """A row for each column of a table."""
    groups: dict[tuple[str, str], list[Judged]] = {}
    for one in cells:
        groups.setdefault((one.table, one.column), []).append(one)
    rows = []
    for (table, column), own in groups.items():
        gaps = [one.gap for one in own]
        above = sum(gap > 0 for gap in gaps)
        middle = sorted(map(abs, gaps))[len(gaps) // 2]
        many = sorted({one.seeds for one in own})
        seeds = " to ".join(map(str, dict.fromkeys((many[0], many[-1]))))
        rows.append([f"{table} {column}", _of(own), _of([one for one in own if one.whole]),
                     f"{above} of {len(own)}", f"{middle:.1f}", seeds])  # fmt: skip
    heads = ["agree", "at the published length", "ours is above", "median distance", "seeds"]
    return [text_tables.Table("", heads, rows)] if rows else []


def summary(folder: Path, tables: Mapping[str, Table], form: str = "text") -> str:
    """The count, and the table of it."""
    cells = read(folder, tables)
    if not cells:
        raise UsageError(f"{folder} has no file with cells of a published table")
    body = counted(cells)
    table = text_tables.markdown(body) if form == "markdown" else text_tables.text(body)
    return f"{_line(cells)}\n\n{table}"
