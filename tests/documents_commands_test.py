"""Executes the commands of the README and of the pages, training for one round."""

import re
from pathlib import Path

import pytest

from fedjax_pfl.cli.configs import default_workdir
from fedjax_pfl.presets import SYSTEMS
from tests import commands, documents

PAGES = (
    "../README.md",
    *sorted(path.name for path in documents.DOCS.glob("*.md")),
    *(f"../experiments/results/{system}.md" for system in SYSTEMS if system != "baseline"),
)
# Pages that show the output of their commands. Numbers may differ: commands train for one round.
WITH_OUTPUT = ("index.md", "questions.md")
SECONDS = ("--list", "--only_show", "--summary")
HOURS = (
    "attackers",
    "reproduce",
    "studies",
    "leaderboard",
    "scaling",
    "many_clients",
    "benchmark",
    "correlated_noise",
)
OTHER_LIBRARIES = ("agree", "import-partition")
FILES = r"cifar10|femnist|dataset=\w+:(?!visits)|data_dir|emnist|svhn"
HOSPITALS = ("Amsterdam", "Bern", "Cairo", "Delhi")


def reason_to_skip(name: str, arguments: list[str]) -> str:
    """Returns why a command is not executed, or ""."""
    line = " ".join([name, *arguments])
    if name in HOURS and not takes_seconds(name, arguments):
        return "takes minutes to hours; tests of experiments run its functions"
    if name in OTHER_LIBRARIES:
        return "needs a checkout of another library"
    if name in ("deploy", "tune") or "tuned.py" in line:
        return "its own tests run it"
    if re.search(FILES, line):
        return "needs files that the user has"
    if "--processes" in line or "--coordinator" in line:
        return "starts processes, or needs a cluster; its own tests do"
    if re.search(r"compare runs/(A|fedavg-0)\b|\b[A-Z]{3,}\b", line):
        return "has a placeholder or a run from Python"
    if arguments == [] and name not in ("reproduce", "list"):
        return "has no arguments"
    if name.isupper() or "$" in line:
        return "has a placeholder"
    return ""


def takes_seconds(name: str, arguments: list[str]) -> bool:
    """Returns True if a script only lists something."""
    listed = arguments == [] or (name == "studies" and len(arguments) == 1)
    return name in ("reproduce", "studies", "benchmark") and (
        listed or any(flag in arguments for flag in SECONDS)
    )


def shape(line: str) -> str:
    """Returns a line with equal spaces and without numbers."""
    return " ".join(re.sub(r"[-+]?\d[\d.,]*", "0", line).split())


def lines_not_printed(page: str, printed: str) -> list[str]:
    """Returns lines of output on a page whose first word a command printed, in another shape."""
    shapes, printed_words = set(map(shape, printed.splitlines())), set(printed.split())
    lines = [line for block in documents.blocks(page, "text") for line in block.splitlines()]
    return [
        line for line in lines if line.split()[0] in printed_words and shape(line) not in shapes
    ]


def commands_of(page: str) -> list[tuple[str, list[str]]]:
    """Returns the commands of a page that are executed."""
    all_commands = documents.commands((documents.DOCS / page).read_text())
    return [
        (name, arguments) for name, arguments in all_commands if not reason_to_skip(name, arguments)
    ]


def test_most_kinds_of_commands_are_executed():
    executed = [name for page in PAGES for name, _ in commands_of(page)]
    kinds = {"list", "compare", "export", *SYSTEMS, "reproduce", "studies", "benchmark"}
    assert kinds <= set(executed)
    assert len(executed) >= 45


@pytest.mark.slow("one round of some 20 runs, four minutes")
@pytest.mark.filterwarnings("ignore:the load_module")
@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)])
def test_commands_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    documents.module("your_method.md")  # fedavgm, which a command of this page imports
    monkeypatch.chdir(tmp_path)
    rows = [f"{HOSPITALS[i % 4]},{i % 7},{i % 5 / 2}" for i in range(80)]
    Path("visits.csv").write_text("\n".join(["hospital,age,days", *rows]))
    if page == "models.md":  # its Python code trains this run
        shortened = ("--config.rounds=1", "--config.validation_fraction=0.2")
        commands.run_here(
            "baseline", "--config=baseline:fedper-digits", *shortened, "--workdir=runs/fedper"
        )
    printed = []
    for name, arguments in commands_of(page):
        if name in HOURS:
            place = tmp_path / f"script-{len(printed)}"
            place.mkdir()
            outcome = commands.Forked(f"experiments.{name}", *arguments, place=place).wait()
            assert (outcome.status, outcome.err) == (0, ""), (page, name, arguments)
            print(outcome.out)
        elif name in SYSTEMS:
            workdir = default_workdir(name, arguments)
            place = [] if "--workdir" in " ".join(arguments) else [f"--workdir={workdir}"]
            commands.run_here(name, *arguments, *place, "--config.rounds=1")
        else:
            commands.run_here(name, *arguments)
        printed.append(capsys.readouterr().out)
        assert printed[-1], (page, name, arguments)
    if page in WITH_OUTPUT:
        assert lines_not_printed(page, "\n".join(printed)) == []
