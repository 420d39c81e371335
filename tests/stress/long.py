"""A long run: its memory must be flat within 5 %, the files bounded and the calls equally fast."""

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
from tests.stress.common import CONFIG, Row, scratch

MAX_TIME, MAX_MEMORY = 1.25, 1.05  # largest ratios of late to early calls


def _measured(pipe: Connection, directory: Path, config: dict[str, Any], programs: str) -> None:
    """Sends time, bytes of memory, number and bytes of files at every call."""
    jax.config.update("jax_compilation_cache_dir", programs)
    samples: list[tuple[float, int, int, int]] = []

    class Watch(interrupt.Stop):
        @contextlib.contextmanager
        def protected(self) -> Iterator[None]:
            sizes = [p.stat().st_size for p in directory.rglob("*") if p.is_file()]
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            memory = pages * os.sysconf("SC_PAGE_SIZE")
            samples.append((time.monotonic(), memory, len(sizes), sum(sizes)))
            with super().protected():
                yield

    runner.run(config, directory, Watch())
    pipe.send_bytes(json.dumps(samples).encode())


def long(rounds: int = 2000, every: int = 20) -> list[Row]:
    """Runs `rounds` rounds with a checkpoint after every `every` of them."""
    config = {**CONFIG, "rounds": rounds, "eval_every": every}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.stress.common"])
    with scratch() as folder:
        receiver, sender = context.Pipe(False)
        programs = jax.config.values["jax_compilation_cache_dir"]
        arguments = (sender, folder / "run", config, programs)
        process = context.Process(target=_measured, args=arguments, daemon=True)
        process.start()
        sender.close()
        seconds, memory, files, sizes = np.array(json.loads(receiver.recv_bytes())).T
        process.join()
    calls = len(seconds)
    early, late = slice(calls // 10, calls // 5), slice(calls - calls // 10, calls)
    durations = np.diff(seconds)
    slower = float(np.median(durations[late.start - 1 :]) / np.median(durations[early]))
    fatter = float(np.median(memory[late]) / np.median(memory[early]))
    grown = int(files[late].max() - files[early].max())
    note = (
        f"{rounds} rounds, {calls} calls; late over early: time {slower:.2f}, memory {fatter:.3f} "
        f"({memory[-1] / 2**20:.0f} MiB); {int(files.max())} files at most, "
        f"{(sizes[-1] - sizes[early].max()) / (calls - early.stop) / 1000:.1f} kB more a call"
    )
    bad = int(slower > MAX_TIME or fatter > MAX_MEMORY or grown > 2)
    return [Row("long run", 1, 1 - bad, bad, note)]
