"""Small runs started as users start them, in processes of which none is left behind."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from fedjax_pfl.runs import checkpoints

LIMIT = 150.0  # seconds after which a test ends all that it has started
CONFIG = {
    "dataset": "synthetic",
    "synthetic.shape": (2, 2, 1),
    "synthetic.classes": 3,
    "synthetic.examples": 60,
    "synthetic.test_examples": 0,
    "partition": "iid",
    "validation_fraction": 0.2,
    "model": "mlp",
    "mlp.hidden": (4,),
    "clients": 3,
    "rounds": 60,
    "eval_every": 20,
    "checkpoint_every": 5,
    "batch_size": 8,
    "dropout": 0.2,
    "keep_head": True,
    "evaluate_after": False,
}


class Command:
    """A command in a group of processes of its own, of which none outlives its test."""

    def __init__(self, cache: Path, *arguments: str, **changes: object) -> None:
        settings = [f"--config.{key}={value}" for key, value in {**CONFIG, **changes}.items()]
        environment = {
            **os.environ,
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "experiments.baseline", *settings, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def workers(self) -> list[int]:
        pid = self.process.pid
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def ended(self, seconds: float = LIMIT) -> tuple[int, str, str]:
        """Its status, and what it said; nothing of it is left then."""
        try:
            out, error = self.process.communicate(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.returncode, out, error

    def disturbed(self, worker: int, number: int, after: Path) -> tuple[int, str, str, float]:
        """Send one of its processes a signal as soon as there is such a file."""
        try:
            end = time.monotonic() + LIMIT
            while not after.exists():
                assert self.process.poll() is None, self.process.communicate()
                assert time.monotonic() < end
                time.sleep(0.02)
            workers = self.workers()
            os.kill(workers[worker], number)
            began = time.monotonic()
            code, out, error = self.ended()
            took = time.monotonic() - began
            assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
            return code, out, error, took
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def metrics(directory: Path) -> list[dict]:
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in lines]


def restored(directory: Path, template: object) -> object:
    store = checkpoints.open_store(directory / "checkpoints")
    return store.restore(store.steps()[0], {"state": template, "best": template})


def digests(directory: Path) -> dict:
    """Of all bits of the last states, by leaf."""
    store = checkpoints.open_store(directory / "checkpoints")
    return store._meta(store.steps()[0])["digests"]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
