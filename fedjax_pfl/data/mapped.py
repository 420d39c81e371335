"""Examples in NumPy files, mapped into memory: of them, what a cohort needs is read."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data.dataset import DataDir, Dataset, Keep, arrays, kept
from fedjax_pfl.data.tables import existing


def is_mapped(array: Any) -> bool:
    """Whether an array's numbers are in a file."""
    while array is not None and not isinstance(array, np.memmap | mmap.mmap):
        array = getattr(array, "base", None)
    return array is not None


def npy(data_dir: DataDir, keep: Keep, path: str) -> Dataset:
    """Arrays x.npy, y.npy and, if examples have owners, owner.npy in npy:FOLDER, as for `arrays`.

    They stay in their files, so that there may be more than memory holds.
    """
    del data_dir
    folder, name = existing("npy", path), f"npy:{path}"

    def read(part: str) -> np.ndarray:
        file = folder / f"{part}.npy"
        try:
            return np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            line = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
            raise UsageError(f"{name}: {file.name} cannot be read ({line})") from None

    owners = read("owner") if Path(folder, "owner.npy").exists() else None
    return kept(arrays(read("x"), read("y"), owners=owners, name=name), keep)
