"""Runs that are stopped, killed or damaged, and what goes on from them."""

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

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import checkpoints, run_directory, runner
from tests.runs.common import (
    BASE,
    FILES,
    MODEL,
    PHASES,
    assert_same_run,
    but_evaluations,
    contents,
    undisturbed,
)

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

# Interrupted and resumed.


class Stop(BaseException):
    """Stands for Ctrl-C, which pytest would take for its own."""


@pytest.mark.parametrize("at", [1, 3])
def test_a_run_that_is_stopped_at_an_evaluation_goes_on(at, tmp_path, monkeypatch):
    """The line of the evaluation is written or not; its checkpoint is not there."""
    append, calls = run_directory.append_metrics, []

    def stop(directory, line):
        calls.append(line)
        if len(calls) == at:
            if at == 3:
                append(directory, line)
            raise Stop
        append(directory, line)

    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "append_metrics", stop)
        with pytest.raises(Stop):
            runner.run(BASE, tmp_path)
    result = runner.run(BASE, tmp_path)
    assert result.resumed_at == 2 * at - 1
    assert_same_run(result, undisturbed(BASE), tmp_path)


@pytest.mark.parametrize("after", [False, True])
def test_a_run_that_is_stopped_at_a_checkpoint_goes_on(after, tmp_path, monkeypatch):
    save = checkpoints.Store.save

    def stop(self, step, trees, facts):
        if step < 3 or after:
            save(self, step, trees, facts)
        if step == 3:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Store, "save", stop)
        with pytest.raises(Stop):
            runner.run(BASE, tmp_path)
    result = runner.run(BASE, tmp_path)
    assert result.resumed_at == (3 if after else 2)
    assert_same_run(result, undisturbed(BASE), tmp_path)


def test_a_run_that_is_stopped_before_its_report_gets_one(tmp_path, monkeypatch):
    def stop(directory, ledger):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "write_traffic", stop)
        with pytest.raises(Stop):
            runner.run(BASE, tmp_path)
    result = runner.run(BASE, tmp_path)
    assert result.resumed_at == 6
    assert_same_run(result, undisturbed(BASE), tmp_path)


_watch = {"path": None, "seen": None}


def _audit(event, args):
    path = _watch["path"]
    if path and event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "open"):
        if str(path) not in str(args[0]) or (event == "open" and args[1] in ("r", "rb")):
            return
        _watch["path"] = None  # copying is not to be watched
        _watch["seen"]()
        _watch["path"] = path


def test_whatever_a_kill_leaves_of_a_checkpoint_the_run_goes_on(tmp_path, monkeypatch):
    """The directory as it is before each step that saving (and deleting the oldest) takes."""
    directory, copies = tmp_path / "run", []

    def there(source, target):  # orbax's threads remove files of their own meanwhile
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(source, target)

    def copy():
        copies.append(tmp_path / f"copy{len(copies)}")
        shutil.copytree(directory, copies[-1], copy_function=there)

    save = checkpoints.Store.save

    def watched(self, step, trees, facts):
        if step == 4:
            _watch.update(path=directory, seen=copy)
        save(self, step, trees, facts)
        _watch["path"] = None

    sys.addaudithook(_audit)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Store, "save", watched)
        runner.run(BASE, directory)
    assert len(copies) > 10
    found = set()
    for copied in copies[:: len(copies) // 6]:
        result = runner.run(BASE, copied)
        found.add(result.resumed_at)
        assert_same_run(result, undisturbed(BASE), copied)
    assert found <= {3, 4}
    assert 3 in found


@pytest.mark.parametrize("at", [1, 2, 3])
def test_phases_run_one_after_the_other_and_resume_in_each(at, tmp_path, monkeypatch):
    wanted = undisturbed(PHASES)
    assert [line["phase"] for line in wanted.metrics] == [0, 0, 1, 1]
    assert [line["round"] for line in wanted.metrics] == [1, 2, 3, 4]
    down = [line["bytes_down"] for line in wanted.metrics]
    assert down == [2 * MODEL, 4 * MODEL, 4 * MODEL, 4 * MODEL]  # local moves nothing
    assert sum(wanted.ledger.visits) + sum(wanted.ledger.dropped) == 8  # one ledger for both
    assert wanted.metrics[2]["best_round"] == 3  # the best of this phase
    assert wanted.state.server == ()

    save = checkpoints.Store.save

    def stop(self, step, trees, facts):
        save(self, step, trees, facts)
        if step == at:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Store, "save", stop)
        with pytest.raises(Stop):
            runner.run(PHASES, tmp_path)
    result = runner.run(PHASES, tmp_path)
    assert result.resumed_at == at
    assert_same_run(result, wanted, tmp_path)


# Damaged checkpoints.


def _flip(path):
    content = bytearray(path.read_bytes())
    for i in range(len(content) // 3, len(content), max(1, len(content) // 5)):
        content[i] ^= 0x55
    path.write_bytes(bytes(content))


def _truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _fake_number(path):
    """Still JSON, and nothing but a number is another one."""
    text = path.read_text()
    assert '"round": 6' in text or '"round":6' in text
    path.write_text(text.replace('"round": 6', '"round": 5').replace('"round":6', '"round":5'))


def _data_files(step):
    return [p for p in (step / "state").rglob("d/*") if p.is_file()]


def _mix_up(step):
    """Whole and readable, but the state of another round."""
    shutil.rmtree(step / "state")
    shutil.copytree(step.with_name("5") / "state", step / "state")


DAMAGES = {
    "state of round 5": _mix_up,
    "state flipped": lambda step: [_flip(p) for p in _data_files(step)],
    "state truncated": lambda step: [_truncate(p) for p in _data_files(step)],
    "best gone": lambda step: shutil.rmtree(step / "best"),
    "manifest flipped": lambda step: _flip(step / "state" / "manifest.ocdbt"),
    "facts flipped": lambda step: _flip(step / "meta" / "metadata"),
    "facts truncated": lambda step: _truncate(step / "meta" / "metadata"),
    "facts changed": lambda step: _fake_number(step / "meta" / "metadata"),
    "facts gone": lambda step: shutil.rmtree(step / "meta"),
    "all empty": lambda step: [p.write_bytes(b"") for p in step.rglob("*") if p.is_file()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(damage, finished, tmp_path, capsys):
    directory = tmp_path / "run"
    shutil.copytree(finished[1], directory)
    (directory / "checkpoints" / "6" / checkpoints.SUMS).unlink()  # the leaves' digests suffice
    DAMAGES[damage](directory / "checkpoints" / "6")
    result = runner.run(BASE, directory)
    assert result.resumed_at == 5
    (line,) = but_evaluations(capsys.readouterr().err)
    assert line.startswith("The checkpoint of round 6 is damaged: ")
    assert_same_run(result, finished[0], directory)
    again = runner.run(BASE, directory)  # the damaged one has been saved anew
    assert again.resumed_at == 6
    assert capsys.readouterr().err == ""
    assert_same_run(again, finished[0], directory)


def test_where_all_checkpoints_are_damaged_one_line_says_what_to_do(finished, tmp_path, capsys):
    directory = tmp_path / "run"
    shutil.copytree(finished[1], directory)
    for step in (directory / "checkpoints").iterdir():
        _truncate(step / "meta" / "metadata")
    before = contents(directory)
    with pytest.raises(UsageError, match=r"are damaged \(round 6: meta/metadata is not") as caught:
        runner.run(BASE, directory)
    assert "\n" not in str(caught.value)
    assert "restore one from a copy, or delete that folder to start again" in str(caught.value)
    assert contents(directory) == before
    assert capsys.readouterr().err == ""
    shutil.rmtree(directory / "checkpoints")
    result = runner.run(BASE, directory)
    assert result.resumed_at is None
    assert_same_run(result, finished[0], directory)


def test_a_damaged_file_of_observations_is_set_aside(tmp_path, capsys):
    seen = {"alpha": ([2, 4], [np.ones(3), np.zeros(3)])}
    run_directory.write_observations(tmp_path, seen)
    assert run_directory.read_observations(tmp_path, 3)["alpha"][0] == [2]
    _flip(tmp_path / "alpha.npz")
    assert run_directory.read_observations(tmp_path, 4) == {}
    assert "renamed to alpha.npz.damaged, a new one is begun" in capsys.readouterr().err
    objects = np.array([{}, {}], dtype=object)
    np.savez(tmp_path / "beta.npz", rounds=np.array([2, 4]), values=objects)
    assert run_directory.read_observations(tmp_path, 4) == {}  # what is pickled is never read
    assert {p.name for p in tmp_path.iterdir()} == {"alpha.npz.damaged", "beta.npz.damaged"}


# A real process, really killed.


def _start(directory):
    """`experiments.baseline` with BASE, compiled as in this process."""
    flags = [f"--workdir={directory}"]
    for key, value in BASE.items():
        inner = value.items() if isinstance(value, dict) else ()
        flags += [f"--config.{key}.{name}={v}" for name, v in inner]
        flags += [] if inner else [f"--config.{key}={value}"]
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
def test_a_process_that_ends_early_goes_on_as_if_nothing_had_happened(
    number, status, evaluations, finished, tmp_path
):
    directory, lines = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    processes = [_start(directory)]
    guard = threading.Timer(150, lambda: [p.kill() for p in processes])
    guard.start()
    try:
        while processes[0].poll() is None:
            if lines.exists() and lines.read_text().count("\n") >= evaluations:
                processes[0].send_signal(number)
                break
            time.sleep(0.002)
        _, said = processes[0].communicate()
        assert processes[0].returncode == status, said
        assert ("stopped" in said) == (number == signal.SIGTERM)
        assert not (directory / "report.html").exists()
        processes.append(_start(directory))
        out, err = processes[1].communicate()
    finally:
        guard.cancel()
        for process in processes:
            process.kill()
            process.communicate()
    assert processes[1].returncode == 0, err
    assert "This run resumed at round" in out
    wanted, there = finished
    assert {p.name for p in directory.iterdir()} == FILES
    for name in ("config.json", "clients.csv", "traffic.json"):
        assert (directory / name).read_bytes() == (there / name).read_bytes()
    result = runner.run(BASE, directory)
    assert result.resumed_at == 6
    assert_same_run(result, wanted, directory)
