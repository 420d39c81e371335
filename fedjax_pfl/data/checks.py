"""What is wrong with examples, found before anything is compiled, and where it stands."""

from typing import NamedTuple

import numpy as np

from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, Split
from fedjax_pfl.data.numbers import rows_at_once

_INPUTS, _LABELS = ("uint8", "int32", "float32"), ("int32", "float32", "bool")


class Problem(NamedTuple):
    """The first of the values that cannot be, in words: what, where, and what to do."""

    example: int
    said: str
    place: str
    hint: str


def problem(x: np.ndarray, y: np.ndarray, outputs: int) -> Problem | None:
    """NaN or infinite values, and labels that are no classes; None where there are none.

    Labels [examples] are classes from 0 to `outputs` - 1; those of positions may be -1, for none.
    """
    for field, values in (("x", x), ("y", y)):
        number, first = _not_finite(values)
        if number:
            said = f"{field} has {number} values that are not finite, the first"
            return Problem(first[0], said, _column(first), "; remove or replace them")
    if y.dtype.kind not in "iu":
        return None
    least = 0 if y.ndim == 1 else -1
    wrong = np.asarray((y < least) | (y >= outputs))
    if not wrong.any():
        return None
    first = _first(wrong)
    none = ", nor -1, which is none" if y.ndim > 1 else ""
    said = f"{wrong.sum()} labels are not classes from 0 to {outputs - 1}{none}, the first is"
    return Problem(first[0], f"{said} {y[first]}", _column(first), "")


def _not_finite(values: np.ndarray) -> tuple[int, tuple[int, ...]]:
    """How many, and where the first is; some rows at a time, as they may be in a file."""
    number, first = 0, tuple[int, ...]()
    step = rows_at_once(values)
    for start in range(0, len(values), step) if values.dtype.kind == "f" else ():
        wrong = ~np.isfinite(values[start : start + step])
        if wrong.any():
            row, *inner = _first(wrong)
            first = first or (start + row, *inner)
            number += int(wrong.sum())
    return number, first


def _first(wrong: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))


def _column(place: tuple[int, ...]) -> str:
    """Behind the example: the column of a table, the place in an image."""
    inner = place[1:]
    if len(inner) < 2:
        return f", column {inner[0]}" if inner else ""
    return f", at {list(inner)}"


def check_federated(
    name: str, data: FederatedData, federation: Federation, *, rounded: bool = True
) -> None:
    """Raises UsageError, with the client and the field, for what no run can train or be scored on.

    Args:
      rounded: False: real numbers may still be float64.
    """
    x, y = np.asarray(data.x), np.asarray(data.y)
    for field, values, known in (("x", x, _INPUTS), ("y", y, _LABELS)):
        if values.dtype.name not in (*known, *(() if rounded else ("float64",))):
            raise UsageError(f"{name}: {field} is {values.dtype}; it must be {', '.join(known)}")
    labels = federation.outputs if data.label_map is None else data.label_map.shape[1]
    if found := problem(x, y, labels):
        whose = holder(data, federation, found.example)
        raise UsageError(f"{name}: {whose}: {found.said}{found.place}{found.hint}")
    if y.ndim > 1 and y.dtype.kind == "i":
        labelled = np.asarray((y >= 0).any(1))
        for i in range(federation.clients):
            own = np.asarray(data.train.rows[i])[: int(data.train.size[i])]
            if not labelled[own].any():
                raise UsageError(
                    f"{name}: client {_called(federation, i)}: y is -1, no label, in all of its "
                    f"{len(own)} training examples; leave it out"
                )


def holder(data: FederatedData, federation: Federation, row: int) -> str:
    """One of the examples of a client, in words."""
    parts: dict[str, Split] = {
        "training": data.train,
        "validation": data.validation,
        "test": data.test,
    }
    for part, split in parts.items():
        rows, size = np.asarray(split.rows), np.asarray(split.size)
        held = (rows == row) & (np.arange(rows.shape[1]) < size[:, None])
        if held.any():
            client = int(np.argmax(held.any(1)))
            return f"one of the {part} examples of client {_called(federation, client)}"
    raise ValueError(f"nobody holds example {row}")  # federate leaves such out


def _called(federation: Federation, client: int) -> str:
    """A client's number, and its name where it has another."""
    own = federation.owners and federation.owners[client]
    return f"{client} ({own})" if own and own != str(client) else f"{client}"
