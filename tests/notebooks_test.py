"""Notebooks run from top to bottom, and their files are clean."""

import ast
import json
import os
import re
import subprocess
import sys

import pytest

from tests import documents, notebooks

CHANGES = {  # parameters of a quick run
    "first_run": "rounds, model = 1, 'mlp'",
    "four_methods": "rounds, seeds, model, after = 2, 1, 'mlp', False",
    "layer_weights": "rounds, model = 2, 'mlp'",
    "your_data": "rounds = 2",
    "your_method": "rounds, seeds = 2, 1",
}


def run_program(code, directory, **environment):
    """Runs a program in a new process, in a directory, and returns its output."""
    process = subprocess.run(
        [sys.executable, "-c", f"import json; from tests import notebooks; {code}"],
        cwd=directory,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "MPLBACKEND": "Agg",
            "PYTHONPATH": str(notebooks.FOLDER.parent),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


@pytest.mark.slow("a process with its programs for each notebook")
@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_notebook_runs_and_writes_only_to_runs(name, tmp_path, tmp_path_factory):
    output = run_program(
        f"notebooks.run({name!r}, {CHANGES[name]!r})",
        tmp_path,
        JAX_DISABLE_MOST_OPTIMIZATIONS="1",
        XLA_FLAGS=f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1",
        XDG_CACHE_HOME=str(tmp_path_factory.getbasetemp() / "cache"),
    )
    assert output.startswith("cpu [CpuDevice(id=0)")
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
    ignored = (notebooks.FOLDER.parent / ".gitignore").read_text().splitlines()
    assert {"/runs/", "/notebooks/runs/", ".ipynb_checkpoints/"} <= set(ignored)


# In points. your_data prints single clients, where an example is 1.6 points.
TOLERANCES = {name: 4 if name == "your_data" else 2 for name in notebooks.NAMES}


@pytest.mark.slow("every notebook at its size, minutes each")
@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_run_reproduces_the_stored_text(name, tmp_path):
    """Compares wording, bytes and accuracies, which differ by rounding."""
    run_program(f"json.dump(notebooks.run({name!r}), open('texts.json', 'w'))", tmp_path)
    texts, stored = json.loads((tmp_path / "texts.json").read_text()), notebooks.stored(name)
    assert list(texts) == list(stored)
    for cell in list(stored)[2:]:  # the first two depend on the machine
        assert notebooks.wording(texts[cell]) == notebooks.wording(stored[cell]), cell
        assert notebooks.exact(texts[cell]) == notebooks.exact(stored[cell]), cell
        expected = pytest.approx(notebooks.accuracies(stored[cell]), abs=TOLERANCES[name])
        assert notebooks.accuracies(texts[cell]) == expected, cell


def test_numbers_are_read_from_printed_text():
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


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_file_is_clean(name):
    path = notebooks.FOLDER / f"{name}.ipynb"
    assert path.stat().st_size < 150_000
    book = notebooks.read(name)
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert set(book["metadata"]) == {"kernelspec", "language_info"}
    cells = book["cells"]
    ids = [cell["id"] for cell in cells]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[\w-]{1,64}", id_) for id_ in ids)
    assert [cell["id"] for cell in cells if "tags" in cell["metadata"]] == ["parameters"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["id"] for cell in code[:3]] == ["install", "devices", "parameters"]
    # Executed once, in order, without errors and without paths of the machine.
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for output in (output for cell in code for output in cell["outputs"]):
        assert output["output_type"] in ("stream", "display_data")
        assert output.get("name") != "stderr"
        text = "".join([*output.get("text", ()), *output.get("data", {}).get("text/plain", ())])
        assert not re.search(r"/(tmp|home|root|work)/", text)
    texts = ["".join(cell["source"]) for cell in cells]
    assert all(texts)
    assert not [text for text in texts if re.search(r"\bXX+\b", text)]
    # All notebooks start with the same cells.
    for cell in ("install", "devices"):
        assert notebooks.code(name)[cell] == notebooks.code(notebooks.NAMES[0])[cell]
    assert "%pip install -q {clone}" in json.dumps(book)
    assert "%pip" not in notebooks.code(name)["install"]


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_names_of_run_directories_contain_all_parameters(name):
    """Otherwise a changed parameter would find a run with other settings."""
    cells = {cell: ast.parse(source) for cell, source in notebooks.code(name).items()}

    def names(node):
        return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}

    parameters = {
        target.id for statement in cells["parameters"].body for target in statement.targets
    }
    used = set()
    for node in ast.walk(cells["train"]):
        if isinstance(node, ast.JoinedStr) and ast.unparse(node).startswith("f'runs/"):
            used |= names(node)
    for node in ast.walk(cells["train"]):  # values of these names
        if isinstance(node, ast.For) and names(node.target) & used:
            used |= names(node.iter)
        if isinstance(node, ast.Assign) and names(node.targets[0]) & used:
            used |= names(node.value)
    assert parameters <= used


def test_the_method_of_the_notebook_is_on_the_page():
    sources = notebooks.code("your_method")["fedavgm"], documents.blocks("your_method.md")[0]
    bodies = [ast.parse(source).body for source in sources]
    (notebook,), (page,) = ([n for n in body if isinstance(n, ast.FunctionDef)] for body in bodies)
    assert notebooks.form(notebook) == notebooks.form(page)


def test_the_page_names_all_notebooks():
    page = (documents.DOCS / "notebooks.md").read_text()
    names = re.findall(r"`(\w+)\.ipynb`", page)
    assert names == ["first_run", "layer_weights", "four_methods", "your_data", "your_method"]
    assert set(names) == set(notebooks.NAMES) == set(CHANGES)
