"""Runs the code of the documents, and checks their commands, links and generated parts."""

import ast
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import fedjax_pfl
from experiments import studies
from experiments.papers import agreement
from experiments.papers.table import published
from experiments.papers.tables import TABLES
from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.shared.initial_state import initial_variables
from fedjax_pfl.algorithms.shared.model_training import model_trainer
from fedjax_pfl.cli.main import COMMANDS, load
from fedjax_pfl.cli.tune import configure_methods
from fedjax_pfl.core.algorithm import Algorithm, ClientResult, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.shape_check import check_shapes
from fedjax_pfl.presets import pfedla
from fedjax_pfl.runs.tuning import grids, search, show, trials
from fedjax_pfl.runs.tuning.choice import PointResult
from fedjax_pfl.settings import configuration, listing
from fedjax_pfl.settings.general import settings_with
from tests import cases, documents, tiny


@pytest.mark.slow("all code of a page")
def test_your_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, reading = documents.blocks("your_data.md")
    assert documents.lines(code) < 20
    names = {"__name__": "__main__"}
    exec(code, names)
    *clients, page = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in clients] == ["Amsterdam", "Bern", "Cairo", "Delhi"]
    assert all(float(line.split()[1]) > 0.8 for line in clients)
    assert (tmp_path / page).is_file()
    # Each client has all examples of its owner.
    trained = np.asarray(names["result"].federation.counts)
    tested = [int(c["test_examples"]) for c in names["result"].clients]
    per_owner = np.unique(names["ids"], return_counts=True)[1]
    np.testing.assert_array_equal(trained + tested, per_owner)
    # The values that the page reads from the run directory equal those of the result.
    exec(reading, names)
    result = names["result"]
    scores = [line["before"]["accuracy_mean"] for line in result.metrics]
    np.testing.assert_array_equal(names["curve"], list(zip([5, 10, 15, 20], scores, strict=True)))
    for column in ("before_accuracy", "bytes_up", "client_updates"):
        expected = [float(client[column]) for client in result.clients]
        np.testing.assert_allclose(names["clients"][column], expected, rtol=1e-6)
    (pandas_code,) = documents.blocks("your_data.md", "py")  # pandas is no dependency
    compile(pandas_code, "pandas", "exec")


@pytest.mark.slow("all code of a page")
def test_your_network_and_task(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for code in documents.blocks("your_model.md"):
        assert documents.lines(code) <= 22
        kept = {name: names[name] for name in ("ConvNet", "result") if name in names}
        names = {"__name__": "__main__", **kept}
        exec(code, names)
        if "facts" in names:  # normalised digits have a mean near 0
            assert abs(names["x"].mean()) < 0.3
        last = names["result"].metrics[-1]["before"]
        # An untrained head reaches 0.25 accuracy or covers half of the targets.
        assert last.get("accuracy_mean", last.get("covered_mean")) > 0.6
        if "quantile" in names:
            assert list(names["result"].metrics[-1]["custom_metrics"]) == ["pinball", "covered"]
    linen, accuracy, in_loop, covered, top2 = capsys.readouterr().out.splitlines()
    assert len(re.findall(r"\d+", linen)) == len(re.findall(r"\d+", in_loop)) == 5
    assert abs(float(covered) - 0.8) < 0.12
    assert float(accuracy) > 0.6
    assert last["accuracy_mean"] < float(top2) <= 1


@pytest.mark.slow("three short programs")
def test_short_programs_run(tmp_path, monkeypatch, capsys):
    """The programs of three pages, shrunk to one round of a small network and to few examples."""
    monkeypatch.chdir(tmp_path)
    for page in ("index.md", "settings.md", "scaling.md"):
        (code,) = documents.blocks(page)
        code = code.replace('"rounds": 20', '"rounds": 1, "model": "mlp"')
        code = code.replace("1_000_000", "40").replace("10_000", "20").replace("...", "1")
        exec(code, names := {"__name__": "__main__"})
    assert 0 < float(capsys.readouterr().out) < 1  # the first page prints an accuracy
    assert (tmp_path / "runs" / "first" / "report.html").is_file()
    assert (names["x"] == 1).all()


@pytest.mark.slow("all code of a page")
def test_models_as_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = documents.blocks("models.md")
    exec(code, {"__name__": "__main__"})
    predicted, labels = (re.findall(r"\d+", line) for line in capsys.readouterr().out.splitlines())
    assert len(predicted) == len(labels) == 5
    assert sum(map(str.__eq__, predicted, labels)) > 2  # a reader wants to see that it works
    assert {p.name for p in (tmp_path / "two-models").iterdir()} == {
        "client-0.safetensors",
        "client-3.safetensors",
    }


def test_lines_of_code_are_counted():
    assert documents.lines("# no\n\nx = 1  # yes\n    y = 2\n  # no\n") == 2


def test_page_on_tuning_has_equal_budgets_and_all_training_settings():
    text = (documents.DOCS / "tuning.md").read_text()
    assert all(f"`{name}`" in text for name in grids.TRAINING)
    command = shlex.split(text.partition("\n    fedjax-pfl ")[2].partition("\n\n")[0])
    flag_values = dict(word.removeprefix("--").split("=", 1) for word in command if "=" in word)
    methods, (file, preset) = flag_values["methods"].split(","), flag_values["config"].split(":")
    assert file == "pfedla"
    changes = {"validation_fraction": float(flag_values["config.validation_fraction"])}
    base = pfedla.get_config(preset)
    base.update(changes)
    source = f"{Path(pfedla.__file__)}:{preset}"
    configs = configure_methods(source, base, changes, methods)
    plan = search.plan(
        configs, [flag_values["grid"]], int(flag_values["rounds"]), None, as_preset=True
    )
    results = {
        trial.method: [PointResult(point, base, {}, 2) for point in trial.points] for trial in plan
    }
    assert {len(tried) for tried in results.values()} == {4}
    (output,) = documents.blocks("tuning.md", "text")
    head = show.head(results, int(flag_values["seeds"]), configs)
    assert head == " ".join(output.partition("\n\n")[0].split())


def test_page_on_robustness_lists_the_resumable_settings():
    page = (documents.DOCS / "robustness.md").read_text()
    sentence = page[page.index("results may differ:") :].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) == set(settings_with("resumable"))


def test_page_on_tuning_tunes_a_user_defined_method(tmp_path, monkeypatch, capsys):
    """Checks only the planned runs; running them is tested elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fedjax_pfl, "prepare_devices", lambda: None)
    planned = []
    monkeypatch.setattr(trials, "run", lambda plan, *_: planned.extend(plan))
    documents.module("your_method.md")
    (code,) = documents.blocks("tuning.md")
    exec(code, names := {})
    assert {trial.method: len(trial.points) for trial in planned} == {"fedavgm": 2, "fedavg": 2}
    assert names["chosen"] == {}
    assert "fedavgm.beta=0.9" in capsys.readouterr().out


def test_fedavg_on_the_page_of_the_contract_is_valid():
    """It passes the shape check and has at most ten lines besides function headers."""
    (code,) = documents.blocks("contract.md")
    (data, federation), training = tiny.federated(), cases.training(keep_optimizer=False)
    functions = (initial_variables, model_trainer, State, ClientResult, Algorithm)
    names = {function.__name__: function for function in functions}
    arguments = {"model": tiny.Net(), "training": training}
    exec(code, names := {**names, **arguments, "federation": federation})
    check_shapes("fedavg", names["fedavg"], federation, data)
    statements = [line for line in code.splitlines() if line.strip() and "def " not in line]
    assert len(statements) <= 10


# Contents of the pages, in a clone and on the site.

ROOT = documents.DOCS.parent
PAGES = sorted(p.relative_to(ROOT) for p in documents.DOCS.glob("*.md"))
FIDELITY = sorted(p.relative_to(ROOT) for p in documents.DOCS.glob("fidelity/*.md"))
RESULTS = sorted(p.relative_to(ROOT) for p in (ROOT / "experiments" / "results").glob("*.md"))
OTHER_PAGES = ("README.md", "BUILD.md", "CONTRIBUTING.md", "CHANGELOG.md", "third_party/README.md")


def texts():
    """Returns the pages, the docstrings of scripts and presets, and the help of commands."""
    pages = {str(p): (ROOT / p).read_text() for p in (*PAGES, *FIDELITY, *RESULTS, *OTHER_PAGES)}
    for folder in ("experiments", "fedjax_pfl/presets"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            docstring = ast.get_docstring(ast.parse(path.read_text()))
            pages[str(path.relative_to(ROOT))] = docstring or ""
    return pages | {f"{name} --help": load(name).help() for name in COMMANDS}


@pytest.mark.slow("completes the settings of all commands")
@pytest.mark.filterwarnings("ignore:the load_module")  # raised by the reader of config files
def test_every_command_on_a_page_is_valid():
    """Commands, presets, settings and flags exist, and the settings are valid together."""
    all_commands = [
        (place, *command) for place, text in texts().items() for command in documents.commands(text)
    ]
    assert len(all_commands) > 120
    assert {"README.md", "docs/index.md", "experiments/reproduce.py"} < {
        command[0] for command in all_commands
    }
    assert [
        (*command, why)
        for command in all_commands
        if (why := documents.reason_to_refuse(*command[1:]))
    ] == []


def test_each_command_has_one_spelling():
    """Pages show the installed command, and modules only for what is not installed."""
    for place, text in texts().items():
        assert set(re.findall(r"fedjax-pfl ([a-z][a-z_-]*)", text)) <= set(COMMANDS), place
        modules = set(re.findall(r"python -m experiments\.([a-z_]+)", text))
        assert modules <= set(documents.SCRIPTS), place


def test_commands_are_found_on_a_page():
    page = (
        "Give `fedjax-pfl list\nsettings`, or\n\n"
        "    python -m experiments.pfedla --config.rounds=2 \\\n        --config.sweep='a=1; b=2'\n"
        "    python -m experiments.compare RUN    prints two tables\n\n"
        "```sh\nfor method in fedavg local; do\n    fedjax-pfl baseline --config=baseline:$method\n"
        "done\n```\n| `fedjax-pfl export RUN` | cell |\n"
    )
    assert documents.commands(page) == [
        ("list", ["settings"]),
        ("pfedla", ["--config.rounds=2", "--config.sweep=a=1; b=2"]),
        ("compare", ["RUN"]),
        ("baseline", ["--config=baseline:fedavg"]),
        ("baseline", ["--config=baseline:local"]),
        ("export", ["RUN"]),
    ]


@pytest.mark.filterwarnings("ignore:the load_module")
@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("fedjax-pfl pfedlb", "no command pfedlb"),
        ("fedjax-pfl pfedla --config=pfedla:digits-x1", "'x1' is no word"),
        ("fedjax-pfl pfedla --config.pfedla.rato=1", "no setting pfedla.rato"),
        ("fedjax-pfl pfedla --config.rounds=0", "must be at least 1"),
        ("fedjax-pfl pfedla --config.rounds=2 --config=pfedla:digits", "has to come before"),
        ("fedjax-pfl baseline --config.pfedla.rate=2", "counts with algorithm=pfedla only"),
        ("fedjax-pfl pfedla --epochs=2", "no flag --epochs"),
        ("fedjax-pfl list methodz", "no kind"),
        ("python -m experiments.studies pfedla figure66", "no study figure66"),
        (
            "python -m experiments.studies pfedla figure6 --set=pfedla.rato=1",
            "no setting pfedla.rato",
        ),
        ("python -m experiments.reproduce --table=pfedla/table9", "pfedla/table9"),
        (
            "python -m experiments.reproduce --table=pfedla/table1 --cells=mnist-n9",
            "no cell is 'mnist-n9'",
        ),
    ],
)
def test_invalid_commands_are_reported(command, why):
    ((name, arguments),) = documents.commands(command)
    assert why in documents.reason_to_refuse(name, arguments)


@pytest.mark.parametrize("page", [*map(str, (*PAGES, *FIDELITY, *RESULTS)), *OTHER_PAGES])
def test_method_settings_on_pages_exist(page):
    text = (ROOT / page).read_text()
    mentions = re.findall(r"`(\w+)\.(\w+)(?:[=` ])", text)
    files = {"py", "md", "json", "ipynb", "png", "svg"}
    method_settings = {
        (name, key) for name, key in mentions if name in algorithms.METHODS and key not in files
    }
    defaults = configuration.default()
    unknown = {
        (name, key)
        for name, key in method_settings
        if key not in {**defaults, **defaults.get(name, {})}
    }
    assert unknown == set()  # a grid may set training settings of one method


@pytest.fixture(scope="module")
def site():
    """Imports docs/conf.py, which does not need Sphinx."""
    return documents.import_script("conf")


@pytest.fixture(scope="module")
def written():
    return documents.import_script("written")


@pytest.mark.parametrize("page", [*map(str, (*PAGES, *FIDELITY, *RESULTS)), *OTHER_PAGES])
def test_pages_have_no_broken_links(page):
    assert documents.broken_links(ROOT / page) == []


def test_broken_links_are_found(tmp_path):
    (tmp_path / "there.md").write_text("# Data, and `more`\n```sh\n# no title\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "## Here\n[a](there.md) [b](there.md#data-and-more) [c](#here) [d](https://x.y) "
        "![e](no.png) [f](there.md#no-title) [g](no/there.md#data) [h](#there)"
    )
    assert documents.broken_links(page) == [
        "no.png",
        "there.md#no-title",
        "no/there.md#data",
        "#there",
    ]


def with_slow_pages(pages):
    """Marks the page whose tables trace every method as slow."""
    slow = pytest.mark.slow("traces the functions of every method")
    return [pytest.param(page, marks=slow) if "privacy" in str(page) else page for page in pages]


@pytest.mark.parametrize("page", with_slow_pages([*PAGES, *RESULTS]), ids=str)
def test_generated_parts_are_up_to_date(page, written):
    text = (ROOT / page).read_text()
    assert written.update(text) == text, "run python docs/written.py"
    assert text.count("<!-- begin ") == text.count("<!-- end -->")
    assert "{{" not in text


def test_pages_contain_the_generated_values(written):
    def text(page):
        return (documents.DOCS / page).read_text()

    results = (ROOT / "experiments" / "results" / "pfedla.md").read_text()
    place = {"table": "pfedla/table1", "row": "fedavg", "column": "emnist_digits-n10"}
    cells = agreement.load(agreement.RESULTS)["cells"]
    (measured,) = (cell["measured"] for cell in cells if place.items() <= cell.items())
    assert f"| fedavg | 90.45 ± 0.76 | {np.mean([*measured.values()]):.2f} " in results
    assert "| `pfedla.rate` | `0.5` |" in text("pfedla.md")
    assert "(∂θ̄_i/∂ψ_i)ᵀ Δθ_i" in text("pfedla.md")
    assert all(f"`{name}`" in text("tables.md") for name in TABLES)
    assert documents.blocks("settings.md", "text") == [listing.listing("settings") + "\n"]
    assert "| `learning_rate` | `0.01` | `0.01` | `0.005` | `0.01` |" in text("pfedla.md")
    assert "| `rounds` | `295` | `295` | `200` |" in text("fedmn.md")  # phases together
    assert "`test_fraction`" not in text("pfedhn.md")
    measured_rows = {
        c["row"] for c in cells if (c["table"], c["column"]) == ("pfedla/table1", place["column"])
    }
    rest = [row for row in TABLES["pfedla/table1"].rows if row not in {*measured_rows, "fedbn"}]
    assert not rest or f"Not run: {', '.join(rest)}." in results
    assert written.update(results.replace("90.45", "90.46")) == results
    lengths = written.lengths("pfedla/table1", "emnist_digits-n10", "50", "600")
    assert "| local | 92.4 | 92.7 | 3 |" in lengths  # 93.33, 93, 91; 93.67, 93, 91.33
    with pytest.raises(UsageError):
        written.cells("pfedla/table1", "cifar11-n10")


@pytest.mark.parametrize("paper", studies.SYSTEMS)
def test_the_page_of_a_method_has_the_commands_of_its_papers_tables_and_figures(paper):
    text = (documents.DOCS / f"{paper}.md").read_text()
    figures = published(paper)["figures"].values()
    for name in {figure["study"] for figure in figures} - {None}:
        assert f"`python -m experiments.studies {paper} {name} --paper`" in text
    for name in TABLES:
        assert name.partition("/")[0] != paper or f"--table={name} " in text


def test_the_first_page_and_the_site_link_to_all_pages(site):
    first = (documents.DOCS / "index.md").read_text()
    for page in {p.stem for p in PAGES} - {"index"}:
        assert f"]({page}.md" in first, page
        assert f"\n{page}\n" in site.NAVIGATION, page


def test_links_out_of_the_docs_folder_are_replaced_on_the_site(site):
    for page in PAGES:
        source = [(ROOT / page).read_text()]
        site._read(None, page.stem, source)
        assert "](../" not in source[0], page
        assert ("{toctree}" in source[0]) == (page.stem == "index")
    assert set(site.LINKS.values()) == {"../results/", "results/", "api/methods.md"}
    assert "Methods" in site.API


def test_table_cells_do_not_break_between_number_and_unit(site):
    row = "| Local, 10 x 4 | 59.44 ± .40 | 485 kB | 100 % | 3 Bern | 2 of 3 |"
    expected = "| Local, 10~x 4 | 59.44~±~.40 | 485~kB | 100~% | 3 Bern | 2 of 3 |"
    assert site.join_units(row) == expected.replace("~", "\N{NO-BREAK SPACE}")
    source = [f"5 kB\n{row}"]
    site._read(None, "speed", source)
    assert source[0].startswith("5 kB\n| Local, 10\N{NO-BREAK SPACE}x")


def test_the_reference_has_every_method_and_public_name(site):
    text = "\n".join(site.module_page(name) for modules in site.API.values() for name in modules)
    for name in algorithms.METHODS:
        assert f"### `{name}`\n\n```python\ndef {name}(" in text
    assert "### `run`" in text
    assert "    server: PyTree  # shared by all clients" in text
    assert "### `_" not in text
