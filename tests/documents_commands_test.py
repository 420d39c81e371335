"""Executes the commands of the README and of the pages, training for one round."""

import re

import pytest

from fedjax_pfl.cli.configs import default_workdir
from fedjax_pfl.presets import SYSTEMS
from tests import commands, documents

PAGES = ("../README.md", *sorted(path.name for path in documents.DOCS.glob("*.md")))
HOURS = ("reproduce", "studies", "leaderboard", "scaling", "many_clients", "benchmark")
OTHER_LIBRARIES = ("agree", "import-partition")
FILES = r"cifar10|femnist|dataset=\w+:|data_dir|emnist|svhn"


def reason_to_skip(name: str, arguments: list[str]) -> str:
    """Returns why a command is not executed, or ""."""
    line = " ".join([name, *arguments])
    if name in HOURS:
        return "takes minutes to hours; tests of experiments run its functions"
    if name in OTHER_LIBRARIES:
        return "needs a checkout of another library"
    if name in ("deploy", "tune") or "tuned.py" in line:
        return "its own tests run it"
    if re.search(FILES, line):
        return "needs files that the user has"
    if "--processes" in line or "--coordinator" in line:
        return "starts processes, or needs a cluster; its own tests do"
    if re.search(r"runs/(A|B|visits|fedavgm?-\d)\b|\b[A-Z]{3,}\b", line) or arguments == []:
        return "has a placeholder, a run from Python, or no arguments"
    if name.isupper() or "$" in line:
        return "has a placeholder"
    return ""


@pytest.mark.slow("one round of some 20 runs, four minutes")
@pytest.mark.filterwarnings("ignore:the load_module")
def test_commands_of_the_pages_run(tmp_path, monkeypatch, capsys):
    executed, skipped = [], {}
    for page in PAGES:
        folder = tmp_path / page.replace("../", "")
        folder.mkdir()
        monkeypatch.chdir(folder)
        if page == "models.md":  # its Python code trains this run
            shortened = ("--config.rounds=1", "--config.validation_fraction=0.2")
            commands.run_here(
                "baseline", "--config=baseline:fedper-digits", *shortened, "--workdir=runs/fedper"
            )
        for name, arguments in documents.commands((documents.DOCS / page).read_text()):
            if reason := reason_to_skip(name, arguments):
                skipped.setdefault(reason, []).append((page, name, *arguments))
                continue
            if name in SYSTEMS:
                workdir = default_workdir(name, arguments)
                place = [] if "--workdir" in " ".join(arguments) else [f"--workdir={workdir}"]
                commands.run_here(name, *arguments, *place, "--config.rounds=1")
            else:
                commands.run_here(name, *arguments)
            assert capsys.readouterr().out, (page, name, arguments)
            executed.append((page, name, *arguments))
    names = {name for _, name, *_ in executed}
    assert {"list", "compare", "export", "pfedla", "pfedhn", "fedmn", "baseline"} <= names
    assert len(executed) >= 30
    print(len(executed), "of", len(executed) + sum(map(len, skipped.values())), "executed")
