"""The documents as a site, by Sphinx; and what it takes from the code.

Pages are whole as they lie there: written.py puts in what the code says of itself. The pages of
api/ and results/ are written anew in each build.
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
        "fedjax_pfl.data.sources",
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
        "fedjax_pfl.simulation.metrics",
        "fedjax_pfl.report.page",
        "fedjax_pfl.report.comparison",
    ],
}

# What a number keeps beside it in a table, however narrow a column is.
BESIDE = re.compile(r"(?<=\d) (?=±|%|[kMGTP]?B\b|ms\b|x\b)|(?<=±) ")

# What pages link to in a clone, and where the site has it.
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
your_model
your_method
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
:caption: Results
tuning
leaderboard
agreement
tables
Our results <results/README>
results/pfedla
results/pfedhn
results/fedmn
results/factorized_fl
results/made
questions
glossary
```

```{toctree}
:hidden:
:caption: Reference
robustness
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
    """Write what is generated beside the pages; those are changed a little as they are read."""
    for folder in ("api", "results"):
        shutil.rmtree(HERE / folder, ignore_errors=True)
    (HERE / "api").mkdir()
    for title, modules in API.items():
        text = "\n\n".join([f"# {title}", *map(module, modules)])
        (HERE / "api" / f"{title.lower().replace(' ', '_')}.md").write_text(text)
    shutil.copytree(RESULTS, HERE / "results")
    app.connect("source-read", _read)


def _read(app: Any, name: str, source: list[str]) -> None:
    """A page as the site has it: with navigation, and links to what is copied or generated."""
    for there, here in LINKS.items():
        source[0] = source[0].replace(f"]({there}", f"]({here}")
    lines = source[0].split("\n")
    source[0] = "\n".join(beside(line) if line.startswith("|") else line for line in lines)
    if name == "index":
        source[0] += NAVIGATION


def beside(row: str) -> str:
    """A row of a table, whose numbers are not broken from their units and deviations."""
    return BESIDE.sub("\N{NO-BREAK SPACE}", row)


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
