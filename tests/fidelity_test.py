"""The pages that compare each paper with the code: stated values, code references, statuses."""

import ast
import copy
import importlib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedjax_pfl.report import run_reader
from fedjax_pfl.settings import configuration

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "fidelity").glob("*.md"))
STATED = sorted((ROOT / "experiments" / "papers").glob("*/stated.json"))
ENTRIES = [(path.parent.name, entry) for path in STATED for entry in json.loads(path.read_text())]
STATUS = (
    r"as in the paper($|[,;:] \S)|the paper is silent: our choice($|[,;] \S| of \S)|differs: \S"
)


def flatten(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields settings by dotted names."""
    for key, value in settings.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")


def disagreements(entry: dict[str, Any]) -> list[str]:
    """Returns stated settings that are missing or different in the preset or the defaults."""
    if "preset" in entry:
        system, _, preset = entry["preset"].partition(":")
        config = importlib.import_module(f"fedjax_pfl.presets.{system}").get_config(preset)
        stated = entry["settings"]
    else:
        config, stated = configuration.default()[entry["method"]], entry["defaults"]
    settings = dict(flatten(run_reader.as_json(config.to_dict())))
    return [k for k, value in stated.items() if k not in settings or settings[k] != value]


@pytest.mark.parametrize(("paper", "entry"), ENTRIES, ids=[f"{p}-{e['where']}" for p, e in ENTRIES])
def test_presets_and_defaults_equal_the_stated_values(paper, entry):
    assert set(entry) in ({"where", "preset", "settings"}, {"where", "method", "defaults"})
    stated = entry.get("settings") or entry["defaults"]
    assert stated
    assert disagreements(entry) == []
    changed = copy.deepcopy(entry)
    changed.get("settings", changed.get("defaults"))[next(iter(stated))] = "changed"
    changed.get("settings", changed.get("defaults"))["unknown.setting"] = None
    assert disagreements(changed) == [next(iter(stated)), "unknown.setting"]


def rows(page: Path) -> list[list[str]]:
    """Returns the cells of a page's tables, without heads."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "In the paper" and set(row[0]) != {"-"}]


@cache
def names(path: Path) -> frozenset[str]:
    """Returns functions, classes, variables, arguments and dictionary keys of a file."""
    defined = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Dict):
            defined |= {k.value for k in node.keys if isinstance(k, ast.Constant)}
    return frozenset(defined)


def broken_references(text: str) -> list[str]:
    """Returns references `path.py: name` to a missing file or name."""
    return [
        f"{path}: {name}"
        for path, name in re.findall(r"`([\w/]+\.py): ([\w.]+)`", text)
        if not (ROOT / path).is_file() or not set(name.split(".")) <= names(ROOT / path)
    ]


def test_a_broken_reference_is_reported():
    text = (
        "`tests/fidelity_test.py: flatten`, `tests/fidelity_test.py: missing`, "
        "`tests/nowhere.py: flatten`, `fedjax_pfl/settings/general.py: learning_rate` and "
        "`fedjax_pfl/algorithms/shared/method.py: Method.label`"
    )
    assert broken_references(text) == [
        "tests/fidelity_test.py: missing",
        "tests/nowhere.py: flatten",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_row_has_three_cells_and_a_status_and_names_existing_code(page):
    table = rows(page)
    assert len(table) > 20
    assert [row for row in table if len(row) != 3] == []
    assert [row for row in table if not re.match(STATUS, row[2])] == []
    assert any("`" in row[1] for row in table)
    assert broken_references(page.read_text()) == []


def test_every_paper_has_a_linked_page_and_stated_values():
    text = (ROOT / "docs" / "fidelity.md").read_text()
    papers = sorted(p.parent.name for p in (ROOT / "experiments/papers").glob("*/published.json"))
    assert len(papers) == 4
    assert papers == [page.stem for page in PAGES] == [path.parent.name for path in STATED]
    assert [name for name in papers if f"](fidelity/{name}.md)" not in text] == []
