"""Runs notebooks as programs, without Jupyter."""

import ast
import contextlib
import io
import json
import re
import sys
import types
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name):
    """Returns the stored notebook."""
    return json.loads((FOLDER / f"{name}.ipynb").read_text())


def code(name):
    """Returns the code cells by id, in order, without IPython's magics."""
    cells = (cell for cell in read(name)["cells"] if cell["cell_type"] == "code")
    return {c["id"]: re.sub(r"(?m)^( *)%.*$", r"\1pass", "".join(c["source"])) for c in cells}


def run(name, changes=""):
    """Runs a notebook with changed parameters, and returns the text that each cell prints."""
    sys.modules["IPython"] = ipython = types.ModuleType("IPython")
    ipython.version_info, ipython.get_ipython = (9, 0), lambda: None  # for matplotlib
    sys.modules["IPython.display"] = display = types.ModuleType("IPython.display")
    display.Image, display.display = Picture, lambda value: None
    names, texts = {"__name__": "__main__"}, {}
    for cell, source in code(name).items():
        with contextlib.redirect_stdout(io.StringIO()) as text:
            exec(compile(source, f"{name}:{cell}", "exec"), names)
        print(text.getvalue(), end="")
        texts[cell] = text.getvalue()
        if cell == "parameters":
            parameters = set(names)
            exec(changes, names)
            assert set(names) == parameters, "changes may not define new parameters"
    return texts


def stored(name):
    """Returns the text below each code cell, by the cell's id."""
    cells = (cell for cell in read(name)["cells"] if cell["cell_type"] == "code")
    return {c["id"]: "".join(t for o in c["outputs"] for t in o.get("text", ())) for c in cells}


def wording(text):
    """Returns the lines of a text without numbers and column widths."""
    narrow = re.sub(r"[ -]*(  |--)[ -]*", " ", text)
    return re.sub(r"[-+]?\d[\d.,]*(e-?\d+)?", "0", narrow).splitlines()


def accuracies(text):
    """Returns mean accuracies in per cent, from lines and tables."""
    scale = {"": 100.0, " %": 1.0}
    matches = re.findall(r"(?:before|after) +(\d+\.\d+)( %|)(?=\s|$)", text)
    points = [float(value) * (scale[unit] if float(value) <= 1 else 1) for value, unit in matches]
    return points + [float(row[head]) for row in rows(text) for head in _SCORES if row[head] != "–"]


def exact(text):
    """Returns the numbers that are equal on every machine: bytes, rounds and seeds.

    Leaves out the bytes of methods that learn which part of a model they send.
    """
    bills = re.findall(r"\d{1,3}(?:,\d{3})+|[\d.]+ [kMG]?B (?:down|up)", text)
    fixed = [row for row in rows(text) if row["label"] not in ("FedMN", "Factorized-FL")]
    return bills + [row[head] for row in fixed for head in _EXACT]


_SCORES = ("before", "after")
_EXACT = ("MB down", "MB up", "rounds", "seeds")


def rows(text):
    """Returns the rows of a table of results as mappings, without deviations."""
    table, heads = [], None
    for line in text.splitlines():
        cells = re.split(r" {2,}", re.sub(r" ± [\d.]+", "", line.strip()))
        if "MB down" in cells:
            heads = cells
        elif heads and len(cells) == len(heads) + 1:
            table.append(dict(zip(["label", *heads], cells, strict=True)))
        else:
            heads = None
    return table


class Picture:
    """Replaces IPython's Image; requires a PNG file."""

    def __init__(self, filename, width=None):
        assert Path(filename).read_bytes().startswith(b"\x89PNG")


def form(function):
    """Returns a function's syntax tree without annotations and docstrings."""
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        elif isinstance(node, ast.arg):
            node.annotation = None
    return ast.dump(function)
