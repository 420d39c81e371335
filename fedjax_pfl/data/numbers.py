"""Moments in double precision, and casts that keep different values different."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError

CHUNK_BYTES = 1 << 26  # size of the chunks when large arrays are read


def row_chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields an array in chunks of rows; the array may be mapped from a file and exceed memory."""
    if not array.ndim or not array.size:
        yield array
        return
    step = rows_per_chunk(array)
    yield from (array[start : start + step] for start in range(0, len(array), step))


def rows_per_chunk(array: np.ndarray) -> int:
    """Returns the number of rows of `array` (along axis 0) that fill CHUNK_BYTES, at least 1."""
    return max(1, CHUNK_BYTES * len(array) // max(1, array.nbytes))


def rows_by_id(ids: np.ndarray, n: int) -> list[np.ndarray]:
    """Returns for each id from 0 to n - 1 an array of its positions in `ids`, ascending."""
    order = np.argsort(ids, kind="stable")
    ends = np.searchsorted(ids[order], np.arange(n + 1))
    return [order[start:end] for start, end in itertools.pairwise(ends)]


def moments(values: np.ndarray, rows: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard deviation over all axes except the last, both float64 [features].

    `rows` are the indices of the examples of `values` [examples, ..., features] to use; None: all.
    A deviation that is only rounding error is set to 0.
    """
    step = rows_per_chunk(values)

    def parts() -> Iterator[np.ndarray]:
        for start in range(0, len(values) if rows is None else len(rows), step):
            end = start + step
            part = values[start:end] if rows is None else values[rows[start:end]]
            yield part.reshape(-1, values.shape[-1]).astype(np.float64)

    number, total = 0, np.zeros(values.shape[-1])
    for part in parts():
        number, total = number + len(part), total + part.sum(0)
    mean = total / number
    squares = sum(np.square(part - mean).sum(0) for part in parts())
    deviation = np.sqrt(squares / number)
    return mean, np.where(deviation > 1e-12 * np.abs(mean), deviation, 0.0)


def as_float(name: str, values: np.ndarray, dtype: Any, hint: str = "") -> np.ndarray:
    """Casts numbers to a float `dtype`; raises UsageError if rounding would merge different values.

    The message names the array by `name` and ends with `hint`. `values` has shape [examples] or
    [examples, ..., features].
    """
    result = values.astype(dtype, copy=False)
    if values.dtype.itemsize < result.dtype.itemsize or values.dtype == result.dtype:
        return result
    columns = values[:, None] if values.ndim == 1 else values
    mean, deviation = moments(columns)
    rounding = np.finfo(dtype).eps * np.abs(mean) + np.finfo(dtype).tiny
    for i in np.flatnonzero(rounding > 0.01 * deviation):
        different = len(np.unique(columns[..., i]))
        rounded = len(np.unique(columns[..., i].astype(dtype)))
        if rounded < different:
            bits = 8 * result.dtype.itemsize
            raise UsageError(
                f"{name} has {different:,} different values around {mean[i]:.10g}; {bits} bits "
                f"distinguish only {rounded:,}: subtract an offset, use another unit{hint}"
            )
    return result
