"""Reads pickles of plain values: dicts, lists, text, numbers and NumPy arrays, and nothing else.

A pickle can name any function, which reading it then calls. Here all names are refused but those
that NumPy writes for its arrays and numbers. These call the constructors below, not NumPy's, which
also take addresses and fields outside an array's memory.
"""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError, first_line

_ARRAY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
_BUFFER_MODULES = ("numpy.core.numeric", "numpy._core.numeric")  # protocol 5
_ERRORS = (
    pickle.UnpicklingError,
    *(EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(MemoryError, OverflowError, RecursionError, OSError),
)


class _Value:
    """A value that a pickle constructs. `plain` replaces it by `value` when all is read."""

    value: Any = None

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it sets a state, which only arrays and dtypes have")


class _DType(_Value):
    """A dtype of numbers, booleans, text, bytes or objects, without fields."""

    def __init__(self, name: str, align: bool = False, copy: bool = True) -> None:
        self.value = np.dtype(name)
        if self.value.kind not in "biufcSUO":
            raise pickle.UnpicklingError(f"it has an array of the dtype {name!r:.20}")

    def __setstate__(self, state: Any) -> None:
        byte_order, *fields = state[1:5]
        if any(field is not None for field in fields):
            raise pickle.UnpicklingError("it has a dtype with fields")
        self.value = self.value.newbyteorder(byte_order)


class _Array(_Value):
    """An array, which `__setstate__` fills."""

    def __init__(self, *_: Any) -> None:
        """Takes the arguments of NumPy's `_reconstruct`, which all arrays have in common."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, content = state
        if dtype.value.kind == "O":  # a list of plain values
            self.value = np.empty(len(content), object)
            for k, element in enumerate(content):
                self.value[k] = plain(element)
        else:
            self.value = np.frombuffer(_to_bytes(content), dtype.value)
        self.value = self.value.reshape(shape, order="F" if is_fortran else "C")


class _Buffer(_Value):
    """An array of protocol 5."""

    def __init__(self, content: Any, dtype: _DType, shape: Any, order: Any) -> None:
        self.value = np.frombuffer(content, dtype.value).reshape(shape, order=order)


class _Scalar(_Value):
    """A NumPy number."""

    def __init__(self, dtype: _DType, content: Any) -> None:
        (self.value,) = np.frombuffer(_to_bytes(content), dtype.value)


class _Bytes(_Value):
    """Bytes of protocol 2, which are text in the encoding latin1."""

    def __init__(self, text: str = "", encoding: str = "latin1") -> None:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"it has bytes in the encoding {encoding!r:.20}")
        self.value = text.encode(encoding)


_CONSTRUCTORS = {
    ("numpy", "dtype"): _DType,
    ("numpy", "ndarray"): _Value,  # only an argument
    ("_codecs", "encode"): _Bytes,
    ("__builtin__", "bytes"): _Bytes,  # empty ones
    ("builtins", "bytes"): _Bytes,
    **{(module, "_reconstruct"): _Array for module in _ARRAY_MODULES},
    **{(module, "scalar"): _Scalar for module in _ARRAY_MODULES},
    **{(module, "_frombuffer"): _Buffer for module in _BUFFER_MODULES},
}


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler with safe constructors for the names that NumPy writes."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns the constructor for a name; raises UnpicklingError for all other names."""
        if (module, name) not in _CONSTRUCTORS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no plain value")
        return _CONSTRUCTORS[module, name]


def _to_bytes(content: Any) -> bytes:
    """Returns the bytes of an array; Python 2 wrote them as text in the encoding latin1."""
    content = plain(content)
    return content.encode("latin1") if isinstance(content, str) else content


def plain(value: Any) -> Any:
    """Returns a value with arrays and numbers instead of constructed records.

    Raises UnpicklingError for any other value.
    """
    if isinstance(value, _Value):
        if isinstance(value, _DType) or value.value is None:
            raise pickle.UnpicklingError("it has a dtype or an array without content")
        return value.value
    if isinstance(value, dict):
        return {plain(key): plain(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise pickle.UnpicklingError(f"it has a {type(value).__name__}, which is no plain value")


def loads(content: bytes) -> Any:
    """Returns the plain value of a pickle, or raises `pickle.UnpicklingError`."""
    try:
        return plain(_PlainUnpickler(io.BytesIO(content), encoding="latin1").load())
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
