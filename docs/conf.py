"""The documents as a site, by Sphinx; and what it takes from the code.

A page says {{ docstring MODULE }}, {{ settings METHOD ... }}, {{ published TABLE COLUMN ... }},
{{ listing KIND }}, {{ tables }}, {{ speed FILE }} or {{ pages NAME ... }}. What a page names and
the code has not ends the build. The pages of api/ and results/ are written anew in each.
"""

import ast
import html
import importlib
import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments import benchmark, render
from experiments import list as listing
from experiments.speed import rivals, turns
from experiments.tables import TABLES
from experiments.tables.common import cell
from fedjax_pfl import config as configuration

HERE = Path(__file__).parent
RESULTS = HERE.parent / "experiments" / "results"

project = "fedjax_pfl"
extensions = ["myst_parser"]
myst_heading_anchors = 3
highlight_language = "none"  # of what is only indented
html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["kept.css"]
html_show_sphinx = html_show_copyright = html_copy_source = False

API = {
    "Runs": [
        "fedjax_pfl", "fedjax_pfl.config", "fedjax_pfl.build", "fedjax_pfl.rounds",
        "fedjax_pfl.export",
    ],
    "Writing a method": [
        "fedjax_pfl.algorithm", "fedjax_pfl.algorithms.common", "fedjax_pfl.algorithms.parts",
        "fedjax_pfl.local", "fedjax_pfl.trees", "fedjax_pfl.task", "fedjax_pfl.at_home",
        "fedjax_pfl.compress",
    ],
    "Methods": sorted({factory.__module__ for factory in configuration.ALGORITHMS.values()}),
    "Data": [
        "fedjax_pfl.data.dataset", "fedjax_pfl.data.sources", "fedjax_pfl.data.partitions",
        "fedjax_pfl.data.federate", "fedjax_pfl.data.federated", "fedjax_pfl.data.augment",
    ],
    "Networks": [
        "fedjax_pfl.models", "fedjax_pfl.models.conv", "fedjax_pfl.models.modular",
        "fedjax_pfl.nets.hypernet", "fedjax_pfl.nets.layer_weights", "fedjax_pfl.nets.router",
        "fedjax_pfl.nets.factorized", "fedjax_pfl.nets.matching",
    ],
    "Numbers and reports": [
        "fedjax_pfl.ledger", "fedjax_pfl.metrics", "fedjax_pfl.report", "fedjax_pfl.comparison",
    ],
}  # fmt: skip


def setup(app: Any) -> None:
    """Write what is generated beside the pages, and fill in the pages as they are read."""
    for folder in ("api", "results"):
        shutil.rmtree(HERE / folder, ignore_errors=True)
    (HERE / "api").mkdir()
    for title, modules in API.items():
        text = "\n\n".join([f"# {title}", *map(module, modules)])
        (HERE / "api" / f"{title.lower().replace(' ', '_')}.md").write_text(text)
    shutil.copytree(RESULTS, HERE / "results")
    app.connect("source-read", _fill)


def _fill(app: Any, name: str, source: list[str]) -> None:
    def found(match: re.Match[str]) -> str:
        mark, *words = match[1].split()
        return MARKS[mark](*words)

    source[0] = re.sub(r"^\{\{ (.+?) \}\}$", found, source[0], flags=re.M)


def docstring(name: str) -> str:
    """The docstring of a module, as it is."""
    return _kept(inspect.getdoc(importlib.import_module(name)) or "")


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


def pages(*names: str) -> str:
    """Those that there are: some are in the navigation as soon as they are written."""
    return "\n".join(name for name in names if (HERE / f"{name}.md").is_file())


MARKS: dict[str, Callable[..., str]] = {
    "docstring": docstring, "settings": settings, "published": published, "listing": kind,
    "tables": tables, "pages": pages, "speed": speed,
}  # fmt: skip


def module(name: str) -> str:
    """A module's docstring and all that is public in it."""
    made = importlib.import_module(name)
    parts = [f"## `{name}`", _kept(inspect.getdoc(made) or "")]
    for member, thing in _public(made):
        parts += [f"### `{member}`", f"```python\n{_form(thing)}\n```"]
        if said := inspect.getdoc(thing):
            parts.append(_kept(said))
    return "\n\n".join(part for part in parts if part)


def _public(made: ModuleType) -> Iterator[tuple[str, Any]]:
    """Functions and classes that a module defines, or that it names in __all__."""
    for name, thing in vars(made).items():
        named = name in getattr(made, "__all__", ())
        if not name.startswith("_") and (inspect.isclass(thing) or inspect.isfunction(thing)):
            own = thing.__module__ == made.__name__
            if own if not hasattr(made, "__all__") else named:
                yield name, thing


def _form(thing: Any) -> str:
    """A function's signature, or a class with its fields and their comments."""
    source = textwrap.dedent(inspect.getsource(thing))
    (node,) = ast.parse(source).body
    lines = source.splitlines()
    if isinstance(node, ast.ClassDef):
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
        kept = [line for n in fields for line in lines[n.lineno - 1 : n.end_lineno]]
        return "\n".join([f"class {node.name}:", *kept])
    if not isinstance(node, ast.FunctionDef):  # a lambda
        return source.strip()
    first = node.body[0].lineno - 1
    head = "\n".join(lines[node.lineno - 1 : first]).rstrip().removesuffix(":")
    return head.replace(f"def {node.name}(", f"def {thing.__name__}(", 1)


def _kept(text: str) -> str:
    """Text with its lines and columns; blank lines would end the block in Markdown."""
    escaped = html.escape(text).replace("\n\n", "\n&#8203;\n")
    for mark in "*_`[]{}\\|~":
        escaped = escaped.replace(mark, f"&#{ord(mark)};")
    return f'<div class="kept">{escaped}</div>'
