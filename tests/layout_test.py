"""Packages import only from lower floors, and files are short."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Lowest first. Packages of one floor do not import each other.
FLOORS = (
    ("core",),
    ("data", "networks"),
    ("algorithms", "simulation"),
    ("transforms",),
    ("settings",),
    ("report",),
    ("runs",),
    ("presets", "deploy", "testing", "audit"),
    ("cli",),
)
ALLOWED = {
    package: {package} | {name for packages in FLOORS[:floor] for name in packages}
    for floor, packages in enumerate(FLOORS)
    for package in packages
}


def imports(path: Path) -> set[str]:
    """Returns the dotted names that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
    return names


def test_every_package_has_a_floor():
    library = ROOT / "fedjax_pfl"
    assert {path.parent.name for path in library.glob("*/__init__.py")} == set(ALLOWED)
    assert {path.name for path in library.glob("*.py")} == {"__init__.py"}


def test_a_package_imports_only_from_lower_floors():
    wrong = []
    for package, allowed in ALLOWED.items():
        for path in sorted((ROOT / "fedjax_pfl" / package).rglob("*.py")):
            for name in imports(path):
                top, *parts = name.split(".")[:2]
                outside_library = ("experiments", "tests", "docs", "third_party")
                if top in outside_library or (top == "fedjax_pfl" and not set(parts) <= allowed):
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_studies_of_a_paper_do_not_import_another_paper():
    papers = ROOT / "experiments" / "papers"
    names = {path.name for path in papers.iterdir() if (path / "published.json").is_file()}
    assert names == {"pfedla", "pfedhn", "fedmn", "factorized_fl"}
    for name in names:
        for path in (papers / name).glob("*.py"):
            modules = [i for i in imports(path) if i.startswith("experiments.papers.")]
            assert not [i for i in modules if i.split(".")[2] in names - {name}], path


def test_a_file_has_at_most_400_lines():
    folders = ("fedjax_pfl", "experiments", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 400
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: lines for name, lines in lengths.items() if lines > 400} == {}


def test_one_module_uses_jaxprs():
    """Names in JAX's own modules for jaxprs change between its releases."""
    users = set()
    for path in (ROOT / "fedjax_pfl").rglob("*.py"):
        if any(name.startswith(("jax.extend", "jax.interpreters")) for name in imports(path)):
            users.add(path.relative_to(ROOT / "fedjax_pfl").as_posix())
    assert users == {"core/jaxprs.py"}
