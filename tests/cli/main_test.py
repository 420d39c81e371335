"""The installed command and the package that it is installed with."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedjax_pfl
from fedjax_pfl import presets
from fedjax_pfl.cli import errors, main, processes
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import run_directory

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:the load_module")  # of configuration files


def test_help_lists_every_command(capsys):
    for words in ([], ["--help"], ["-h"], ["help"]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["/somewhere/bin/fedjax-pfl", *words])
            main.main()
        lines = capsys.readouterr().out.splitlines()
        for name, entry in main.COMMANDS.items():
            (line,) = [line for line in lines if line.split()[:1] == [name]]
            assert line.removeprefix(f"  {name}").strip() == entry.description
    assert set(presets.SYSTEMS) <= set(main.COMMANDS)


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_shows_its_help(name, capsys):
    main.main([name, "--help"])
    out = capsys.readouterr().out
    assert out.startswith(f"{main.COMMANDS[name].description}\n\n")
    assert f"fedjax-pfl {name}" in out
    assert "\n\n\n" not in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("name", main.COMMANDS)
def test_the_repository_has_a_script_for_every_command(name):
    lines = (ROOT / f"experiments/{name}.py").read_text().splitlines()
    assert len(lines) <= 10
    assert lines[-1].strip() == f'main(["{name}", *sys.argv[1:]])'


def test_no_script_has_a_way_of_its_own():
    for path in [*(ROOT / "experiments").rglob("*.py"), *(ROOT / "fedjax_pfl").rglob("*.py")]:
        if path != ROOT / "fedjax_pfl/cli/command.py":
            assert "app.run(" not in path.read_text(), path
        assert "runpy" not in path.read_text(), path


def test_a_command_gets_what_follows_it(capsys):
    with pytest.raises(SystemExit) as caught:
        main.main(["list", "partitions"])
    assert caught.value.code is None
    assert capsys.readouterr().out.startswith("Partitions: ")


def test_an_unknown_command_gets_the_nearest(capsys):
    for word, hint in (
        ("comparee", "did you mean compare?"),
        ("reproduce", "there are baseline, "),
    ):
        with pytest.raises(SystemExit) as caught:
            main.main([word])
        assert caught.value.code == 2
        line = f"error: there is no command {word!r}; {hint}"
        assert capsys.readouterr().err.startswith(line)


def test_a_command_without_flags_refuses_one(capsys):
    with pytest.raises(SystemExit) as caught:
        main.main(["list", "--rounds=3"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: there is no flag --rounds\n"


def test_a_closed_pipe_is_no_error(monkeypatch):
    """As if `head` had read enough."""

    class Closed:
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            pass

        def fileno(self):
            return 1

    monkeypatch.setattr(errors.os, "dup2", lambda *files: None)
    monkeypatch.setattr(sys, "stdout", Closed())
    main.main(["--help"])


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
with run_directory.claim(directory, {"seed": 0}):
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
    monkeypatch.delattr(processes.os, "fork")
    refused = pytest.raises(UsageError, match="need a system that can fork")
    with refused, processes.run_in_processes(processes.ProcessOptions(processes=2)):
        raise AssertionError("it computes alone")
    with processes.run_in_processes(processes.ProcessOptions()):
        pass


def test_where_there_is_fcntl_a_directory_is_locked():
    assert (importlib.util.find_spec("fcntl") is None) == (run_directory.fcntl is None)
