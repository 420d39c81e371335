"""Small runs in separate processes, faults of their file system, and the table of outcomes."""

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import re
import resource
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from tqdm import tqdm

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import page as report
from fedjax_pfl.runs import interrupt, run_directory, runner
from fedjax_pfl.simulation import stores

EVERY = 2  # rounds between evaluations, each of which is saved
CONFIG: dict[str, Any] = {
    "algorithm": "fedper",  # has a shared and a client-side part
    "dataset": "digits",
    "clients": 4,
    "classes": {"per_client": 4, "examples": 100},
    "validation_fraction": 0.1,
    "model": "mlp",
    "mlp": {"hidden": (8,)},
    "clients_per_round": 3,
    "dropout": 0.2,
    "rounds": 24,
    "eval_every": EVERY,
    "checkpoint_every": EVERY,
    "devices": 1,
}


STORES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"store": "host"},
    "disk": {"store": "disk"},
    "sharded": {"store": "sharded", "devices": 2},
}
MEASURED = Path(__file__).parent / "measured.json"  # rows of `python -m tests.stress`


class Row(NamedTuple):
    """A kind of fault and the outcome of its runs."""

    kind: str
    tried: int
    survived: int
    lost: int  # not resumable, or with another result than an undisturbed run
    note: str = ""


def table(rows: list[Row]) -> str:
    """Returns a Markdown table that is also readable in a terminal."""
    cells = [("fault", "tried", "survived", "lost", "note"), *(tuple(map(str, r)) for r in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(5)]
    align = [str.ljust, str.rjust, str.rjust, str.rjust, str.ljust]
    lines = [[f(c, w) for f, c, w in zip(align, row, widths, strict=True)] for row in cells]
    rule = [
        "-" * (w - (f is str.rjust)) + ":" * (f is str.rjust)
        for f, w in zip(align, widths, strict=True)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def store_suffix(config: dict[str, Any]) -> str:
    """Returns the end of a row's name for an off-device store."""
    return f", store={config['store']}" if "store" in config else ""


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yields a folder for runs and, without a compilation cache, for compiled programs."""
    cache = jax.config.values["jax_compilation_cache_dir"]
    with tempfile.TemporaryDirectory(prefix="stress-") as name:
        jax.config.update("jax_compilation_cache_dir", cache or str(Path(name) / "programs"))
        least = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()  # otherwise JAX uses the previous folder
        try:
            yield Path(name)
        finally:
            jax.config.update("jax_compilation_cache_dir", cache)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
            compilation_cache.reset_cache()


def digest(*trees: Any) -> str:
    """Returns a digest of all bits, dtypes and shapes."""
    sha256 = hashlib.sha256()
    for leaf in jax.tree.leaves(trees):
        array = np.ascontiguousarray(leaf)
        sha256.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return sha256.hexdigest()


def untimed(directory: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of metrics.jsonl, without times."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    complete = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in complete]


def files(directory: Path) -> str:
    """Returns the content of a finished run's files that must be reproducible."""
    tables = [(directory / name).read_text() for name in ("clients.csv", "traffic.json")]
    return json.dumps([untimed(directory), tables])


class Ended(NamedTuple):
    """The end of a process."""

    resumed: int | None  # the round of the checkpoint; 0 for a new run, None before the start
    result: str | None  # digest of the states of a finished run
    error: str | None  # one line, or a traceback
    stderr: str


class Fault(NamedTuple):
    """A fault of the file system, from the nth step that writes, or for large files."""

    number: int = 0  # an errno
    nth: int = 0
    largest: int | None = None  # bytes of a file


NONE = Fault()


class Process:
    """A run in a process that is forked with all imports."""

    def __init__(self, directory: Path, config: dict[str, Any], fault: Fault = NONE) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.stress.common"])
        self._pipe, sender = context.Pipe(False)
        programs = jax.config.values["jax_compilation_cache_dir"]
        arguments = (sender, directory, config, fault, programs)
        self._process = context.Process(target=_work, args=arguments, daemon=True)
        self._process.start()
        sender.close()
        self._messages: dict[str, Any] = {
            "resumed": None,
            "result": None,
            "error": None,
            "stderr": "",
        }

    def until(self, word: str, seconds: float = 120.0) -> bool:
        """Waits for a message; returns False if the process ends before it."""
        end = time.monotonic() + seconds
        while True:
            if not self._pipe.poll(max(0.0, end - time.monotonic())):
                self.kill()
                raise TimeoutError(f"a run sent no {word} in {seconds:.0f} s")
            try:
                key, value = json.loads(self._pipe.recv_bytes())
            except EOFError:
                return False
            self._messages[key] = value
            if key == word:
                return True

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def ended(self, seconds: float = 120.0) -> Ended:
        """Waits for the end."""
        with contextlib.suppress(OSError):
            while self.until("stderr", seconds):
                pass
        self._process.join()
        self._pipe.close()
        return Ended(**{key: self._messages[key] for key in Ended._fields})


def _work(
    pipe: Connection, directory: Path, config: dict[str, Any], fault: Fault, programs: str
) -> None:
    """Runs in the process and sends messages."""

    def send(key, value):
        return pipe.send_bytes(json.dumps([key, value]).encode())

    jax.config.update("jax_compilation_cache_dir", programs)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_num_cpu_devices", config["devices"])
    tqdm.set_lock(threading.RLock())  # a kill would leave its default lock behind
    stderr = io.StringIO()

    class Stop(interrupt.Stop):
        @contextlib.contextmanager
        def protected(self) -> Iterator[None]:
            send("call", None)
            with super().protected():
                yield

    write = run_directory.write_metrics

    def resumed(directory: Path, lines: list[dict[str, Any]]) -> None:
        send("resumed", lines[-1]["round"] if lines else 0)
        write(directory, lines)

    def page(run, figures, reference_runs):
        return (run.directory / "report.html").write_text("page")

    with (
        mock.patch.object(run_directory, "write_metrics", resumed),
        mock.patch.object(report, "write", page),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            _plant(fault, directory)
            result = runner.run(config, directory, Stop())
            states = [tree and stores.to_arrays(tree) for tree in (result.state, result.best)]
            send("result", digest(states))
        except UsageError as error:
            send("error", str(error))
        except BaseException:
            send("error", traceback.format_exc())
    send("stderr", re.sub(r"(?m)^(round \d+ of \d+: .*|compiling)\n", "", stderr.getvalue()))


def _plant(fault: Fault, directory: Path) -> None:
    if fault.largest is not None:
        limits = (fault.largest, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if not fault.number:
        return
    left, folder = [fault.nth], str(directory)

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE
        if not (writes or event in ("os.mkdir", "os.rename")):
            return
        if isinstance(arguments[0], (str, bytes)) and os.fsdecode(arguments[0]).startswith(folder):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(fault.number, os.strerror(fault.number), arguments[0])

    sys.addaudithook(refuse)


def undisturbed(directory: Path, config: dict[str, Any] = CONFIG) -> tuple[str, str, float]:
    """Returns digest, files and seconds per call of a run without faults."""
    process = Process(directory, config)
    process.until("call")
    start = time.monotonic()
    ended = process.ended()
    if ended.result is None:
        raise RuntimeError(ended.error)
    calls = -(-config["rounds"] // config["eval_every"])
    return ended.result, files(directory), (time.monotonic() - start) / calls


def last_round(directory: Path) -> int:
    """Returns the round of the last recorded evaluation."""
    lines = untimed(directory)
    return lines[-1]["round"] if lines else 0


def copy(source: Path, target: Path) -> Path:
    """Replaces a directory by a copy of another."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


def one_line(text: str | None) -> bool:
    """Returns True if an error is a message for users."""
    return bool(text) and "\n" not in str(text)


def progress(text: str) -> None:
    """Shows progress on a terminal."""
    if sys.stderr.isatty():
        print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)
