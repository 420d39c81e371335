"""A long run: python -m tests.stress.long --rounds=2000

Memory has to stay flat within 5 %, the number of files bounded and the time of a call what it was.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_pfl.runs import interrupt, runner
from tests.stress.common import CONFIG, Row, finish, scratch

SLOWER, FATTER = 1.25, 1.05  # the most that is let pass, late over early


def _measured(pipe: Connection, directory: Path, config: dict[str, Any], programs: str) -> None:
    """In a process of its own: seconds, bytes of memory and files at every call."""
    jax.config.update("jax_compilation_cache_dir", programs)
    seen: list[tuple[float, int, int, int]] = []

    class Watch(interrupt.Stop):
        @contextlib.contextmanager
        def protected(self) -> Iterator[None]:
            sizes = [p.stat().st_size for p in directory.rglob("*") if p.is_file()]
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            memory = pages * os.sysconf("SC_PAGE_SIZE")
            seen.append((time.monotonic(), memory, len(sizes), sum(sizes)))
            with super().protected():
                yield

    runner.run(config, directory, Watch())
    pipe.send_bytes(json.dumps(seen).encode())


def long(rounds: int = 2000, every: int = 20) -> list[Row]:
    """One run with an evaluation and a checkpoint every so many rounds."""
    config = {**CONFIG, "rounds": rounds, "eval_every": every}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.stress.common"])
    with scratch() as place:
        here, there = context.Pipe(False)
        programs = jax.config.values["jax_compilation_cache_dir"]
        arguments = (there, place / "run", config, programs)
        process = context.Process(target=_measured, args=arguments, daemon=True)
        process.start()
        there.close()
        seconds, memory, files, sizes = np.array(json.loads(here.recv_bytes())).T
        process.join()
    calls = len(seconds)
    early, late = slice(calls // 10, calls // 5), slice(calls - calls // 10, calls)
    taken = np.diff(seconds)
    slower = float(np.median(taken[late.start - 1 :]) / np.median(taken[early]))
    fatter = float(np.median(memory[late]) / np.median(memory[early]))
    grown = int(files[late].max() - files[early].max())
    note = (
        f"{rounds} rounds, {calls} calls; late over early: time {slower:.2f}, memory {fatter:.3f} "
        f"({memory[-1] / 2**20:.0f} MiB); {int(files.max())} files at most, "
        f"{(sizes[-1] - sizes[early].max()) / (calls - early.stop) / 1000:.1f} kB more a call"
    )
    bad = int(slower > SLOWER or fatter > FATTER or grown > 2)
    return [Row("long run", 1, 1 - bad, bad, note)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--every", type=int, default=20)
    given = parser.parse_args()
    finish(long(given.rounds, given.every))
