"""A federation over Flower that faults are done to: a trial, and its processes by what they are."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedjax_pfl.deploy import guard, run
from fedjax_pfl.deploy.trial import free_ports

NODES, EVERY, LIMIT = 2, 4, 600.0
CONFIG: dict[str, Any] = {
    "algorithm": "fedper",
    "dataset": "synthetic",
    "synthetic.shape": (2, 2, 1),
    "synthetic.classes": 3,
    "synthetic.examples": 60,
    "synthetic.test_examples": 0,
    "partition": "iid",
    "validation_fraction": 0.2,
    "model": "mlp",
    "mlp.hidden": (4,),
    "clients": NODES,
    "eval_every": EVERY,
    "batch_size": 8,
    "learning_rate": 0.1,
    "momentum": 0.9,
    "keep_optimizer": True,
}


class Federation:
    """A trial, and its processes by what they are."""

    def __init__(self, place: Path, number: int) -> None:
        self.place, self.nodes, self.home = place, place / "nodes", place / "nodes" / "flwr"
        self.config = {**CONFIG, "rounds": number}
        self.start()

    def start(self) -> None:
        settings = [f"--config.{key}={value}" for key, value in self.config.items()]
        places = [f"--workdir={self.place / 'run'}", f"--folder={self.nodes}"]
        given = ["--config=baseline", f"--nodes={NODES}", "--seconds=300"]
        with open(self.place / "said", "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "experiments.deploy", *given, *settings, *places],
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def said(self) -> str:
        return (self.place / "said").read_text()

    def rounds(self) -> int:
        """That are over."""
        path = self.place / "run" / run.WIRE
        return path.read_text().count("\n") if path.exists() else 0

    def ctx(self, i: int) -> int:
        """The round of client i's newest visit; -1 before the first."""
        found = self.nodes.glob(f"node-{i}/run-*/client-{i}/visit-*")
        return max((int(path.name.removeprefix("visit-")) for path in found), default=-1)

    def sent(self, i: int) -> int:
        """Answers that the SuperLink has taken of a node."""
        return (self.nodes / f"node-{i}.log").read_text().count("Sent successfully")

    def pids(self, word: str) -> list[int]:
        return guard.left(self.home, word)

    def worker(self, i: int) -> int:
        return next(pid for pid in self.pids("deploy.worker") if self._of(pid, i))

    def node(self, i: int) -> list[int]:
        """All that runs on the machine of a node: its SuperNode, what that started, its worker."""
        found = [pid for pid in self.pids("flower-supernode") if self._of(pid, i)]
        for pid in found:
            path = Path(f"/proc/{pid}/task/{pid}/children")
            with contextlib.suppress(OSError):
                found += map(int, path.read_text().split())
        with contextlib.suppress(StopIteration):
            found.append(self.worker(i))
        return found

    def _of(self, pid: int, i: int) -> bool:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text()
            return f"/node-{i}\0" in words or f"/client-{i}.key" in words
        return False

    def until(self, there: Callable[[], bool], what: str, seconds: float = LIMIT) -> None:
        """Wait for something."""
        end = time.monotonic() + seconds
        while not there():
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended before {what}: {self.said()[-2000:]}")
            if time.monotonic() > end:
                raise TimeoutError(f"no {what} in {seconds:.0f} s: {self.said()[-2000:]}")
            time.sleep(0.005)

    def next_round(self) -> int:
        """Wait until a round is over; its number."""
        before = self.rounds()
        self.until(lambda: self.rounds() > before, f"round {before + 1}")
        return self.rounds()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        end = time.monotonic() + 60
        while guard.left(self.home) and time.monotonic() < end:
            time.sleep(0.1)


def ended(pids: list[int], number: int = signal.SIGKILL) -> None:
    """Send all of them a signal."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def stranger(one: Federation, path: Path) -> str:
    """A node comes by this key; what its SuperNode says at its end."""
    words = ["flower-supernode", "--superlink", f"127.0.0.1:{port(one)}"]
    words += ["--root-certificates", str(one.nodes / "ca.crt")]
    words += ["--port", str(free_ports(1)[0]), "--auth-supernode-private-key", str(path)]
    tls = {"ca-certfile": "ca.crt", "certfile": "server.pem", "keyfile": "server.key"}
    for word, name in tls.items():
        words += [f"--ssl-{word}", str(one.nodes / name)]
    environment = {**os.environ, "FLWR_HOME": str(one.home), "FLWR_TELEMETRY_ENABLED": "0"}
    place = Path(sys.executable).parent
    log = path.with_suffix(".log")
    with open(log, "wb") as out:  # which a process that it has started may hold for longer
        subprocess.Popen(
            [str(place / words[0]), *words[1:]],
            env={**environment, "PATH": f"{place}:{os.environ['PATH']}"},
            stdout=out,
            stderr=out,
        ).wait(LIMIT)
    return " ".join(log.read_text().split())


def port(one: Federation) -> str:
    """At which the SuperLink listens."""
    found = re.search(r"127\.0\.0\.1:(\d+)", (one.home / "config.toml").read_text())
    assert found is not None
    return found[1]
