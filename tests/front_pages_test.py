"""What a newcomer reads first, README.md and CONTRIBUTING.md, is true."""

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


@pytest.mark.slow("the README's run, at its size")
def test_the_readmes_loop_prints_what_it_says(capsys):
    """To a few hundredths: rounding differs with the machine, and training carries it on."""
    (code,), (shown,) = (documents.blocks("../README.md", kind) for kind in ("python", "text"))
    assert documents.lines(code) < 20
    exec(code, {"__name__": "__main__"})
    parts = r"(\w+) +before (\S+) +after (\S+) +uploaded +(\S+) MB"
    lines = [re.fullmatch(parts, line) for line in capsys.readouterr().out.splitlines()]
    wanted = [re.fullmatch(parts, line) for line in shown.splitlines()]
    for line, other in zip(lines, wanted, strict=True):
        assert (line[1], line[4]) == (other[1], other[4])
        for score in (2, 3):
            assert float(line[score]) == pytest.approx(float(other[score]), abs=0.02)


def test_the_readme_says_what_there_is():
    """Its picture is small, its commands exist, its presets are presets."""
    text = (ROOT / "README.md").read_text()
    assert (documents.DOCS / "first_picture.png").stat().st_size < 300_000
    commands = re.findall(r"^    fedjax-pfl (\w+)(?: --config=(\w+):(\S+))?", text, re.M)
    assert len(commands) >= 4
    for command, system, preset in commands:
        assert command in COMMANDS
        if system:
            presets = importlib.import_module(f"fedjax_pfl.presets.{system}")
            configuration.specify(presets.get_config(preset))
    make = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake (\w+)", text):
        assert f"\n{target}:" in make


def test_runs_that_the_readme_compares_are_made_above():
    made, compared = set(), []
    for name, arguments in documents.commands((ROOT / "README.md").read_text()):
        if name == "compare":
            compared += [run for run in arguments if not run.startswith("--")]
            assert set(compared) <= made
        made.add(default_workdir(name, arguments))
    assert len(compared) == 2


@pytest.mark.slow("the demo, at its size")
def test_the_demo_prints_what_the_first_page_shows(tmp_path):
    """To two points: rounding differs with the machine, and training carries it on."""
    (shown,) = documents.blocks("index.md", "text")
    result = runner.run(pfedla.get_config(), tmp_path)
    found = page.table(result.metrics)
    for line, other in zip(shown.splitlines()[1:], found.splitlines()[1:], strict=False):
        words, there = line.split(), other.split()
        at = words.index("before" if "before" in words else "after")
        assert words[: at + 1] == there[: at + 1]
        for column in (1, 2):  # means; deviations and the worst depend on single examples
            assert float(words[at + column]) == pytest.approx(float(there[at + column]), abs=2)


def test_where_things_go_is_true():
    """Every file, and every name in a file, that CONTRIBUTING.md's table has."""
    rows = re.findall(r"^\| (?:a|an|client|noise) .*", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert len(rows) > 10
    for row in rows:
        cells = row.strip("|").split("|")
        files = re.findall(r"`([\w/]+\.py)`", row)
        for file in files:
            if "NAME" not in file and "PAPER" not in file and "/" in file:
                assert (ROOT / file).is_file(), row
        where = re.findall(r"`([\w/]+\.py)`", cells[1] + cells[2])
        for name in re.findall(r"`([A-Za-z_]+)`", cells[1] + cells[2]):
            there = [ROOT / file for file in where if (ROOT / file).is_file()]
            assert any(re.search(rf"\b{name}\b", path.read_text()) for path in there), (name, row)
