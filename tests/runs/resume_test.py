"""Tests of runs that are stopped, killed or damaged, and resumed."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fedjax_pfl.runs import checkpoints, run_directory, runner
from tests.runs.common import (
    BASE,
    FILES,
    MODEL,
    PHASES,
    assert_resumes,
    assert_same_run,
    at_call,
    at_step,
    kill,
    other_lines,
    refusal,
    undisturbed,
)

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")


@pytest.mark.parametrize(
    ("owner", "name", "condition", "after", "resumed_at"),
    [
        (run_directory, "append_metrics", at_call(1), False, 1),
        (run_directory, "append_metrics", at_call(3), True, 5),
        (checkpoints.Store, "save", at_step(3), False, 2),
        (checkpoints.Store, "save", at_step(3), True, 3),
        (run_directory, "write_traffic", at_call(1), False, 6),
    ],
)
def test_a_stopped_run_resumes(owner, name, condition, after, resumed_at, tmp_path):
    with kill(owner, name, condition, after=after):
        runner.run(BASE, tmp_path)
    assert_resumes(BASE, tmp_path, resumed_at)


_watch = {"path": None, "copy": None}


def _audit(event, arguments):
    path = _watch["path"]
    if path and event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "open"):
        if str(path) not in str(arguments[0]):
            return
        if event == "open" and arguments[1] in ("r", "rb"):
            return
        _watch["path"] = None  # copying is not watched
        _watch["copy"]()
        _watch["path"] = path


def test_a_kill_at_any_step_of_saving_a_checkpoint(tmp_path, monkeypatch):
    """Copies the directory before every file operation of saving and of deleting the oldest."""
    directory, copies = tmp_path / "run", []

    def copy_existing(source, target):  # orbax's threads remove files meanwhile
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(source, target)

    def copy():
        copies.append(tmp_path / f"copy{len(copies)}")
        shutil.copytree(directory, copies[-1], copy_function=copy_existing)

    save = checkpoints.Store.save

    def watched(self, step, trees, facts):
        if step == 4:
            _watch.update(path=directory, copy=copy)
        save(self, step, trees, facts)
        _watch["path"] = None

    sys.addaudithook(_audit)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Store, "save", watched)
        runner.run(BASE, directory)
    assert len(copies) > 10
    rounds = set()
    for copied in copies[:: len(copies) // 6]:
        result = runner.run(BASE, copied)
        rounds.add(result.resumed_at)
        assert_same_run(result, undisturbed(BASE), copied)
    assert rounds <= {3, 4}
    assert 3 in rounds


def test_phases_of_a_run():
    result = undisturbed(PHASES)
    assert [line["phase"] for line in result.metrics] == [0, 0, 1, 1]
    assert [line["round"] for line in result.metrics] == [1, 2, 3, 4]
    down = [line["bytes_down"] for line in result.metrics]
    assert down == [2 * MODEL, 4 * MODEL, 4 * MODEL, 4 * MODEL]  # local has no traffic
    assert sum(result.ledger.client_updates) + sum(result.ledger.dropped) == 8
    assert result.metrics[2]["best_round"] == 3  # the best round of the second phase
    assert result.state.server == ()


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_run_resumes_in_every_phase(step, tmp_path):
    with kill(checkpoints.Store, "save", at_step(step), after=True):
        runner.run(PHASES, tmp_path)
    assert_resumes(PHASES, tmp_path, step)


# Damaged checkpoints.


def _flip(path):
    content = bytearray(path.read_bytes())
    for i in range(len(content) // 3, len(content), max(1, len(content) // 5)):
        content[i] ^= 0x55
    path.write_bytes(bytes(content))


def _truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _change_round(path):
    """Changes a number only, so the file stays valid JSON."""
    text = path.read_text()
    assert '"round": 6' in text or '"round":6' in text
    path.write_text(text.replace('"round": 6', '"round": 5').replace('"round":6', '"round":5'))


def _data_files(step):
    return [p for p in (step / "state").rglob("d/*") if p.is_file()]


def _use_round_5(step):
    """Replaces the state by the readable state of another round."""
    shutil.rmtree(step / "state")
    shutil.copytree(step.with_name("5") / "state", step / "state")


DAMAGES = {
    "state of round 5": _use_round_5,
    "state flipped": lambda step: [_flip(p) for p in _data_files(step)],
    "state truncated": lambda step: [_truncate(p) for p in _data_files(step)],
    "best gone": lambda step: shutil.rmtree(step / "best"),
    "manifest flipped": lambda step: _flip(step / "state" / "manifest.ocdbt"),
    "facts flipped": lambda step: _flip(step / "meta" / "metadata"),
    "facts truncated": lambda step: _truncate(step / "meta" / "metadata"),
    "facts changed": lambda step: _change_round(step / "meta" / "metadata"),
    "facts gone": lambda step: shutil.rmtree(step / "meta"),
    "all empty": lambda step: [p.write_bytes(b"") for p in step.rglob("*") if p.is_file()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_and_saved_again(damage, copied, capsys):
    (copied / "checkpoints" / "6" / checkpoints.SUMS).unlink()  # digests of leaves suffice
    DAMAGES[damage](copied / "checkpoints" / "6")
    assert_resumes(BASE, copied, 5)
    (line,) = other_lines(capsys.readouterr().err)
    assert line.startswith("The checkpoint of round 6 is damaged: ")
    assert_resumes(BASE, copied, 6)
    assert capsys.readouterr().err == ""


def test_a_run_without_an_intact_checkpoint_is_refused(copied, capsys):
    for step in (copied / "checkpoints").iterdir():
        _truncate(step / "meta" / "metadata")
    line = refusal(BASE, copied)
    assert "are damaged (round 6: meta/metadata is not" in line
    assert "restore one from a copy, or delete that folder to start again" in line
    assert capsys.readouterr().err == ""
    shutil.rmtree(copied / "checkpoints")
    assert_resumes(BASE, copied, None)


def test_a_damaged_file_of_diagnostics_is_renamed(tmp_path, capsys):
    diagnostics = {"alpha": ([2, 4], [np.ones(3), np.zeros(3)])}
    run_directory.write_observations(tmp_path, diagnostics)
    assert run_directory.read_observations(tmp_path, 3)["alpha"][0] == [2]
    _flip(tmp_path / "alpha.npz")
    assert run_directory.read_observations(tmp_path, 4) == {}
    assert "renamed to alpha.npz.damaged, a new one is begun" in capsys.readouterr().err
    objects = np.array([{}, {}], dtype=object)  # stored as pickles, which are never loaded
    np.savez(tmp_path / "beta.npz", rounds=np.array([2, 4]), values=objects)
    assert run_directory.read_observations(tmp_path, 4) == {}
    names = {"alpha.npz.damaged", "beta.npz.damaged"}
    assert {p.name for p in tmp_path.iterdir()} == names
    np.savez(tmp_path / "other.npz", x=np.ones(2))  # a file of the user
    assert run_directory.read_observations(tmp_path, 4) == {}
    assert {p.name for p in tmp_path.iterdir()} == {*names, "other.npz"}


# Killed processes.


def _start(directory):
    """Starts `experiments.baseline` with BASE, compiled like the runs of this process."""
    flags = [f"--workdir={directory}"]
    for key, value in BASE.items():
        settings = value.items() if isinstance(value, dict) else ()
        flags += [f"--config.{key}.{name}={v}" for name, v in settings]
        flags += [] if settings else [f"--config.{key}={value}"]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": str(directory.parent / "cache"),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.baseline", *flags],
        env=environment,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("number", "status", "evaluations"), [(signal.SIGKILL, -9, 2), (signal.SIGTERM, 143, 1)]
)
def test_a_killed_process_resumes(number, status, evaluations, finished, tmp_path):
    directory, lines = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    processes = [_start(directory)]
    timer = threading.Timer(150, lambda: [p.kill() for p in processes])
    timer.start()
    try:
        while processes[0].poll() is None:
            if lines.exists() and lines.read_text().count("\n") >= evaluations:
                processes[0].send_signal(number)
                break
            time.sleep(0.002)
        _, err = processes[0].communicate()
        assert processes[0].returncode == status, err
        assert ("stopped" in err) == (number == signal.SIGTERM)
        assert not (directory / "report.html").exists()
        processes.append(_start(directory))
        out, err = processes[1].communicate()
    finally:
        timer.cancel()
        for process in processes:
            process.kill()
            process.communicate()
    assert processes[1].returncode == 0, err
    assert "This run resumed at round" in out
    assert {p.name for p in directory.iterdir()} == FILES
    for name in ("config.json", "clients.csv", "traffic.json"):
        assert (directory / name).read_bytes() == (finished[1] / name).read_bytes()
    assert_resumes(BASE, directory, 6)
