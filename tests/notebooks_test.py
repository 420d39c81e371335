"""Every notebook runs from top to bottom in a process of its own, and its file is clean."""

import ast
import json
import os
import re
import subprocess
import sys

import pytest

from tests import documents, notebooks

# What makes each one small.
SMALL = {
    "first_run": "rounds, model = 1, 'mlp'",
    "four_methods": """
rounds, seeds, model, after = 2, 1, "mlp", False
""",
    "layer_weights": "rounds, model = 2, 'mlp'",
    "your_data": "rounds = 2",
    "your_method": "rounds, seeds = 2, 1",
}


@pytest.mark.slow("a process with programs of its own for each")
@pytest.mark.parametrize("name", notebooks.NAMES)
def test_runs_from_top_to_bottom(name, tmp_path, tmp_path_factory):
    program = f"from tests import notebooks; notebooks.run({name!r}, {SMALL[name]!r})"
    quick = {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        # Fewer devices take less to compile.
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1",
        "MPLBACKEND": "Agg",
    }
    paths = {
        "PYTHONPATH": str(notebooks.FOLDER.parent),
        "XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, **quick, **paths},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("cpu [CpuDevice(id=0)")
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


# Points; your_data prints single clients, of which an example is 1.6 points.
APART = {name: 4 if name == "your_data" else 2 for name in notebooks.NAMES}


@pytest.mark.slow("every notebook at its size, minutes each")
@pytest.mark.parametrize("name", notebooks.NAMES)
def test_the_stored_numbers_are_what_a_run_gives(name, tmp_path):
    """The same text but for numbers, the same bytes, and accuracies that rounding explains."""
    program = f"json.dump(notebooks.run({name!r}), open('texts.json', 'w'))"
    done = subprocess.run(
        [sys.executable, "-c", f"import json; from tests import notebooks; {program}"],
        cwd=tmp_path,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "MPLBACKEND": "Agg",
            "PYTHONPATH": str(notebooks.FOLDER.parent),
        },
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found, stored = json.loads((tmp_path / "texts.json").read_text()), notebooks.stored(name)
    assert list(found) == list(stored)
    for cell in list(stored)[2:]:  # behind what is installed and the devices that there are
        assert notebooks.wording(found[cell]) == notebooks.wording(stored[cell]), cell
        assert notebooks.exact(found[cell]) == notebooks.exact(stored[cell]), cell
        wanted = notebooks.accuracies(stored[cell])
        assert notebooks.accuracies(found[cell]) == pytest.approx(wanted, abs=APART[name]), cell


def test_numbers_are_read_from_what_a_notebook_prints():
    text = (
        "fedavg         before 94.2 %\nBern  before 0.953   after 0.953\n"
        "last, round 20  before  93.33     93.33  4.45       85.42  0.2687\n"
        "bytes    7.14 MB down, 7.14 MB up\nconv2      3,712,000   3,712,000\n"
        "         before  after    worst 10 %  MB down  MB up  rounds  seeds\n"
        "FedAvg  74.48 ± 0.44      –  51.04 ± 7.37       12     12      20      2\n"
        "FedMN   94.00  97.00  51.04       66.2   66.2      20      2\n\n"
        "         before       p  after  p  clients\nfedavgm  +16.67  0.0003      –  –       20\n"
    )
    points = [94.2, 95.3, 95.3, 93.33, 74.48, 94.0, 97.0]
    assert notebooks.accuracies(text) == pytest.approx(points)
    assert notebooks.exact(text) == [
        "7.14 MB down",
        "7.14 MB up",
        "3,712,000",
        "3,712,000",
        *("12", "12", "20", "2"),
    ]
    assert notebooks.wording("Bern  before 0.953\n----- 1.2e-3") == ["Bern before 0", " 0"]


def test_what_notebooks_write_is_not_tracked():
    """Jupyter runs them in their folder; the first test says that they write to `runs` alone."""
    ignored = (notebooks.FOLDER.parent / ".gitignore").read_text().splitlines()
    assert {"/runs/", "/notebooks/runs/", ".ipynb_checkpoints/"} <= set(ignored)


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_the_file_is_clean(name):
    path = notebooks.FOLDER / f"{name}.ipynb"
    assert path.stat().st_size < 150_000
    book = notebooks.read(name)
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert set(book["metadata"]) == {"kernelspec", "language_info"}
    cells = book["cells"]
    ids = [cell["id"] for cell in cells]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[\w-]{1,64}", one) for one in ids)
    assert [cell["id"] for cell in cells if "tags" in cell["metadata"]] == ["parameters"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["id"] for cell in code[:3]] == ["install", "devices", "parameters"]
    # Run once, in order; nothing went wrong, and nothing tells of the machine.
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for output in (output for cell in code for output in cell["outputs"]):
        assert output["output_type"] in ("stream", "display_data")
        assert output.get("name") != "stderr"
        text = "".join([*output.get("text", ()), *output.get("data", {}).get("text/plain", ())])
        assert not re.search(r"/(tmp|home|root|work)/", text)


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_beginnings_are_the_same(name):
    first, *_ = notebooks.NAMES
    for cell in ("install", "devices"):
        assert notebooks.code(name)[cell] == notebooks.code(first)[cell]
    assert "%pip install -q {clone}" in json.dumps(notebooks.read(name))
    assert "%pip" not in notebooks.code(name)["install"]


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_run_directory_is_named_after_all_that_may_change(name):
    """Or another value, run again, would find a run with other settings."""
    cells = {cell: ast.parse(source) for cell, source in notebooks.code(name).items()}

    def words(node):
        return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}

    parameters = {
        target.id for statement in cells["parameters"].body for target in statement.targets
    }
    named = set()
    for node in ast.walk(cells["train"]):
        if isinstance(node, ast.JoinedStr) and ast.unparse(node).startswith("f'runs/"):
            named |= words(node)
    for node in ast.walk(cells["train"]):  # what a name stands for
        if isinstance(node, ast.For) and words(node.target) & named:
            named |= words(node.iter)
        if isinstance(node, ast.Assign) and words(node.targets[0]) & named:
            named |= words(node.value)
    assert parameters <= named


def test_the_method_is_that_of_the_document():
    (ours,) = (
        node
        for node in ast.parse(notebooks.code("your_method")["fedavgm"]).body
        if isinstance(node, ast.FunctionDef)
    )
    (theirs,) = (
        node
        for node in ast.parse(documents.blocks("your_method.md")[0]).body
        if isinstance(node, ast.FunctionDef)
    )
    assert notebooks.form(ours) == notebooks.form(theirs)


def test_the_document_names_all():
    page = (documents.DOCS / "notebooks.md").read_text()
    assert re.findall(r"`(\w+)\.ipynb`", page) == [
        "first_run",
        "layer_weights",
        "four_methods",
        "your_data",
        "your_method",
    ]
    assert set(re.findall(r"`(\w+)\.ipynb`", page)) == set(notebooks.NAMES) == set(SMALL)


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_no_text_is_left_unfinished(name):
    cells = json.loads((notebooks.FOLDER / f"{name}.ipynb").read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    assert all(texts)
    assert not [text for text in texts if re.search(r"\bXX+\b", text)]
