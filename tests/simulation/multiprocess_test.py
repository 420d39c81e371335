"""Tests of two processes with two devices each against one process."""

import json
import signal
import socket
from pathlib import Path

import jax
import numpy as np
import pytest

from fedjax_pfl.cli import processes
from fedjax_pfl.cli.processes import GONE, End, ProcessOptions, local_numbers, verdict
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import page
from fedjax_pfl.runs import checkpoints, runner
from fedjax_pfl.simulation import multiprocess
from tests.commands import Command, digests, free_port, metrics, restore


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def two_processes(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of an uninterrupted run of two processes."""
    directory = tmp_path_factory.mktemp("runs") / "two"
    code, out, error = Command(cache, "--processes=2", f"--workdir={directory}").wait()
    assert (code, error) == (0, "")
    assert out.count("Report: ") == out.count("bytes ") == 1
    assert "Gloo" not in out
    return directory


def assert_close(a: object, b: object):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


@pytest.mark.slow("two more processes")
def test_two_processes_compute_the_results_of_one(
    two_processes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(page, "write", lambda *_: None)  # drawing takes seconds
    config = json.loads((two_processes / "config.json").read_text())
    state = runner.run(config, tmp_path / "run").state
    template = jax.eval_shape(lambda: state)
    assert_close(restore(two_processes, template), restore(tmp_path / "run", template))
    for name in ("traffic.json", "config.json"):
        assert (two_processes / name).read_text() == (tmp_path / "run" / name).read_text()
    assert_close(metrics(two_processes), metrics(tmp_path / "run"))
    assert len(metrics(two_processes)) == 3


@pytest.mark.slow("four real processes")
def test_two_processes_with_sharded_state(cache: Path, tmp_path: Path):
    """Compares all rows of three clients on four devices; saves, stops and resumes."""

    def command(store: str) -> Command:
        changes = {"algorithm": "fedamp", "keep_head": False, "store": store, "rounds": 12}
        return Command(cache, "--processes=2", f"--workdir={tmp_path / store}", **changes)

    code, out, error = command("device").wait()
    assert (code, error) == (0, "")
    saved = tmp_path / "sharded" / "checkpoints" / "5" / checkpoints.SUMS
    code, out, error, _ = command("sharded").signal_worker(1, signal.SIGTERM, saved)
    assert "spread over the devices" in out
    if code:  # otherwise it ended before the signal
        assert code == 143, error
        code, out, error = command("sharded").wait()
        assert (code, error) == (0, "")
        assert "resumed at round" in out
    assert_close(metrics(tmp_path / "sharded"), metrics(tmp_path / "device"))
    config = json.loads((tmp_path / "device" / "config.json").read_text())
    state = runner.run(config).state
    template = jax.eval_shape(lambda: state)
    states = [restore(tmp_path / name, template) for name in ("sharded", "device")]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), *states)


@pytest.mark.slow("six real processes")
def test_a_stopped_and_killed_run_resumes(two_processes: Path, cache: Path, tmp_path: Path):
    """Stops one process, then kills one; all processes end, and the next command resumes."""
    directory = tmp_path / "run"

    def command():
        return Command(cache, "--processes=2", f"--workdir={directory}")

    def saved(number):
        return directory / "checkpoints" / str(number) / checkpoints.SUMS

    code, out, error, _ = command().signal_worker(1, signal.SIGTERM, saved(5))
    assert (code, out.count("\n")) == (143, 3), error  # method, plan and memory
    (line,) = error.splitlines()
    stopped = int(line.split()[3].rstrip(";"))
    assert line.startswith("stopped at round ")
    assert saved(stopped).exists()
    code, out, error, took = command().signal_worker(1, signal.SIGKILL, saved(stopped + 5))
    assert (code, out.count("\n")) == (GONE, 3), error
    assert error == (
        "process 1 of 2 was killed (SIGKILL), so this run ends; give the same command again to "
        "resume\n"
    )
    assert took < 15
    code, out, error = command().wait()
    assert (code, error) == (0, "")
    assert "resumed at round" in out
    assert metrics(directory) == metrics(two_processes)
    for name in ("clients.csv", "traffic.json"):
        assert (directory / name).read_text() == (two_processes / name).read_text()
    assert digests(directory) == digests(two_processes)


def member(cache: Path, port: int, number: int, *flags: str, **changes: object) -> Command:
    """Starts one of two processes, as on two machines, in a directory that cannot be written."""
    coordinator = f"--coordinator=127.0.0.1:{port}"
    options = ("--processes=2", f"--process={number}", "--workdir=/dev/null/none")
    return Command(cache, coordinator, *options, *flags, **changes)


@pytest.mark.slow("two more processes")
def test_different_settings_in_two_processes_are_refused(cache: Path):
    port = free_port()
    commands = [member(cache, port, 0), member(cache, port, 1, seed=1, chunk=2)]
    for i, (code, out, error) in enumerate([c.wait() for c in commands]):
        assert (code, out) == (2, "")
        assert error == (
            "error: chunk is None in process 0 and 2 in process 1; give all processes the same "
            f"settings{' (process 1 of 2)' if i else ''}\n"
        )


def test_process_0_must_be_reachable_and_able_to_listen():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(UsageError, match=f"process 0 cannot be reached at {address} for 0 s \\("):
        processes._reach(address, 0)
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        with pytest.raises(UsageError, match="cannot be listened on"):
            processes._check_free(listener.getsockname()[1])


@pytest.mark.slow("real processes that wait")
def test_waiting_for_other_processes(cache: Path):
    """Waits for one second, and until Ctrl-C."""
    port = free_port()
    assert member(cache, port, 0, "--wait=1").wait() == (
        2,
        "",
        f"error: not all of the 2 processes have joined at 127.0.0.1:{port} in 1 s; start the "
        "others, or wait for them longer with --wait\n",
    )
    port = free_port()
    command = member(cache, port, 0)
    processes._reach(f"127.0.0.1:{port}", 60)  # the process waits
    command.process.send_signal(signal.SIGINT)
    assert command.wait(10) == (130, "", "stopped before the first round\n")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (ProcessOptions(2, 2, "a:1"), "choose 0 to 1"),
        (ProcessOptions(2, 1), "go together"),
        (ProcessOptions(1, 0, "a:1"), "go together"),
        (ProcessOptions(2, None, "a:1"), "go together"),
        (ProcessOptions(2, 0, "a"), "no HOST:PORT"),
        (ProcessOptions(2, None, "auto"), "the cluster's"),
    ],
)
def test_contradicting_flags_are_refused(options: ProcessOptions, line: str):
    with pytest.raises(UsageError, match=line):
        local_numbers(options)


def test_numbers_of_local_processes():
    assert list(local_numbers(ProcessOptions())) == []
    assert list(local_numbers(ProcessOptions(3))) == [0, 1, 2]
    assert list(local_numbers(ProcessOptions(3, 2, "node1:9876"))) == [2]
    assert list(local_numbers(ProcessOptions(coordinator="auto"))) == [None]


FATAL = "Terminating process because the JAX distributed service detected fatal errors."
RPC = f"{FATAL} absl::Status: UNAVAILABLE: Failed to send RPC to coordination service."
DEAD = f"unhealthy (stopped sending heartbeats):\n1\n3\nThe tasks have crashed.\n{FATAL}"


@pytest.mark.parametrize(
    ("ends", "line", "status"),
    [
        ([End(0, 0, "", ""), End(1, 0, "", "")], "", 0),
        ([End(1, GONE, "x", ""), End(0, 2, "no room", "")], "error: no room", 2),
        ([End(1, 2, "no room", ""), End(0, -6, "", RPC)], "error: no room (process 1 of 4)", 2),
        ([End(1, 2, "bad", ""), End(0, 2, "bad", "")], "error: bad", 2),
        ([End(0, GONE, "Gloo", ""), End(2, -9, "", "")], "process 2 of 4 was killed ", 75),
        ([End(1, 143, "y", ""), End(0, 143, "stopped at round 3", "")], "stopped at round 3", 143),
        ([End(1, 143, "", ""), End(0, GONE, "", "")], "process 1 of 4 was stopped", 143),
        ([End(1, -2, "joining", ""), End(0, -2, "", "")], "stopped before the first round", 130),
        ([End(0, -6, "joining", FATAL)], "error: not all of the 4 processes have joined", 2),
        ([End(0, 1, "", "a\nb"), End(1, -6, "", RPC)], "a\nb\nprocess 0 of 4 has crashed (1), ", 1),
        ([End(1, -6, "", RPC)], "process 0 is gone, so this run ends; give the same command", 75),
        ([End(0, -6, "", DEAD)], "process 1, 3 is gone, ", 75),
        ([End(0, GONE, "Gloo failed", "")], "another process is gone (Gloo failed), ", 75),
    ],
)
def test_message_and_status_of_ended_processes(ends: list[End], line: str, status: int):
    text, code = verdict(ends, ProcessOptions(4), "a:1")
    assert text.startswith(line)
    assert bool(text) == bool(line)
    assert code == status


def test_a_single_process_needs_no_agreement():
    assert multiprocess.lead()
    assert multiprocess.agree(3, max) == 3
    tree = {"a": np.array([-0.0])}
    assert multiprocess.broadcast(tree) is tree
    multiprocess.check_settings({"seed": 1})
    multiprocess.check_settings({"learning_rate": float("nan")})  # NaN differs from itself
    multiprocess.check_examples(tree)
