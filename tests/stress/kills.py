"""SIGKILL at random moments of rounds and saves.

Every run must be resumable, lose at most one evaluation interval, and end with the result of an
undisturbed run, bit for bit.
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
    last_round,
    progress,
    scratch,
    store_suffix,
    undisturbed,
)


def kills(number: int = 100, seed: int = 0, config: dict[str, Any] = CONFIG) -> list[Row]:
    """Kills and resumes runs until `number` kills are done."""
    rng = np.random.default_rng(seed)
    done = runs = unrestorable = different = most_lost = early = 0
    with scratch() as folder:
        expected, expected_files, call = undisturbed(folder / "undisturbed", config)
        while done < number:
            directory, runs, saved = folder / f"run{runs}", runs + 1, 0
            while True:
                process = Process(directory, config)
                # A tenth is killed before the first call: while it reads, builds and compiles.
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
                    most_lost = max(most_lost, saved - ended.resumed)
                if ended.error or "damaged" in ended.stderr:
                    unrestorable += 1
                    print(ended.error or ended.stderr)
                    break
                if ended.result:
                    equal = ended.result == expected and files(directory) == expected_files
                    different += not equal
                    break
                saved = last_round(directory)
    note = (
        f"{runs} runs, {early} before the first call; most lost: {most_lost / EVERY:g} evaluations"
    )
    bad = unrestorable + different + (most_lost > EVERY)
    return [
        Row(
            f"SIGKILL{store_suffix(config)}",
            done,
            done - bad,
            bad,
            f"{note}; {different} runs differ",
        )
    ]
