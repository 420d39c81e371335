"""Full disks and lost directories.

The disk becomes full or read-only at a random step, files have a size limit, or the directory is
moved, removed or used by another run. Each fault must end in one line that says what to do. The
same command must then resume to the result of an undisturbed run, bit for bit.
"""

import errno
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tests.stress.common import (
    CONFIG,
    NONE,
    Ended,
    Fault,
    Process,
    Row,
    files,
    last_round,
    one_line,
    progress,
    scratch,
    store_suffix,
    undisturbed,
)

MESSAGES = {
    "disk full": "No space left on device",
    "read-only": "Read-only file system",
    "files cut short": "File too large",
    "moved away": "was removed or moved",
    "removed": "was removed or moved",
    "two at once": "in use by another process",
}


def disturb(
    kind: str, directory: Path, config: dict[str, Any], call: float, rng: np.random.Generator
) -> tuple[Ended, Ended | None]:
    """Returns the end of a run with a fault, and the end of a second run in its directory."""
    fault = {
        "disk full": lambda: Fault(errno.ENOSPC, int(rng.integers(200))),
        "read-only": lambda: Fault(errno.EROFS, int(rng.integers(200))),
        "files cut short": lambda: Fault(largest=int(rng.integers(50, 4000))),
    }.get(kind, lambda: NONE)()
    process = Process(directory, config, fault)
    if kind in ("moved away", "removed", "two at once") and process.until("call"):
        time.sleep(rng.uniform(0, 3 * call))
        if kind == "two at once":
            process.signal(signal.SIGSTOP)
            second = Process(directory, config).ended()
            process.signal(signal.SIGCONT)
            return process.ended(), second
        directory.rename(directory.with_suffix(".away"))
    return process.ended(), None


def disk(number: int = 20, seed: int = 0, config: dict[str, Any] = CONFIG) -> list[Row]:
    """Runs `number` faults of alternating kinds, without those after the end of a run."""
    config = {**config, "rounds": 12}
    rng = np.random.default_rng(seed)
    tried: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    with scratch() as folder:
        expected, expected_files, call = undisturbed(folder / "undisturbed", config)
        for count in range(3 * number):
            kind = list(MESSAGES)[count % len(MESSAGES)]
            if tried.total() == number:
                break
            directory = folder / f"run{count}"
            ended, second = disturb(kind, directory, config, call, rng)
            moved = directory.with_suffix(".away")
            if moved.exists():
                shutil.rmtree(directory, ignore_errors=True)
                if kind == "moved away":
                    moved.rename(directory)
            refused = second or ended
            if refused.result:
                continue  # the fault came too late, or nothing was written after it
            tried[kind] += 1
            saved = last_round(directory)
            resumed = ended if second else Process(directory, config).ended()
            correct = (
                one_line(refused.error)
                and MESSAGES[kind] in str(refused.error)
                and not refused.stderr
                and resumed.result == expected
                and files(directory) == expected_files
                and (second is not None or (resumed.resumed or 0) >= saved - config["eval_every"])
            )
            progress(f"{tried.total()} faults")
            if not correct:
                lost[kind] += 1
                print(
                    f"{kind}: {refused.error}\n{refused.stderr}\n{resumed.error} {resumed.stderr}"
                )
    rows = [Row(kind, tried[kind], tried[kind] - lost[kind], lost[kind]) for kind in tried]
    title = f"disk or directory{store_suffix(config)}"
    total = Row(title, tried.total(), tried.total() - lost.total(), lost.total())
    return [total, *(row._replace(kind=f"- {row.kind}") for row in rows)]
