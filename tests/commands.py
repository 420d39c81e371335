"""Starts small runs as users do, in processes that end with their test."""

import contextlib
import json
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from fedjax_pfl.cli import main
from fedjax_pfl.cli.command import Call, define
from fedjax_pfl.core.errors import UsageError
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


def message(function, *arguments):
    """Returns the message of the UsageError that a call raises; it must be one line."""
    with pytest.raises(UsageError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def run_here(name, *arguments):
    """Runs a command of `fedjax-pfl` in this process. Its errors are raised."""
    command = main.load(name)
    options, arguments = define(command, [str(argument) for argument in arguments])
    parsed = options([name, *arguments])[1:]
    command.run(Call(arguments, options, parsed))


class Command:
    """A command in a new process group, all of whose processes are killed at the end."""

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
        """Returns the ids of the child processes."""
        pid = self.process.pid
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def wait(self, seconds: float = LIMIT) -> tuple[int, str, str]:
        """Ends all processes. Returns status, stdout, and stderr without lines of progress."""
        try:
            out, error = self.process.communicate(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return (
            self.process.returncode,
            out,
            re.sub(r"(?m)^(round \d+ of \d+: .*|compiling)\n", "", error),
        )

    def signal_worker(self, worker: int, number: int, after: Path) -> tuple[int, str, str, float]:
        """Sends a signal to a worker when the file `after` exists, and waits for the end.

        Returns status, stdout, stderr, and the seconds from the signal to the end.
        """
        try:
            end = time.monotonic() + LIMIT
            while not after.exists():
                assert self.process.poll() is None, self.process.communicate()
                assert time.monotonic() < end
                time.sleep(0.02)
            workers = self.workers()
            os.kill(workers[worker], number)
            began = time.monotonic()
            code, out, error = self.wait()
            took = time.monotonic() - began
            assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
            return code, out, error, took
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Outcome(NamedTuple):
    """Status and output of a command, and the files in its working directory."""

    status: int | None
    out: str
    err: str
    files: list[Path]


class Forked:
    """A command forked from a server process that has imported the library, which takes seconds.

    It runs like `python -m MODULE` in an empty directory. Only a `Command` tests the start.
    """

    def __init__(self, module: str, *arguments: str, place: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.commands", "fedjax_pfl.cli.train"])
        self._place = place / "started"
        self._place.mkdir()
        self._process = context.Process(
            target=_command, args=(module, arguments, self._place), daemon=True
        )
        self._process.start()

    def wait(self, seconds: float = LIMIT) -> Outcome:
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        out, err = ((self._place.parent / name).read_text() for name in ("out", "err"))
        return Outcome(self._process.exitcode, out, err, sorted(self._place.iterdir()))


def _command(module: str, arguments: list[str], place: Path) -> None:
    os.chdir(place)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(place.parent / name, os.O_CREAT | os.O_WRONLY), number)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def metrics(directory: Path) -> list[dict]:
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in lines]


def restore(directory: Path, template: object) -> object:
    store = checkpoints.open_store(directory / "checkpoints")
    return store.restore(store.steps()[0], {"state": template, "best": template})


def digests(directory: Path) -> dict:
    """Returns the digest of each leaf of the last checkpoint."""
    store = checkpoints.open_store(directory / "checkpoints")
    return store._meta(store.steps()[0])["digests"]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


class Flags(SimpleNamespace):
    """Stands for `flags.FLAGS`; a flag without a value in `defaults` has the default None."""

    def __init__(self, defaults=None, **given):
        self._defaults = defaults or {}
        super().__init__(**self._defaults | given)

    def __getitem__(self, name):
        value = getattr(self, name, None)
        is_default = value == self._defaults.get(name)
        return SimpleNamespace(value=value, using_default_value=is_default)
