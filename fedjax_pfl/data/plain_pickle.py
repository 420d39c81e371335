"""Reads pickles of plain values: dicts, lists, text, numbers and NumPy arrays, and nothing else.

A pickle can name any function, which reading it then calls. Here all names are refused but those
that NumPy writes for its arrays and numbers, so nothing of the file is executed.
"""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy._core import multiarray, numeric

from fedjax_pfl.core.errors import UsageError, first_line

_ARRAY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
_BUFFER_MODULES = ("numpy.core.numeric", "numpy._core.numeric")  # protocol 5
_ERRORS = (
    pickle.UnpicklingError,
    *(EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(MemoryError, OverflowError, RecursionError, OSError),
)


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that resolves only the names that NumPy writes for arrays and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns the function or type that a pickle names; raises UnpicklingError if refused."""
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if module in _ARRAY_MODULES and name in ("_reconstruct", "scalar"):
            return getattr(multiarray, name)
        if module in _BUFFER_MODULES and name == "_frombuffer":
            return numeric._frombuffer  # type: ignore[attr-defined]
        if (module, name) == ("_codecs", "encode"):  # bytes of protocol 2
            return _latin1
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no plain value")


def _latin1(text: str, encoding: str) -> bytes:
    """Encodes text like `_codecs.encode`; raises UnpicklingError unless `encoding` is latin1."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it has bytes in the encoding {encoding!r:.20}")
    return text.encode(encoding)


def loads(content: bytes) -> Any:
    """Returns the plain value of a pickle, or raises `pickle.UnpicklingError`."""
    try:
        return _PlainUnpickler(io.BytesIO(content), encoding="latin1").load()
    except _ERRORS as error:
        raise pickle.UnpicklingError(first_line(error) or type(error).__name__) from None


def load(path: Path) -> Any:
    """Returns the plain value of a pickle file, or raises UsageError."""
    try:
        return loads(path.read_bytes())
    except (OSError, pickle.UnpicklingError) as error:
        raise _refusal(path, error) from None


def load_npz(path: Path, name: str) -> Any:
    """Returns the plain value, such as a dict, that an .npz file holds as an array of objects.

    Raises UsageError if the file cannot be read.

    Args:
      path: The file, as written by `numpy.savez(path, NAME=value)`.
      name: Name of the array.
    """
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
            version = np.lib.format.read_magic(file)
            reader = {(1, 0): np.lib.format.read_array_header_1_0}.get(
                version, np.lib.format.read_array_header_2_0
            )
            shape, _, dtype = reader(file)
            if shape != () or not dtype.hasobject:
                raise ValueError(f"{name} is an array {list(shape)} of {dtype}, not one object")
            return loads(file.read()).item()
    except (*_ERRORS, zipfile.BadZipFile) as error:
        raise _refusal(path, error) from None


def _refusal(path: Path, error: Exception) -> UsageError:
    """Returns (not raises) the UsageError that `path` cannot be read because of `error`."""
    line = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    return UsageError(f"{path} cannot be read: {line}")
