"""A notebook's code as a program, without Jupyter."""

import ast
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


def run(name, small):
    """Run them as one program, with `small` behind the parameters."""
    sys.modules["IPython"] = top = types.ModuleType("IPython")
    top.version_info, top.get_ipython = (9, 0), lambda: None  # which matplotlib asks for
    sys.modules["IPython.display"] = shown = types.ModuleType("IPython.display")
    shown.Image, shown.display = Picture, lambda thing: None
    names = {"__name__": "__main__"}
    for cell, source in code(name).items():
        exec(compile(source, f"{name}:{cell}", "exec"), names)
        if cell == "parameters":
            before = set(names)
            exec(small, names)
            assert set(names) == before, "it changes what is there, and nothing else"


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
