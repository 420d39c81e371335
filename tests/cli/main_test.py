"""The console script and the package that it is installed with."""

import ast
import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import fedjax_pfl
from experiments import cli
from fedjax_pfl.cli import command as launch
from fedjax_pfl.cli import processes as spawn
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import run_directory

ROOT = Path(cli.__file__).parents[1]


def started(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/fedjax-pfl", *words])
    cli.main()


def test_every_command_is_there_with_what_it_does(monkeypatch, capsys):
    """Every module that runs by itself, and only those."""
    runs = '__name__ == "__main__"'
    there = {p.stem for p in ROOT.glob("experiments/*.py") if runs in p.read_text()} - {"cli"}
    assert set(cli.COMMANDS) == there
    for words in ([], ["--help"], ["help"]):
        started(monkeypatch, *words)
        lines = capsys.readouterr().out.splitlines()
        for name in there:
            about = ast.get_docstring(ast.parse((ROOT / f"experiments/{name}.py").read_text()))
            (line,) = [one for one in lines if one.split()[:1] == [name]]
            assert line.removeprefix(f"  {name}").strip() == about.splitlines()[0]


def test_the_modules_own_name_is_the_same(monkeypatch, capsys):
    """In the repository `python -m experiments.cli` is `fedjax-pfl`."""
    monkeypatch.setattr(sys, "argv", ["cli.py"])
    runpy.run_path(cli.__file__, run_name="__main__")
    assert capsys.readouterr().out.rstrip() == cli.described()


def test_a_command_gets_what_follows_it(monkeypatch):
    """What it then does is what `make wheel` tries."""
    seen = []

    def run_module(name, **how):
        seen.append((name, how, sys.argv[1:]))

    monkeypatch.setattr(cli.runpy, "run_module", run_module)
    started(monkeypatch, "list", "partitions")
    how = {"run_name": "__main__", "alter_sys": True}
    assert seen == [("experiments.list", how, ["partitions"])]


def test_an_unknown_command_gets_the_nearest(monkeypatch, capsys):
    with pytest.raises(SystemExit) as caught:
        started(monkeypatch, "comparee")
    assert caught.value.code == 2
    line = "error: there is no command 'comparee'; did you mean compare?\n"
    assert capsys.readouterr().err == line


def test_who_reads_no_further_is_no_error(monkeypatch):
    """And nothing else is started then, as where `head` has closed the pipe."""

    class Closed:
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            pass

        def fileno(self):
            return 1

    monkeypatch.setattr(launch.os, "dup2", lambda *files: None)
    monkeypatch.setattr(sys, "stdout", Closed())
    started(monkeypatch, "--help")


# The package.


def test_the_version_is_written_once():
    assert (
        f'__version__ = "{fedjax_pfl.__version__}"' in (ROOT / "fedjax_pfl/__init__.py").read_text()
    )
    assert "version = attr: fedjax_pfl.__version__" in (ROOT / "setup.cfg").read_text()
    assert f"\nversion: {fedjax_pfl.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {fedjax_pfl.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_without_fcntl_a_run_says_that_its_directory_is_not_locked(tmp_path):
    """As on Windows, where a directory cannot be opened either."""
    code = """
import os, sys
sys.modules["fcntl"] = None
from pathlib import Path
from fedjax_pfl.runs import run_directory
real = os.open
def opened(path, *rest, **named):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied")
    return real(path, *rest, **named)
os.open = opened
directory = Path(sys.argv[1])
with run_directory.claimed(directory, {"seed": 0}):
    assert (directory / "config.json").is_file()
print("done")
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        # A newer JAX imports what says so of its own files.
        env=os.environ | {"PYTHONWARNINGS": "ignore:only soft file lock is available"},
    )
    assert ran.stdout == "done\n", ran.stderr
    assert ran.stderr == (
        f"{tmp_path / 'run'} is not locked, as this system cannot; start no other run in it\n"
    )


def test_without_fork_several_processes_are_refused(monkeypatch):
    """As on Windows."""
    monkeypatch.delattr(spawn.os, "fork")
    refused = pytest.raises(UsageError, match="need a system that can fork")
    with refused, spawn.together(spawn.Given(processes=2)):
        raise AssertionError("it computes alone")
    with spawn.together(spawn.Given()):
        pass


def test_where_there_is_fcntl_a_directory_is_locked():
    assert (importlib.util.find_spec("fcntl") is None) == (run_directory.fcntl is None)
