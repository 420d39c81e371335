"""A notebook's code as a program, without Jupyter."""

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
    """A notebook as it is stored."""
    return json.loads((FOLDER / f"{name}.ipynb").read_text())


def code(name):
    """Its code cells, by id, in order; what is for IPython alone does nothing."""
    cells = (cell for cell in read(name)["cells"] if cell["cell_type"] == "code")

    def alone(source):
        return re.sub(r"^( *)%.*$", r"\1pass", source, flags=re.M)

    return {cell["id"]: alone("".join(cell["source"])) for cell in cells}


def run(name, small=""):
    """Runs them as one program, with `small` behind the parameters; returns each cell's text."""
    sys.modules["IPython"] = top = types.ModuleType("IPython")
    top.version_info, top.get_ipython = (9, 0), lambda: None  # which matplotlib asks for
    sys.modules["IPython.display"] = shown = types.ModuleType("IPython.display")
    shown.Image, shown.display = Picture, lambda thing: None
    names, texts = {"__name__": "__main__"}, {}
    for cell, source in code(name).items():
        with contextlib.redirect_stdout(io.StringIO()) as text:
            exec(compile(source, f"{name}:{cell}", "exec"), names)
        print(text.getvalue(), end="")
        texts[cell] = text.getvalue()
        if cell == "parameters":
            before = set(names)
            exec(small, names)
            assert set(names) == before, "it changes what is there, and nothing else"
    return texts


def stored(name):
    """Returns the text below each code cell, by the cell's id."""
    cells = (cell for cell in read(name)["cells"] if cell["cell_type"] == "code")
    return {c["id"]: "".join(t for o in c["outputs"] for t in o.get("text", ())) for c in cells}


def wording(text):
    """Returns the lines of a text with every number, and the width of columns, taken out."""
    narrow = re.sub(r"[ -]*(  |--)[ -]*", " ", text)
    return re.sub(r"[-+]?\d[\d.,]*(e-?\d+)?", "0", narrow).splitlines()


def accuracies(text):
    """Returns mean accuracies in per cent: behind "before" or "after", and in tables' columns."""
    scale = {"": 100.0, " %": 1.0}
    said = re.findall(r"(?:before|after) +(\d+\.\d+)( %|)(?=\s|$)", text)
    points = [float(value) * (scale[unit] if float(value) <= 1 else 1) for value, unit in said]
    return points + [float(row[head]) for row in rows(text) for head in _SCORES if row[head] != "–"]


def exact(text):
    """Returns what is the same on every machine: bytes, rounds and seeds.

    Not the bytes of methods that learn which part of a model travels.
    """
    bills = re.findall(r"\d{1,3}(?:,\d{3})+|[\d.]+ [kMG]?B (?:down|up)", text)
    fixed = [row for row in rows(text) if row["label"] not in ("FedMN", "Factorized-FL")]
    return bills + [row[head] for row in fixed for head in _EXACT]


_SCORES = ("before", "after")
_EXACT = ("MB down", "MB up", "rounds", "seeds")


def rows(text):
    """Returns the rows of a table of results as mappings, without deviations."""
    found, heads = [], None
    for line in text.splitlines():
        words = re.split(r" {2,}", re.sub(r" ± [\d.]+", "", line.strip()))
        if "MB down" in words:
            heads = words
        elif heads and len(words) == len(heads) + 1:
            found.append(dict(zip(["label", *heads], words, strict=True)))
        else:
            heads = None
    return found


class Picture:
    """Stands for IPython's Image: the file is there, and a picture."""

    def __init__(self, filename, width=None):
        assert Path(filename).read_bytes().startswith(b"\x89PNG")


def form(function):
    """What a function does, without its annotations and docstrings."""
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        elif isinstance(node, ast.arg):
            node.annotation = None
    return ast.dump(function)
