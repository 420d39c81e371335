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


def flat(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their names with dots."""
    for key, value in settings.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")


def disagreements(entry: dict[str, Any]) -> list[str]:
    """Stated settings whose value is another, or missing, in the preset or the defaults."""
    if "preset" in entry:
        system, _, preset = entry["preset"].partition(":")
        config = importlib.import_module(f"fedjax_pfl.presets.{system}").get_config(preset)
        stated = entry["settings"]
    else:
        config, stated = configuration.default()[entry["method"]], entry["defaults"]
    ours = dict(flat(run_reader.as_json(config.to_dict())))
    return [key for key, value in stated.items() if key not in ours or ours[key] != value]


@pytest.mark.parametrize(("paper", "entry"), ENTRIES, ids=[f"{p}-{e['where']}" for p, e in ENTRIES])
def test_presets_and_defaults_have_what_a_paper_states(paper, entry):
    assert set(entry) in ({"where", "preset", "settings"}, {"where", "method", "defaults"})
    assert entry.get("settings") or entry.get("defaults")
    assert disagreements(entry) == []


def test_a_stated_value_that_is_changed_is_found():
    for _, entry in ENTRIES:
        kind = "settings" if "settings" in entry else "defaults"
        for key in entry[kind]:
            changed = copy.deepcopy(entry)
            changed[kind][key] = "another"
            assert disagreements(changed) == [key]
            del changed[kind][key]
            changed[kind]["unknown.setting"] = None
            assert disagreements(changed) == ["unknown.setting"]


def rows(page: Path) -> list[list[str]]:
    """Cells of the rows of a page's tables, without their heads."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "In the paper" and set(row[0]) != {"-"}]


@cache
def names(path: Path) -> frozenset[str]:
    """Functions, classes, variables, arguments and keys of dictionaries that a file defines."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Dict):
            found |= {k.value for k in node.keys if isinstance(k, ast.Constant)}
    return frozenset(found)


def lost(text: str) -> list[str]:
    """References `path.py: name` to a file or a name that is not there."""
    references = re.findall(r"`([\w/]+\.py): ([\w.]+)`", text)
    return [
        f"{path}: {name}"
        for path, name in references
        if not (ROOT / path).is_file() or not set(name.split(".")) <= names(ROOT / path)
    ]


def test_a_lost_reference_is_found():
    text = (
        "`tests/fidelity_test.py: lost`, `tests/fidelity_test.py: gone`, "
        "`tests/nowhere.py: lost`, `fedjax_pfl/settings/general.py: learning_rate` and "
        "`fedjax_pfl/algorithms/shared/method.py: Method.label`"
    )
    assert lost(text) == ["tests/fidelity_test.py: gone", "tests/nowhere.py: lost"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_row_has_three_cells_and_a_status_and_names_code_that_exists(page):
    each = rows(page)
    assert len(each) > 20
    assert [row for row in each if len(row) != 3] == []
    assert [row for row in each if not re.match(STATUS, row[2])] == []
    assert any("`" in row[1] for row in each)
    assert lost(page.read_text()) == []


def test_statuses():
    good = (
        "as in the paper",
        "as in the paper; a setting gives the code's",
        "the paper is silent: our choice",
        "the paper is silent: our choice, 200 units",
        "the paper is silent: our choice of widths",
        "differs: the sign is wrong",
    )
    bad = ("", "differs", "differs: ", "as in the papers", "the paper is silent", "similar")
    assert [text for text in (*good, *bad) if re.match(STATUS, text)] == [*good]


def test_every_paper_has_a_page_and_stated_values_and_the_first_page_leads_to_it():
    text = (ROOT / "docs" / "fidelity.md").read_text()
    papers = sorted(p.parent.name for p in (ROOT / "experiments/papers").glob("*/published.json"))
    assert len(papers) == 4
    assert papers == [page.stem for page in PAGES] == [path.parent.name for path in STATED]
    assert [name for name in papers if f"](fidelity/{name}.md)" not in text] == []
