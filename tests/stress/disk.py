"""Full disks and lost directories: python -m tests.stress.disk --faults=20 --store=disk

A run's disk is full or read-only from a random step on, its files may not be longer than so many
bytes, its directory is moved away or removed, or another run is started in it. Each has to end in
one line that says what to do, and the same command has to go on from what was saved before, to
what an undisturbed run gives, bit for bit.
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
    finish,
    given,
    last_round,
    of_store,
    one_line,
    progress,
    scratch,
    undisturbed,
)

WORDS = {
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
    """What a run ends with, and another one that was started at the same time."""
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
    """So many faults, the kinds in turn; one that comes after a run's end does not count."""
    config = {**config, "rounds": 12}
    rng = np.random.default_rng(seed)
    tried: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    with scratch() as place:
        wanted, wanted_files, call = undisturbed(place / "undisturbed", config)
        for count in range(3 * number):
            kind = list(WORDS)[count % len(WORDS)]
            if tried.total() == number:
                break
            directory = place / f"run{count}"
            ended, second = disturb(kind, directory, config, call, rng)
            away = directory.with_suffix(".away")
            if away.exists():
                shutil.rmtree(directory, ignore_errors=True)
                if kind == "moved away":
                    away.rename(directory)
            refused = second or ended
            if refused.result:
                continue  # the fault came too late, or nothing was written after it
            tried[kind] += 1
            saved = last_round(directory)
            again = ended if second else Process(directory, config).ended()
            fine = (
                one_line(refused.error)
                and WORDS[kind] in str(refused.error)
                and not refused.said
                and again.result == wanted
                and files(directory) == wanted_files
                and (second is not None or (again.resumed or 0) >= saved - config["eval_every"])
            )
            progress(f"{tried.total()} faults")
            if not fine:
                lost[kind] += 1
                print(f"{kind}: {refused.error}\n{refused.said}\n{again.error} {again.said}")
    rows = [Row(kind, tried[kind], tried[kind] - lost[kind], lost[kind]) for kind in tried]
    whole = f"disk or directory{of_store(config)}"
    total = Row(whole, tried.total(), tried.total() - lost.total(), lost.total())
    return [total, *(row._replace(kind=f"- {row.kind}") for row in rows)]


if __name__ == "__main__":
    finish(disk(*given(__doc__, faults=20)))
