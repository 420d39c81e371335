"""Damaged datasets: python -m tests.stress.data --faults=100

A prepared tfds folder is damaged at random as checkpoints are in `rot`. What is read has to be what
was written, or one line has to say that the folder is damaged and what to do.
"""

import argparse
from collections import Counter
from pathlib import Path

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import load
from tests.data.folders import write
from tests.stress.common import Row, copied, digest, finish, one_line, progress, scratch
from tests.stress.rot import KINDS, damage


def folder(place: Path) -> Path:
    """A small dataset of the name mnist."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 6, 5, 1)).astype(np.uint8)
    columns = {"image": images, "label": np.arange(40) % 10}
    write(place, "mnist", {"train": columns, "test": columns})
    return place


def data(number: int = 100, seed: int = 0) -> list[Row]:
    """So many faults, each to a fresh copy."""
    rng = np.random.default_rng(seed)
    tried: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    refused = 0
    with scratch() as place:
        good = folder(place / "good")
        wanted = digest(*read(good))
        for count in range(number):
            there, kind = copied(good, place / "there"), KINDS[rng.integers(6)]
            files = sorted(p for p in there.rglob("*") if p.is_file())
            damage(kind, files[rng.integers(len(files))], rng)
            tried[kind] += 1
            try:
                fine = digest(*read(there)) == wanted
                line = "other data were read"
            except UsageError as error:
                line = str(error)
                fine = one_line(line) and ": " in line
                refused += fine
            except Exception as error:
                fine, line = False, repr(error)
            if not fine:
                lost[kind] += 1
                print(f"{kind}: {line}")
            progress(f"{count + 1} faults")
    note = f"{refused} refused, {number - refused - lost.total()} harmless"
    return [Row("dataset damaged", number, number - lost.total(), lost.total(), note)]


def read(place: Path) -> list[np.ndarray]:
    """All that training would see."""
    found = load("mnist", place)
    return [np.asarray(part) for part in found[1:5]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    finish(data(given.faults, given.seed))
