"""The installed command and the package that it is installed with."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedjax_pfl
from fedjax_pfl import presets
from fedjax_pfl.cli import main, processes
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import run_directory

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:the load_module")  # of configuration files


def test_help_lists_every_command(capsys):
    for arguments in ([], ["--help"], ["-h"], ["help"]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["/somewhere/bin/fedjax-pfl", *arguments])
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
    lines = (ROOT / "experiments" / f"{name.replace('-', '_')}.py").read_text().splitlines()
    assert len(lines) <= 10
    assert lines[-1].strip() == f'main(["{name}", *sys.argv[1:]])'


def test_scripts_start_commands_only_through_main():
    for path in [*(ROOT / "experiments").rglob("*.py"), *(ROOT / "fedjax_pfl").rglob("*.py")]:
        if path != ROOT / "fedjax_pfl/cli/command.py":
            assert "app.run(" not in path.read_text(), path
        assert "runpy" not in path.read_text(), path


def ended(arguments, capsys):
    """Returns the exit status and output of a command."""
    with pytest.raises(SystemExit) as caught:
        main.main(arguments)
    return caught.value.code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["comparee"], "there is no command 'comparee'; did you mean compare?"),
        (["reproduce"], "there is no command 'reproduce'; there are audit, "),
        (["list", "--rounds=3"], "there is no flag --rounds\n"),
    ],
)
def test_unknown_commands_and_flags_are_refused(arguments, line, capsys):
    status, out, err = ended(arguments, capsys)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {line}")


def test_commands_receive_their_arguments(capsys):
    status, out, err = ended(["list", "partitions"], capsys)
    assert (status, err) == (None, "")
    assert out.startswith("Partitions: ")


def test_the_current_folder_may_hold_a_method(tmp_path, monkeypatch, capsys):
    (tmp_path / "method_here.py").write_text(
        "from fedjax_pfl.algorithms import fedavg\n\n\n"
        "def method_here(model, training, federation, *, beta: float = 0.9):\n"
        "    return fedavg(model, training, federation)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    arguments = ["baseline", "--config.algorithm=method_here:method_here"]
    status, _, err = ended([*arguments, "--config.method_here.bta=1"], capsys)
    assert status == 2
    assert "there is no setting method_here.bta; did you mean method_here.beta?" in err


# The package.


def test_the_version_is_consistent():
    for file, text in (
        ("fedjax_pfl/__init__.py", f'__version__ = "{fedjax_pfl.__version__}"'),
        ("setup.cfg", "version = attr: fedjax_pfl.__version__"),
        ("CITATION.cff", f"\nversion: {fedjax_pfl.__version__}\n"),
        ("CHANGELOG.md", f"\n## {fedjax_pfl.__version__}"),
    ):
        assert text in (ROOT / file).read_text(), file


def test_a_system_without_fcntl_warns_that_directories_are_not_locked(tmp_path):
    """Imitates Windows, where a directory cannot be opened either."""
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
    finished = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        # A newer JAX warns about its own files.
        env=os.environ | {"PYTHONWARNINGS": "ignore:only soft file lock is available"},
    )
    assert finished.stdout == "done\n", finished.stderr
    assert finished.stderr == (
        f"{tmp_path / 'run'} is not locked, as this system cannot; start no other run in it\n"
    )


def test_several_processes_need_fork(monkeypatch):
    """Imitates Windows."""
    monkeypatch.delattr(processes.os, "fork")
    refused = pytest.raises(UsageError, match="need a system that can fork")
    with refused, processes.run_in_processes(processes.ProcessOptions(processes=2)):
        raise AssertionError
    with processes.run_in_processes(processes.ProcessOptions()):
        pass


def test_directories_are_locked_if_fcntl_exists():
    assert (importlib.util.find_spec("fcntl") is None) == (run_directory.fcntl is None)
