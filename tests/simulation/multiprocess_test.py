"""Two processes with two devices each, started as users start them, against one process."""

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
from tests.commands import Command, digests, free_port, metrics, restored


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def two(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an undisturbed run of two processes."""
    directory = tmp_path_factory.mktemp("runs") / "two"
    code, out, error = Command(cache, "--processes=2", f"--workdir={directory}").ended()
    assert (code, error) == (0, "")
    assert out.count("Report: ") == out.count("bytes ") == 1
    assert "Gloo" not in out
    return directory


@pytest.mark.slow("two more processes")
def test_two_processes_compute_what_one_does(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(page, "write", lambda *_: None)  # drawing takes seconds
    one = runner.run(json.loads((two / "config.json").read_text()), tmp_path / "one")
    template = jax.eval_shape(lambda: one.state)

    def close(a, b):
        return np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

    jax.tree.map(close, restored(two, template), restored(tmp_path / "one", template))
    for name in ("traffic.json", "config.json"):
        assert (two / name).read_text() == (tmp_path / "one" / name).read_text()
    for here, there in zip(metrics(two), metrics(tmp_path / "one"), strict=True):
        assert jax.tree.structure(here) == jax.tree.structure(there)
        jax.tree.map(close, here, there)
    assert len(metrics(two)) == 3


@pytest.mark.slow("four real processes")
def test_two_processes_share_out_the_state(cache: Path, tmp_path: Path):
    """Three clients on four devices, and rows that all are compared by: saved, stopped, resumed."""

    def command(store: str, directory: Path) -> Command:
        changes = {"algorithm": "fedamp", "keep_head": False, "store": store, "rounds": 12}
        return Command(cache, "--processes=2", f"--workdir={directory}", **changes)

    code, out, error = command("device", tmp_path / "device").ended()
    assert (code, error) == (0, "")
    saved = tmp_path / "sharded" / "checkpoints" / "5" / checkpoints.SUMS
    code, out, error, _ = command("sharded", tmp_path / "sharded").disturbed(
        1, signal.SIGTERM, saved
    )
    assert "store=sharded" in out
    if code:  # else it had ended before the signal came
        assert code == 143, error
        code, out, error = command("sharded", tmp_path / "sharded").ended()
        assert (code, error) == (0, "")
        assert "resumed at round" in out
    for here, there in zip(
        metrics(tmp_path / "sharded"), metrics(tmp_path / "device"), strict=True
    ):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), here, there
        )
    config = json.loads((tmp_path / "device" / "config.json").read_text())
    one = runner.run(config)
    template = jax.eval_shape(lambda: one.state)
    states = [restored(tmp_path / name, template) for name in ("sharded", "device")]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), *states)


@pytest.mark.slow("six real processes; what is said of each end is tested below")
def test_a_run_that_is_stopped_and_killed_ends_as_if_it_were_not(
    two: Path, cache: Path, tmp_path: Path
):
    """One process is asked to stop, then one is killed; all end, and the last command goes on."""
    directory = tmp_path / "run"

    def again():
        return Command(cache, "--processes=2", f"--workdir={directory}")

    def saved(number):
        return directory / "checkpoints" / str(number) / checkpoints.SUMS

    code, out, error, _ = again().disturbed(1, signal.SIGTERM, saved(5))
    assert (code, out.count("\n")) == (143, 3), error  # method, plan and memory
    (line,) = error.splitlines()
    stopped = int(line.split()[3].rstrip(";"))
    assert line.startswith("stopped at round ")
    assert saved(stopped).exists()
    code, out, error, took = again().disturbed(1, signal.SIGKILL, saved(stopped + 5))
    assert (code, out.count("\n")) == (GONE, 3), error
    assert error == (
        "process 1 of 2 was killed (SIGKILL), so this run ends; give the same command again to "
        "resume\n"
    )
    assert took < 15
    code, out, error = again().ended()
    assert (code, error) == (0, "")
    assert "resumed at round" in out
    assert metrics(directory) == metrics(two)
    for name in ("clients.csv", "traffic.json"):
        assert (directory / name).read_text() == (two / name).read_text()
    assert digests(directory) == digests(two)


# Starting.


def test_other_settings_in_another_process(cache: Path):
    """Each is started by itself, as on two machines; nothing is compiled or written."""

    def own(i, **changes):
        return Command(
            cache,
            f"--coordinator=127.0.0.1:{free}",
            "--processes=2",
            f"--process={i}",
            "--workdir=/dev/null/none",
            **changes,
        )

    free = free_port()
    commands = [own(0), own(1, seed=1, chunk=2)]
    for i, (code, out, error) in enumerate([c.ended() for c in commands]):
        assert (code, out) == (2, "")
        assert error == (
            "error: chunk is None in process 0 and 2 in process 1; give all processes the same "
            f"settings{' (process 1 of 2)' if i else ''}\n"
        )


def test_process_0_that_cannot_be_reached_or_listen():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(UsageError, match=f"process 0 cannot be reached at {address} for 0 s \\("):
        processes._reach(address, 0)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        with pytest.raises(UsageError, match="cannot be listened on"):
            processes._check_free(other.getsockname()[1])


@pytest.mark.slow("a real process that waits; two processes are started above")
def test_processes_that_do_not_come(cache: Path):
    address = f"127.0.0.1:{free_port()}"
    common = (f"--coordinator={address}", "--processes=2", "--wait=1", "--workdir=/dev/null/none")
    code, out, error = Command(cache, *common, "--process=0").ended()
    assert (code, out) == (2, "")
    assert error == (
        f"error: not all of the 2 processes have joined at {address} in 1 s; start the others, or "
        "wait for them longer with --wait\n"
    )


@pytest.mark.slow("a real process that waits; two processes are started above")
def test_ctrl_c_while_waiting_for_the_others(cache: Path):
    port = free_port()
    common = (f"--coordinator=127.0.0.1:{port}", "--processes=2", "--workdir=/dev/null/none")
    first = Command(cache, *common, "--process=0")
    processes._reach(f"127.0.0.1:{port}", 60)  # it waits now
    first.process.send_signal(signal.SIGINT)
    assert first.ended(10) == (130, "", "stopped before the first round\n")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (ProcessOptions(2, 2, "a:1"), "choose 0 to 1"),
        (ProcessOptions(2, 1), "go together"),
        (ProcessOptions(1, 0, "a:1"), "go together"),
        (ProcessOptions(2, None, "a:1"), "go together"),
        (ProcessOptions(2, 0, "a"), "no HOST:PORT"),
        (ProcessOptions(2, None, "auto"), "the cluster's"),
    ],
)
def test_flags_that_do_not_go_together(given: ProcessOptions, said: str):
    with pytest.raises(UsageError, match=said):
        local_numbers(given)


def test_which_processes_are_started():
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
def test_what_is_said_about_their_ends(ends: list[End], line: str, status: int):
    said, code = verdict(ends, ProcessOptions(4), "a:1")
    assert said.startswith(line)
    assert bool(said) == bool(line)
    assert code == status


def test_one_process_asks_nobody():
    assert multiprocess.lead()
    assert multiprocess.agree(3, max) == 3
    tree = {"a": np.array([-0.0])}
    assert multiprocess.broadcast(tree) is tree
    multiprocess.check_settings({"seed": 1})
    multiprocess.check_settings({"learning_rate": float("nan")})  # which is no other than itself
    multiprocess.check_examples(tree)
