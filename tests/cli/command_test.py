"""Commands as users give them: help, errors and reports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import CONFIG, Forked

ROOT = Path(__file__).parents[2]

_WRONG = {
    "unknown key": (["--config.clientz=3"], "did you mean clients?"),
    "unknown preset": (
        ["--config=baseline:fedagv"],
        "'fedagv' is no word of one; did you mean fedavg?",
    ),
    "no config file": (["--config=nowhere.py"], "nowhere.py'; --config takes SYSTEM:PRESET or "),
    "bad value": (["--config.batch_size=0"], "batch_size is 0; it must be at least 1"),
    "no number": (["--config.rounds=ten"], "rounds is 'ten'; it must be a whole number"),
    "unknown flag": (["--out=x"], "there is no flag --out; there are --config, --coordinator, "),
    "stray argument": (["digits"], "'digits' is no flag"),
    "time to wait for no process": (["--wait=10"], "--wait has no effect with one process"),
    "component that is not selected": (
        ["--config.dirichlet.alpha=.1"],
        "dirichlet.alpha counts with partition=dirichlet only, and partition is classes",
    ),
    "missing run to compare with": (
        ["--config.reference_runs=nowhere"],
        "nowhere is not a run directory",
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Returns the status, output and files of every command."""
    commands = {name: arguments for name, (arguments, _) in _WRONG.items()} | {"help": ["--help"]}
    started = {
        name: Forked("experiments.baseline", *flags, place=tmp_path_factory.mktemp("launch"))
        for name, flags in commands.items()
    }
    return {name: command.wait() for name, command in started.items()}


@pytest.mark.parametrize("name", _WRONG)
def test_a_wrong_command_ends_with_one_line(name, outcomes):
    status, out, err, files = outcomes[name]
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert _WRONG[name][1] in err
    assert files == []


def test_a_separate_process_gives_the_same_line(outcomes, tmp_path):
    """Compares a forked command with a separate process."""
    arguments, _ = _WRONG["bad value"]
    finished = subprocess.run(
        [sys.executable, "-m", "experiments.baseline", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == outcomes["bad value"][:3]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("three commands, each a run")
def test_reports_contain_reference_runs(tmp_path):
    """`reference` runs the missing ones; `reference_runs` names existing ones."""
    small = {**CONFIG, "rounds": 2, "eval_every": 2}
    settings = [f"--config.{key}={value}" for key, value in small.items()]
    run, elsewhere = tmp_path / "runs" / "mine", tmp_path / "elsewhere"

    def page(name, flag):
        (place := tmp_path / name).mkdir()
        command = Forked("experiments.baseline", *settings, f"--workdir={run}", flag, place=place)
        status, out, err, files = command.wait()
        assert (status, files) == (0, []), err
        lines = [line for line in err.splitlines() if line != "compiling"]
        assert all(line.startswith("round 2 of 2: ") for line in lines), err
        assert str(run / "report.html") in out
        return (run / "report.html").read_text()

    assert ">Local</text>" in page("with", "--config.reference=true")
    (run / "reference").rename(elsewhere)
    (run / "report.html").unlink()
    assert ">Local</text>" not in page("without", "--config.reference=false")
    assert ">Local</text>" in page("named", f"--config.reference_runs={elsewhere / 'local'}")


def test_help_lists_the_presets_and_the_flags(outcomes):
    status, out, err, files = outcomes["help"]
    assert status == 0
    assert "Traceback" not in out + err
    assert err == ""
    assert max(map(len, out.splitlines())) <= 100
    for word in ("fedavg-digits", "classes4", "dirichlet0.5", "n10", "fedjax-pfl list settings"):
        assert word in out
    text = " ".join(out.split())
    assert "local_epochs unset Passes over the client's examples per round" in text
    assert "fedavg FedAvg: one global model" in text
    for flag in ("--config", "--workdir", "--data_dir", "--processes"):
        assert f"\n  {flag} " in out
    assert files == []
