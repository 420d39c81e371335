"""The code that documents show: it is run, as a reader would run it."""

import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str, language: str = "python") -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.S | re.M)


def lines(code: str) -> int:
    """How many lines of code there are, without empty lines and lines of comment."""
    return sum(bool(re.match(r"\s*[^\s#]", line)) for line in code.splitlines())


@cache
def module(page: str) -> ModuleType:
    """The first block as a module that can be imported under its first function's name."""
    code = blocks(page)[0]
    name = re.findall(r"^def (\w+)", code, re.M)[0]
    made = ModuleType(name)
    exec(compile(code, f"{page}:{name}.py", "exec"), made.__dict__)
    sys.modules[name] = made
    return made
