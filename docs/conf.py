"""Sphinx configuration of the documentation site.

docs/written.py writes the generated parts into the pages themselves. This file generates the pages
of api/ and copies those of results/ at every build.
"""

import ast
import html
import importlib
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fedjax_pfl.settings import configuration

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "experiments" / "results"

project = "fedjax_pfl"
extensions = ["myst_parser"]
myst_heading_anchors = 3
highlight_language = "none"  # indented blocks without a language
html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["docstrings.css"]
html_show_sphinx = html_show_copyright = html_copy_source = False

API = {
    "Runs": [
        "fedjax_pfl",
        "fedjax_pfl.settings.configuration",
        "fedjax_pfl.runs.build",
        "fedjax_pfl.simulation.rounds",
        "fedjax_pfl.runs.export",
    ],
    "Writing a method": [
        "fedjax_pfl.core.algorithm",
        "fedjax_pfl.algorithms.shared.initial_state",
        "fedjax_pfl.algorithms.shared.model_training",
        "fedjax_pfl.algorithms.shared.split_model",
        "fedjax_pfl.core.local_training",
        "fedjax_pfl.core.trees",
        "fedjax_pfl.core.task",
        "fedjax_pfl.transforms.private_layers",
        "fedjax_pfl.transforms.compression",
    ],
    "Methods": sorted({factory.__module__ for factory in configuration.ALGORITHMS.values()}),
    "Data": [
        "fedjax_pfl.data.dataset",
        "fedjax_pfl.data.dataset_registry",
        "fedjax_pfl.data.embedded",
        "fedjax_pfl.data.columns",
        "fedjax_pfl.data.tables",
        "fedjax_pfl.data.table_sources",
        "fedjax_pfl.data.text",
        "fedjax_pfl.data.leaf",
        "fedjax_pfl.data.image_folder",
        "fedjax_pfl.data.tfds_images",
        "fedjax_pfl.data.partitions",
        "fedjax_pfl.data.federate",
        "fedjax_pfl.core.examples",
        "fedjax_pfl.data.augment",
    ],
    "Networks": [
        "fedjax_pfl.networks",
        "fedjax_pfl.networks.lowerings.conv",
        "fedjax_pfl.algorithms.fedmn.modular",
        "fedjax_pfl.algorithms.pfedhn.hypernet",
        "fedjax_pfl.algorithms.pfedla.layer_weights",
        "fedjax_pfl.algorithms.fedmn.router",
        "fedjax_pfl.networks.factorized",
        "fedjax_pfl.algorithms.shared.matching",
    ],
    "Numbers and reports": [
        "fedjax_pfl.simulation.ledger",
        "fedjax_pfl.simulation.summaries",
        "fedjax_pfl.report.page",
        "fedjax_pfl.report.comparison",
    ],
}

# Spaces between a number and its unit or deviation, where a table cell must not break.
UNIT_SPACE = re.compile(r"(?<=\d) (?=±|%|[kMGTP]?B\b|ms\b|x\b)|(?<=±) ")

# Link targets in a clone and on the site.
LINKS = {
    "../../experiments/results/": "../results/",
    "../experiments/results/": "results/",
    "../fedjax_pfl/algorithms/": "api/methods.md",
}
NAVIGATION = """
```{toctree}
:hidden:
Start here <self>
your_data
recipes
your_model
your_method
from_pfllib
contract
models
notebooks
data
settings
```

```{toctree}
:hidden:
:caption: Systems
pfedla
pfedhn
fedmn
factorized_fl
baselines
fidelity
```

```{toctree}
:hidden:
:glob:
:caption: Papers and code
fidelity/*
```

```{toctree}
:hidden:
:caption: Privacy and robustness
privacy
leakage
attackers
robustness
```

```{toctree}
:hidden:
:caption: Results
tuning
leaderboard
agreement
compared
tables
Our results <results/README>
results/pfedla
results/pfedhn
results/fedmn
results/factorized_fl
results/privacy
results/made
questions
glossary
```

```{toctree}
:hidden:
:caption: Reference
scaling
deploy
speed
```

```{toctree}
:hidden:
:glob:
:caption: Modules
api/*
```
"""


def setup(app: Any) -> None:
    """Writes api/ and results/, and adds navigation and site links to the pages that are read."""
    for folder in ("api", "results"):
        shutil.rmtree(DOCS / folder, ignore_errors=True)
    (DOCS / "api").mkdir()
    for title, modules in API.items():
        text = "\n\n".join([f"# {title}", *map(module_page, modules)])
        (DOCS / "api" / f"{title.lower().replace(' ', '_')}.md").write_text(text)
    shutil.copytree(RESULTS, DOCS / "results")
    app.connect("source-read", _read)


def _read(app: Any, name: str, source: list[str]) -> None:
    """Replaces the links of a page by those of the site, and adds navigation to the first page."""
    for clone_link, site_link in LINKS.items():
        source[0] = source[0].replace(f"]({clone_link}", f"]({site_link}")
    lines = source[0].split("\n")
    source[0] = "\n".join(join_units(line) if line.startswith("|") else line for line in lines)
    if name == "index":
        source[0] += NAVIGATION


def join_units(row: str) -> str:
    """Returns a table row with no-break spaces between numbers and their units or deviations."""
    return UNIT_SPACE.sub("\N{NO-BREAK SPACE}", row)


def module_page(name: str) -> str:
    """Returns the docstring of a module and its public functions and classes."""
    module = importlib.import_module(name)
    parts = [f"## `{name}`", _preformatted(inspect.getdoc(module) or "")]
    for member, value in _public(module):
        parts += [f"### `{member}`", f"```python\n{_signature(value)}\n```"]
        if doc := inspect.getdoc(value):
            parts.append(_preformatted(doc))
    return "\n\n".join(part for part in parts if part)


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yields the functions and classes in a module's __all__, or without one those it defines."""
    exported = getattr(module, "__all__", None)
    for name, value in vars(module).items():
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if value.__module__ == module.__name__ if exported is None else name in exported:
            yield name, value


def _signature(member: Any) -> str:
    """Returns a function's signature, or a class with its fields and their comments."""
    source = textwrap.dedent(inspect.getsource(member))
    (node,) = ast.parse(source).body
    lines = source.splitlines()
    if isinstance(node, ast.ClassDef):
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
        field_lines = [line for n in fields for line in lines[n.lineno - 1 : n.end_lineno]]
        return "\n".join([f"class {node.name}:", *field_lines])
    if not isinstance(node, ast.FunctionDef):  # a lambda
        return source.strip()
    first = node.body[0].lineno - 1
    head = "\n".join(lines[node.lineno - 1 : first]).rstrip().removesuffix(":")
    return head.replace(f"def {node.name}(", f"def {member.__name__}(", 1)


def _preformatted(text: str) -> str:
    """Returns text as HTML that keeps its lines; a blank line would end the block in Markdown."""
    escaped = html.escape(text).replace("\n\n", "\n&#8203;\n")
    for mark in "*_`[]{}\\|~":
        escaped = escaped.replace(mark, f"&#{ord(mark)};")
    return f'<div class="docstring">{escaped}</div>'
