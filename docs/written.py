"""What the code says of itself, written into the pages: python docs/written.py

A page holds <!-- begin MARK WORD ... -->, what is written there, and <!-- end -->. The marks are
docstring MODULE, settings METHOD ..., published TABLE COLUMN ..., listing KIND, tables and speed
FILE. What a page names and the code has not is an error; a test sees that pages are up to date.
"""

import importlib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path

from experiments import benchmark, render
from experiments import list as listing
from experiments.speed import rivals, turns
from experiments.tables import TABLES
from experiments.tables.common import cell
from fedjax_pfl import config as configuration

HERE = Path(__file__).parent
RESULTS = HERE.parent / "experiments" / "results"


def written(page: str) -> str:
    """A page's text with what belongs between its marks."""

    def made(match: re.Match[str]) -> str:
        begin, (mark, *words), end = match[1], match[2].split(), match[3]
        return f"{begin}\n\n{MARKS[mark](*words).strip()}\n\n{end}"

    return re.sub(r"^(<!-- begin (.+?) -->)$.*?^(<!-- end -->)$", made, page, flags=re.M | re.S)


def docstring(name: str) -> str:
    """The docstring of a module, as it is."""
    return f"```text\n{inspect.getdoc(importlib.import_module(name))}\n```"


def settings(*names: str) -> str:
    """Settings of methods and their defaults."""
    defaults = configuration.default()
    rows = [
        [f"`{name}.{key}`", f"`{'unset' if value is None else value}`"]
        for name in names
        for key, value in defaults[name].to_dict().items()
    ]
    return render.markdown([render.Table("", ["default"], rows)])


def published(name: str, *columns: str) -> str:
    """Published numbers of some columns of a table, side by side."""
    table = TABLES[name]
    if unknown := set(columns) - set(table.columns):
        raise KeyError(f"{name} has no column {unknown}")
    rows = [[row, *(cell(cells.get(c)) for c in columns)] for row, cells in table.cells.items()]
    caption = f"Published ({table.about.partition(':')[0]}):"
    return render.markdown([render.Table(caption, list(columns), rows)])


def kind(name: str) -> str:
    """What there is of a kind, as the command lists it."""
    return f"```text\n{listing.listing(name)}\n```"


def tables() -> str:
    """Which tables of which papers there are."""
    rows = [[f"`{name}`", table.about, ", ".join(table.columns)] for name, table in TABLES.items()]
    return render.markdown([render.Table("", ["from", "columns"], rows)]).replace("---:", "---")


def speed(name: str) -> str:
    """A measurement of `experiments.benchmark`: its table, its targets and its conditions."""
    whole = json.loads((RESULTS / name).read_text())
    shown = [turns.table(whole["items"], rivals.NAMES), turns.targets(whole, rivals.NAMES)]
    return f"{render.markdown(shown)}\n\nMeasured on {benchmark.conditions(whole)}."


MARKS: dict[str, Callable[..., str]] = {
    "docstring": docstring, "settings": settings, "published": published, "listing": kind,
    "tables": tables, "speed": speed,
}  # fmt: skip


if __name__ == "__main__":
    for path in sorted(HERE.glob("*.md")):
        text = path.read_text()
        if (new := written(text)) != text:
            path.write_text(new)
            print(path.name)
