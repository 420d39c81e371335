"""Labels of files, checked before any cast, so that no value changes silently."""

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data.tables import Table

MOST_CLASSES = 10_000_000
_DISTINCT_LIMIT = (
    100  # distinct whole numbers; a label column with more of them may hold measurements
)
_INTEGER = re.compile(r"[+-]?\d+")


def class_numbers(name: str, labels: Any, *, least: int = 0, end: int = MOST_CLASSES) -> np.ndarray:
    """Returns labels as int32, or raises UsageError for the first that is not least..end-1."""
    values = np.asarray(labels)
    if values.dtype.kind in "biuf":
        valid = (values >= least) & (values < end)
        valid &= values == np.trunc(values) if values.dtype.kind == "f" else True
    else:
        numbers = [_number(str(value)) for value in values.flat]
        valid = np.array([n is not None and n == int(n) and least <= n < end for n in numbers])
        valid = valid.reshape(values.shape)
    if not valid.all():
        place = np.unravel_index(int(np.argmin(valid)), valid.shape)
        value = values[place]
        value = value.item() if isinstance(value, np.generic) else value
        raise UsageError(
            f"{name}: label {value!r} in example {int(place[0])} is not a whole number from "
            f"{least} to {end - 1:,}; number the classes so"
        )
    return values.astype(np.int32)


def numbered(
    name: str, label: str, setting: str, kind: str, y: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    """Returns labels numbered from 0, int32, and the names of the classes."""
    classes, numbers = np.unique(y, return_inverse=True)
    is_large = len(classes) > max(_DISTINCT_LIMIT, len(y) // 100)
    if y.dtype.kind in "iu" and kind == "auto" and is_large:
        raise UsageError(
            f"{name}: column {label!r} has {len(classes):,} different whole numbers: say "
            f"{setting}=number to predict them as measurements, or class"
        )
    return numbers.astype(np.int32), [str(c) for c in classes]


def are_measurements(
    tables: Sequence[Table], parts: Sequence[np.ndarray], label: str, setting: str, kind: str
) -> bool:
    """Returns False if labels are classes; raises UsageError if the files leave that open.

    Args:
      tables: The file for training and, if there is one, the file for testing.
      parts: Their label columns.
      label: Name of the column.
      setting: Name of the setting that decides, for messages.
      kind: Its value: `auto`, `class` or `number`.
    """
    auto, first = kind == "auto" and not tables[0].classes.get(label), parts[0]
    if kind == "number" or first.ndim > 1:
        return kind == "number" or (auto and first.dtype.kind == "f")
    if auto and first.dtype.kind == "f" and np.any(first != np.trunc(first)):
        return True
    cells = [(t.name, np.unique(t.spelled(label)).tolist()) for t in tables]
    spelling = dict[Decimal, str]()
    for name, spellings in cells:
        for cell in spellings:
            number = _number(cell)
            if number is not None and spelling.setdefault(number, cell) != cell:
                raise UsageError(
                    f"{name}: column {label!r} has the labels {spelling[number]!r} and {cell!r}, "
                    "which are one number; spell it alike in all files"
                )
    if not auto or all(part.dtype.kind != "f" for part in parts):
        return False
    if not (integers := [cell for _, some in cells for cell in some if _INTEGER.fullmatch(cell)]):
        return True
    for name, spellings in cells:
        for cell in spellings:
            if not _INTEGER.fullmatch(cell):
                raise UsageError(
                    f"{name}: column {label!r} has {cell!r}, and whole numbers such as "
                    f"{integers[0]!r} besides: say {setting}=number to predict measurements, or "
                    "class"
                )
    raise UsageError(
        f"{cells[0][0]}: column {label!r} has the whole number {max(integers, key=_size)}, which "
        f"takes more than 64 bits: write classes as text, or say {setting}=number to predict "
        "measurements"
    )


def _size(cell: str) -> int:
    return abs(int(cell))


def _number(cell: str) -> Decimal | None:
    try:
        number = Decimal(cell)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
