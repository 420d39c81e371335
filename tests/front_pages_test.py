"""README.md and CONTRIBUTING.md are true."""

import importlib
import re

import pytest

from fedjax_pfl.cli.configs import default_workdir
from fedjax_pfl.cli.main import COMMANDS
from fedjax_pfl.presets import pfedla
from fedjax_pfl.report import page
from fedjax_pfl.runs import runner
from fedjax_pfl.settings import configuration
from tests import documents

ROOT = documents.DOCS.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.slow("the README's run, at its size")
def test_the_loop_of_the_readme_prints_the_output_shown(capsys):
    """Accuracies may differ by 0.02, because rounding differs between machines."""
    (code,), (sample,) = (documents.blocks("../README.md", kind) for kind in ("python", "text"))
    assert documents.lines(code) < 20
    exec(code, {"__name__": "__main__"})
    pattern = r"(\w+) +before (\S+) +after (\S+) +uploaded +(\S+) MB"
    printed = [re.fullmatch(pattern, line) for line in capsys.readouterr().out.splitlines()]
    expected = [re.fullmatch(pattern, line) for line in sample.splitlines()]
    for line, reference in zip(printed, expected, strict=True):
        assert (line[1], line[4]) == (reference[1], reference[4])
        for score in (2, 3):
            assert float(line[score]) == pytest.approx(float(reference[score]), abs=0.02)


def test_the_readme_names_existing_commands_presets_and_targets():
    assert (documents.DOCS / "first_picture.png").stat().st_size < 300_000
    commands = re.findall(r"^    fedjax-pfl (\w+)(?: --config=(\w+):(\S+))?", README, re.M)
    assert len(commands) >= 4
    for command, system, preset in commands:
        assert command in COMMANDS
        if system:
            presets = importlib.import_module(f"fedjax_pfl.presets.{system}")
            configuration.specify(presets.get_config(preset))
    make = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake (\w+)", README):
        assert f"\n{target}:" in make


def test_the_readme_makes_the_runs_that_it_compares():
    directories, compared = set(), []
    for name, arguments in documents.commands(README):
        if name == "compare":
            compared += [run for run in arguments if not run.startswith("--")]
            assert set(compared) <= directories
        directories.add(default_workdir(name, arguments))
    assert len(compared) == 2


@pytest.mark.slow("the demo, at its size")
def test_the_demo_prints_the_table_of_the_first_page(tmp_path):
    """Means may differ by two points, because rounding differs between machines."""
    (sample,) = documents.blocks("index.md", "text")
    printed = page.table(runner.run(pfedla.get_config(), tmp_path).metrics)
    for line, reference in zip(printed.splitlines()[1:], sample.splitlines()[1:], strict=False):
        cells, expected = line.split(), reference.split()
        i = expected.index("before" if "before" in expected else "after")
        assert cells[: i + 1] == expected[: i + 1]
        for column in (i + 1, i + 2):  # deviations and the worst depend on single examples
            assert float(cells[column]) == pytest.approx(float(expected[column]), abs=2)


def test_the_table_of_contributing_names_existing_files_and_functions():
    rows = re.findall(r"^\| (?:a|an|client|noise) .*", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert len(rows) > 10
    for row in rows:
        places = "".join(row.strip("|").split("|")[1:3])
        for file in re.findall(r"`([\w/]+\.py)`", row):
            if "NAME" not in file and "PAPER" not in file and "/" in file:
                assert (ROOT / file).is_file(), row
        files = [ROOT / file for file in re.findall(r"`([\w/]+\.py)`", places)]
        texts = [path.read_text() for path in files if path.is_file()]
        for name in re.findall(r"`([A-Za-z_]+)`", places):
            assert any(re.search(rf"\b{name}\b", text) for text in texts), (name, row)


def test_front_pages_count_the_baselines_of_their_table():
    text = (documents.DOCS / "baselines.md").read_text()
    _, *methods = re.findall(r"^\| [^|*`]+ \| `(\w+)` \|", text, re.M)  # without the head
    assert f"\n{len(methods)} baselines" in text
    assert f"[{len(methods)} baselines]" in README
