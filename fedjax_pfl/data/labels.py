"""Conversion of label columns; values that a cast would change are errors."""

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data.tables import Table

MOST_CLASSES = 10_000_000
_DISTINCT_LIMIT = 100  # a label column with more distinct integers may hold measurements
_MISSING = ("?", "na", "n/a", "nan", "null")  # in lower case
_INTEGER = re.compile(r"[+-]?\d+")


def class_numbers(name: str, labels: Any, *, least: int = 0, end: int = MOST_CLASSES) -> np.ndarray:
    """Returns class labels, an array of numbers or text, as int32 of the same shape.

    Raises UsageError if one is not an integer from `least` to end - 1. `name` is that of their
    file, for messages.
    """
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
            f"{name}: label {value!r} in example {int(place[0])} is not an integer from "
            f"{least} to {end - 1:,}; number the classes in this range"
        )
    return values.astype(np.int32)


def check_present(name: str, label: str, part: np.ndarray) -> None:
    """Raises UsageError for a label, of text, that stands for a missing value.

    `part` has the column `label` of the file `name`.
    """
    for text in np.unique(part) if part.dtype.kind == "U" else ():
        if text.lower() in _MISSING:
            rows = np.flatnonzero(part == text)
            raise UsageError(
                f"{name}: column {label!r} has {str(text)!r} in {len(rows)} rows, the first is row "
                f"{rows[0] + 1}, as if it were missing; remove these rows, or spell the class out"
            )


def number_classes(
    name: str, label: str, setting: str, kind: str, y: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    """Numbers the distinct labels of `y` [rows] from 0, in ascending order.

    Returns class numbers, int32 [rows], and the label of each number as text.
    With the `kind` auto, raises UsageError if integers have too many values for classes.
    `label` is the name of the column, and `setting` the name of the setting for the kind.
    """
    classes, numbers = np.unique(y, return_inverse=True)
    is_large = len(classes) > max(_DISTINCT_LIMIT, len(y) // 100)
    if y.dtype.kind in "iu" and kind == "auto" and is_large:
        raise UsageError(
            f"{name}: column {label!r} has {len(classes):,} different integers: set "
            f"{setting}=number to predict them as measurements, or class"
        )
    return numbers.astype(np.int32), [str(c) for c in classes]


def are_measurements(
    tables: Sequence[Table], parts: Sequence[np.ndarray], label: str, setting: str, kind: str
) -> bool:
    """Returns True if labels are real targets of a regression, False if they are classes.

    `parts` has the column `label` of the tables, for training and perhaps for testing. The `kind`,
    the value of `setting`, is auto, class or number.
    Raises UsageError if the files are ambiguous, or write one number in two ways.
    """
    auto, first = kind == "auto" and not tables[0].classes.get(label), parts[0]
    if kind == "number" or first.ndim > 1:
        return kind == "number" or (auto and first.dtype.kind == "f")
    if auto and first.dtype.kind == "f" and np.any(first != np.trunc(first)):
        return True
    cells = [(t.name, np.unique(t.spellings(label)).tolist()) for t in tables]
    spelling = dict[Decimal, str]()
    for name, spellings in cells:
        for cell in spellings:
            number = _number(cell)
            if number is not None and spelling.setdefault(number, cell) != cell:
                raise UsageError(
                    f"{name}: column {label!r} has the labels {spelling[number]!r} and {cell!r}, "
                    "which are the same number; write it equally in all files"
                )
    if not auto or all(part.dtype.kind != "f" for part in parts):
        return False
    distinct = [cell for _, spellings in cells for cell in spellings]
    if not (integers := [cell for cell in distinct if _INTEGER.fullmatch(cell)]):
        return True
    for name, spellings in cells:
        for cell in spellings:
            if not _INTEGER.fullmatch(cell):
                raise UsageError(
                    f"{name}: column {label!r} has {cell!r} and integers such as "
                    f"{integers[0]!r}: set {setting}=number to predict measurements, or class"
                )
    largest = max(integers, key=lambda cell: abs(int(cell)))
    raise UsageError(
        f"{cells[0][0]}: column {label!r} has the integer {largest}, which takes "
        f"more than 64 bits: write classes as text, or set {setting}=number to predict measurements"
    )


def _number(cell: str) -> Decimal | None:
    """Returns the exact number that a cell holds, or None if it holds no finite number."""
    try:
        number = Decimal(cell)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
