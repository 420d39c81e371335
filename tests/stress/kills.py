"""SIGKILL anywhere in rounds and saves, again and again.

python -m tests.stress.kills --kills=100 --store=disk

Nothing may be unrestorable, at most one evaluation's interval may have to be computed again, and
what comes out in the end is what an undisturbed run gives, bit for bit.
"""

import time
from typing import Any

import numpy as np

from tests.stress.common import (
    CONFIG,
    EVERY,
    Process,
    Row,
    files,
    finish,
    given,
    last_round,
    of_store,
    progress,
    scratch,
    undisturbed,
)


def kills(number: int = 100, seed: int = 0, config: dict[str, Any] = CONFIG) -> list[Row]:
    """Runs that are killed at random moments and started again, until so many kills are done."""
    rng = np.random.default_rng(seed)
    done = runs = unrestorable = different = most = early = 0
    with scratch() as place:
        wanted, wanted_files, call = undisturbed(place / "undisturbed", config)
        while done < number:
            directory, runs, seen = place / f"run{runs}", runs + 1, 0
            while True:
                process = Process(directory, config)
                # One in ten is killed before its first call: while it reads, builds and compiles.
                first = rng.random() < 0.1
                if done < number and (first or process.until("call")):
                    time.sleep(rng.uniform(0, 1.0 if first else 5 * call))
                    process.kill()
                    ended = process.ended()
                    if ended.result is None:
                        done, early = done + 1, early + int(first)
                else:
                    ended = process.ended()
                progress(f"{done} kills, {runs} runs, round {last_round(directory)}")
                if ended.resumed is not None:
                    most = max(most, seen - ended.resumed)
                if ended.error or "damaged" in ended.said:
                    unrestorable += 1
                    print(ended.error or ended.said)
                    break
                if ended.result:
                    same = ended.result == wanted and files(directory) == wanted_files
                    different += not same
                    break
                seen = last_round(directory)
    note = f"{runs} runs, {early} before the first call; most lost: {most / EVERY:g} evaluations"
    bad = unrestorable + different + (most > EVERY)
    return [
        Row(f"SIGKILL{of_store(config)}", done, done - bad, bad, f"{note}; {different} runs differ")
    ]


if __name__ == "__main__":
    finish(kills(*given(__doc__, kills=100)))
