"""Numbers in double precision: moments, and casts that lose no differences."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError

AT_ONCE = 1 << 26  # bytes of an array that are handled together


def in_parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields an array's rows, some at a time: the array may lie in a file and exceed memory."""
    if not array.ndim or not array.size:
        yield array
        return
    step = rows_at_once(array)
    for start in range(0, len(array), step):
        yield array[start : start + step]


def rows_at_once(array: np.ndarray) -> int:
    """Returns how many rows of an array to handle together."""
    return max(1, AT_ONCE * len(array) // max(1, array.nbytes))


def moments(values: np.ndarray, rows: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard deviation over all axes but the last, in float64.

    The deviation is 0 where it is no more than rounding.

    Args:
      values: Array of shape [examples, ..., features].
      rows: Which examples count; None: all.
    """
    step = rows_at_once(values)

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


def as_float(what: str, values: np.ndarray, dtype: Any, hint: str = "") -> np.ndarray:
    """Casts numbers, or raises UsageError if that merges values that lie far from 0.

    Args:
      what: Name of the numbers in messages.
      values: Array of shape [examples] or [examples, ..., features].
      dtype: np.float32 or np.float64.
      hint: A remedy, besides subtracting an offset.
    """
    result = values.astype(dtype, copy=False)
    if values.dtype.itemsize < result.dtype.itemsize or values.dtype == result.dtype:
        return result
    columns = values[:, None] if values.ndim == 1 else values
    mean, deviation = moments(columns)
    rounding = np.finfo(dtype).eps * np.abs(mean) + np.finfo(dtype).tiny
    for i in np.flatnonzero(rounding > 0.01 * deviation):
        before = len(np.unique(columns[..., i]))
        after = len(np.unique(columns[..., i].astype(dtype)))
        if after < before:
            bits = 8 * result.dtype.itemsize
            raise UsageError(
                f"{what} has {before:,} different values around {mean[i]:.10g}, and numbers of "
                f"{bits} bits tell {after:,} apart: subtract an offset, use another unit{hint}"
            )
    return result
