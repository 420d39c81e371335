"""Examples in NumPy files mapped into memory; only the rows that a cohort needs are read."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError, first_line
from fedjax_pfl.data.dataset import Dataset, arrays
from fedjax_pfl.data.tables import find_path


def is_mapped(array: Any) -> bool:
    """Returns True if an array is mapped from a file."""
    while array is not None and not isinstance(array, np.memmap | mmap.mmap):
        array = getattr(array, "base", None)
    return array is not None


def npy(path: str) -> Dataset:
    """Arrays x.npy, y.npy and optionally owner.npy in npy:FOLDER, as for `arrays`.

    A test set is read from x_test.npy, y_test.npy and owner_test.npy, if there are such files.
    Without a test set, arrays stay in their files and may exceed memory; with one, they are copied.
    The number of outputs, such as classes, is read from outputs.npy, if there is one.
    """
    folder, name = find_path("npy", path), f"npy:{path}"

    def read(array: str) -> np.ndarray:
        file = folder / f"{array}.npy"
        try:
            return np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            line = error.strerror if isinstance(error, OSError) else first_line(error)
            raise UsageError(f"{name}: {file.name} cannot be read ({line})") from None

    def read_optional(array: str) -> np.ndarray | None:
        return read(array) if Path(folder, f"{array}.npy").exists() else None

    outputs = read_optional("outputs")
    if outputs is not None and (outputs.size != 1 or outputs.dtype.kind not in "iu"):
        kind = f"{outputs.dtype} {list(outputs.shape)}"
        raise UsageError(f"{name}: outputs.npy has {kind}; use one integer")
    return arrays(
        read("x"),
        read("y"),
        read_optional("x_test"),
        read_optional("y_test"),
        outputs=None if outputs is None else int(outputs.item()),
        owners=read_optional("owner"),
        owners_test=read_optional("owner_test"),
        name=name,
    )
