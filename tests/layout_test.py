"""Which package may import which: each only what stands below it, and the library no command."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Bottom first. Packages on one line do not import each other.
FLOORS = (
    ("core",),
    ("data", "networks"),
    ("algorithms", "simulation"),
    ("transforms",),
    ("settings",),
    ("report",),
    ("runs",),
    ("presets", "deploy", "testing"),
    ("cli",),
)
BELOW = {
    package: {lower for under in FLOORS[:floor] for lower in under}
    for floor, packages in enumerate(FLOORS)
    for package in packages
}


def imported(path: Path) -> set[str]:
    """The dotted names that a file imports, of which the first two parts count."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def test_every_package_has_a_floor():
    there = {path.parent.name for path in (ROOT / "fedjax_pfl").glob("*/__init__.py")}
    assert there == set(BELOW)
    loose = {path.name for path in (ROOT / "fedjax_pfl").glob("*.py")}
    assert loose == {"__init__.py"}


def test_a_package_imports_only_what_stands_below_it():
    wrong = []
    for package, below in BELOW.items():
        for path in sorted((ROOT / "fedjax_pfl" / package).rglob("*.py")):
            for name in imported(path):
                top, _, rest = name.partition(".")
                other = rest.partition(".")[0]
                if top == "fedjax_pfl" and other not in below | {package}:
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
                if top in ("experiments", "tests", "docs", "third_party"):
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_command_imports_another_papers_tables_or_studies():
    """What belongs to one paper is under its name, and only what runs all papers imports it."""
    papers = ROOT / "experiments" / "papers"
    names = {path.name for path in papers.iterdir() if (path / "published.json").is_file()}
    assert names == {"pfedla", "pfedhn", "fedmn", "factorized_fl"}
    for name in names:
        for path in (papers / name).glob("*.py"):
            others = [i for i in imported(path) if i.startswith("experiments.papers.")]
            assert not [i for i in others if i.split(".")[2] in names - {name}], path


def test_a_file_is_short_enough_to_be_read_top_to_bottom():
    folders = ("fedjax_pfl", "experiments", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    lengths = {str(one.relative_to(ROOT)): len(one.read_text().splitlines()) for one in files}
    assert len(files) > 400
    assert {name: lines for name, lines in lengths.items() if lines > 400} == {}


def test_one_module_uses_jaxprs():
    """Names in JAX's own modules for jaxprs change between its releases."""
    users = set()
    for path in (ROOT / "fedjax_pfl").rglob("*.py"):
        if any(name.startswith(("jax.extend", "jax.interpreters")) for name in imported(path)):
            users.add(path.relative_to(ROOT / "fedjax_pfl").as_posix())
    assert users == {"core/jaxprs.py"}
