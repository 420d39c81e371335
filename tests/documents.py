"""The code that documents show: it is run, as a reader would run it. And where links lead."""

import importlib.util
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
def module(page: str, number: int = 0) -> ModuleType:
    """A block as a module that can be imported under its first function's name."""
    code = blocks(page)[number]
    name = re.findall(r"^def (\w+)", code, re.M)[0]
    made = ModuleType(name)
    exec(compile(code, f"{page}:{name}.py", "exec"), made.__dict__)
    sys.modules[name] = made
    return made


def script(name: str) -> ModuleType:
    """A Python file beside the documents, imported."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def lost(page: Path) -> list[str]:
    """The relative links of a page to what is not there, be it a file or a heading in it."""
    targets = re.findall(r"\]\(([^)\s]+)\)", _plain(page))
    return [t for t in targets if "://" not in t and not _there(page, *t.partition("#")[::2])]


def _there(page: Path, path: str, heading: str) -> bool:
    file = page.parent / path if path else page
    if not file.exists():
        return False
    titles = re.findall(r"^#+ (.+)$", _plain(file), re.M) if heading else []
    return not heading or heading in [_anchor(title) for title in titles]


def _plain(page: Path) -> str:
    """Without blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
