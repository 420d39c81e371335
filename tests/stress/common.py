"""Small runs in processes of their own, that faults can be done to, and the table of outcomes."""

import argparse
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
from collections.abc import Callable, Iterator
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
    "algorithm": "fedper",  # something shared and something that stays with the clients
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


# The same where what stays with clients is not on the device, or not on one.
STORES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"store": "host"},
    "disk": {"store": "disk"},
    "sharded": {"store": "sharded", "devices": 2},
}
MEASURED = Path(__file__).parent / "measured.json"  # rows of `python -m tests.stress`


class Row(NamedTuple):
    """A kind of fault: how often it was tried, and what became of the runs."""

    kind: str
    tried: int
    survived: int
    lost: int  # not restorable, or not the result that an undisturbed run has
    note: str = ""


def table(rows: list[Row]) -> str:
    """As Markdown, so that a page can show what a terminal does."""
    cells = [("fault", "tried", "survived", "lost", "note"), *(tuple(map(str, r)) for r in rows)]
    wide = [max(len(row[i]) for row in cells) for i in range(5)]
    put = [str.ljust, str.rjust, str.rjust, str.rjust, str.ljust]
    lines = [[f(c, w) for f, c, w in zip(put, row, wide, strict=True)] for row in cells]
    rule = [
        "-" * (w - (f is str.rjust)) + ":" * (f is str.rjust)
        for f, w in zip(put, wide, strict=True)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def of_store(config: dict[str, Any]) -> str:
    """What a row's name has of it."""
    return f", store={config['store']}" if "store" in config else ""


def given(doc: str | None, **number: int) -> tuple[int, int, dict[str, Any]]:
    """A command's flags: how many, the seed, and the configuration with the store."""
    parser = argparse.ArgumentParser(description=doc)
    ((name, default),) = number.items()
    parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=STORES, default="device")
    flags = parser.parse_args()
    return getattr(flags, name), flags.seed, CONFIG | STORES[flags.store]


def finish(rows: list[Row]) -> None:
    """Print the table; exit status 1 where anything was lost."""
    print(table(rows))
    sys.exit(int(any(row.lost for row in rows)))


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for runs, and for what they compile unless there is one: once for all of them."""
    given = jax.config.values["jax_compilation_cache_dir"]
    with tempfile.TemporaryDirectory(prefix="stress-") as name:
        jax.config.update("jax_compilation_cache_dir", given or str(Path(name) / "programs"))
        least = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()  # JAX keeps to the folder that it began with
        try:
            yield Path(name)
        finally:
            jax.config.update("jax_compilation_cache_dir", given)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
            compilation_cache.reset_cache()


def digest(*trees: Any) -> str:
    """Of all bits, dtypes and shapes."""
    seen = hashlib.sha256()
    for leaf in jax.tree.leaves(trees):
        array = np.ascontiguousarray(leaf)
        seen.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return seen.hexdigest()


def untimed(directory: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without times and without a line that is half written."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in whole]


def files(directory: Path) -> str:
    """All that is compared of a finished run's files."""
    tables = [(directory / name).read_text() for name in ("clients.csv", "traffic.json")]
    return json.dumps([untimed(directory), tables])


class Ended(NamedTuple):
    """What became of a process."""

    resumed: int | None  # the round that it went on from, 0 where it began; None: not so far
    result: str | None  # digest of the states, where it came to the end
    error: str | None  # one line, or a traceback
    said: str  # on stderr


class Fault(NamedTuple):
    """What the file system does to a run: from the nth step on that writes, or to large files."""

    number: int = 0  # an errno
    nth: int = 0
    largest: int | None = None  # bytes of a file


NONE = Fault()


class Process:
    """A run in a process of its own, forked where everything is imported already."""

    def __init__(self, directory: Path, config: dict[str, Any], fault: Fault = NONE) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.stress.common"])
        self._here, there = context.Pipe(False)
        programs = jax.config.values["jax_compilation_cache_dir"]
        arguments = (there, directory, config, fault, programs)
        self._process = context.Process(target=_work, args=arguments, daemon=True)
        self._process.start()
        there.close()
        self._told: dict[str, Any] = {"resumed": None, "result": None, "error": None, "said": ""}

    def until(self, word: str, seconds: float = 120.0) -> bool:
        """Listen until it says so; False where it ends before."""
        end = time.monotonic() + seconds
        while True:
            if not self._here.poll(max(0.0, end - time.monotonic())):
                self.kill()
                raise TimeoutError(f"a run said nothing of {word} in {seconds:.0f} s")
            try:
                key, value = json.loads(self._here.recv_bytes())
            except EOFError:
                return False
            self._told[key] = value
            if key == word:
                return True

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def ended(self, seconds: float = 120.0) -> Ended:
        """What became of it."""
        with contextlib.suppress(OSError):
            while self.until("said", seconds):
                pass
        self._process.join()
        self._here.close()
        told = {key: self._told[key] for key in Ended._fields}
        return Ended(**told)


def _work(
    pipe: Connection, directory: Path, config: dict[str, Any], fault: Fault, programs: str
) -> None:
    """In the process: run, and tell what happens."""

    def tell(key, value):
        return pipe.send_bytes(json.dumps([key, value]).encode())

    jax.config.update("jax_compilation_cache_dir", programs)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_num_cpu_devices", config["devices"])
    tqdm.set_lock(threading.RLock())  # its own would be left behind by a kill
    said = io.StringIO()

    class Stop(interrupt.Stop):
        @contextlib.contextmanager
        def protected(self) -> Iterator[None]:
            tell("call", None)
            with super().protected():
                yield

    write = run_directory.write_metrics

    def resumed(directory: Path, lines: list[dict[str, Any]]) -> None:
        tell("resumed", lines[-1]["round"] if lines else 0)
        write(directory, lines)

    def page(run, figures, beside):
        return (run.directory / "report.html").write_text("page")

    with (
        mock.patch.object(run_directory, "write_metrics", resumed),
        mock.patch.object(report, "write", page),
        contextlib.redirect_stderr(said),
    ):
        try:
            _begin(fault, directory)
            result = runner.run(config, directory, Stop())
            states = [one and stores.to_arrays(one) for one in (result.state, result.best)]
            tell("result", digest(states))
        except UsageError as error:
            tell("error", str(error))
        except BaseException:
            tell("error", traceback.format_exc())
    tell("said", re.sub(r"(?m)^(round \d+ of \d+: .*|compiling)\n", "", said.getvalue()))


def _begin(fault: Fault, directory: Path) -> None:
    if fault.largest is not None:
        limits = (fault.largest, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if not fault.number:
        return
    left, inside = [fault.nth], str(directory)

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE
        if not (writes or event in ("os.mkdir", "os.rename")):
            return
        if isinstance(arguments[0], (str, bytes)) and os.fsdecode(arguments[0]).startswith(inside):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(fault.number, os.strerror(fault.number), arguments[0])

    sys.addaudithook(refuse)


def undisturbed(directory: Path, config: dict[str, Any] = CONFIG) -> tuple[str, str, float]:
    """A run that nothing happens to: its digest, its files and the seconds of a call."""
    process = Process(directory, config)
    process.until("call")
    began = time.monotonic()
    ended = process.ended()
    if ended.result is None:
        raise RuntimeError(ended.error)
    calls = -(-config["rounds"] // config["eval_every"])
    return ended.result, files(directory), (time.monotonic() - began) / calls


def last_round(directory: Path) -> int:
    """Of the last evaluation that a run wrote down."""
    lines = untimed(directory)
    return lines[-1]["round"] if lines else 0


def copied(source: Path, target: Path) -> Path:
    """A copy that faults can be done to."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


def one_line(text: str | None) -> bool:
    """Whether an error is what a user is to see."""
    return bool(text) and "\n" not in str(text)


def progress(text: str) -> None:
    """Where a long try stands, for who watches."""
    if sys.stderr.isatty():
        print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)


Try = Callable[..., list[Row]]
