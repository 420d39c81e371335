"""Damaged datasets.

Damages a prepared tfds folder. Loading must return the data as written, or fail with one line that
names the damaged folder and says what to do.
"""

from collections import Counter
from pathlib import Path

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import load
from tests.data.folders import write
from tests.stress.common import Row, copy, digest, one_line, progress, scratch
from tests.stress.rot import KINDS, damage


def folder(place: Path) -> Path:
    """Writes a small dataset named mnist."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 6, 5, 1)).astype(np.uint8)
    columns = {"image": images, "label": np.arange(40) % 10}
    write(place, "mnist", {"train": columns, "test": columns})
    return place


def data(number: int = 100, seed: int = 0) -> list[Row]:
    """Runs `number` faults, each on a fresh copy."""
    rng = np.random.default_rng(seed)
    tried: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    refused = 0
    with scratch() as scratch_folder:
        intact = folder(scratch_folder / "good")
        expected = digest(*read(intact))
        for count in range(number):
            damaged, kind = copy(intact, scratch_folder / "damaged"), KINDS[rng.integers(6)]
            files = sorted(p for p in damaged.rglob("*") if p.is_file())
            damage(kind, files[rng.integers(len(files))], rng)
            tried[kind] += 1
            try:
                correct = digest(*read(damaged)) == expected
                line = "other data were read"
            except UsageError as error:
                line = str(error)
                correct = one_line(line) and ": " in line
                refused += correct
            except Exception as error:
                correct, line = False, repr(error)
            if not correct:
                lost[kind] += 1
                print(f"{kind}: {line}")
            progress(f"{count + 1} faults")
    note = f"{refused} refused, {number - refused - lost.total()} harmless"
    return [Row("dataset damaged", number, number - lost.total(), lost.total(), note)]


def read(place: Path) -> list[np.ndarray]:
    """Returns the training and test examples."""
    return [np.asarray(part) for part in load("mnist", place)[1:5]]
