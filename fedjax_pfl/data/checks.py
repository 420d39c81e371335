"""Checks of examples before anything is compiled; messages say where the first bad value is."""

import contextlib
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, Split
from fedjax_pfl.data.numbers import rows_per_chunk

_X_TYPES, _Y_TYPES = ("uint8", "int32", "float32"), ("int32", "float32", "bool")


class Problem(NamedTuple):
    """The first invalid value of an array, as parts of a message."""

    example: int  # index along the first axis
    message: str  # what is wrong, such as "x has 3 values that are not finite, the first"
    place: str  # ", column 2" or ", at [0, 5]" within the example; "" for labels [examples]
    hint: str  # "; " and what to do about it, or ""


def find_problem(x: np.ndarray, y: np.ndarray, outputs: int) -> Problem | None:
    """Returns the first NaN or infinite value or invalid label, or None if all values are valid.

    Integer labels `y` must be 0 to outputs - 1. Those of shape [examples, positions] may also be
    -1, which means no label. `x` has shape [examples, ...].
    """
    for field, values in (("x", x), ("y", y)):
        number, index = _find_nonfinite(values)
        if number:
            message = f"{field} has {number} values that are not finite, the first"
            hint = "; remove or replace them"
            return Problem(example=index[0], message=message, place=_place(index), hint=hint)
    if y.dtype.kind not in "iu":
        return None
    lowest = 0 if y.ndim == 1 else -1
    invalid = np.asarray((y < lowest) | (y >= outputs))
    if not invalid.any():
        return None
    index = _first_true(invalid)
    missing = " or -1 (no label)" if y.ndim > 1 else ""
    message = (
        f"{invalid.sum()} labels are not classes from 0 to {outputs - 1}{missing}, the first is "
        f"{y[index]}"
    )
    return Problem(example=index[0], message=message, place=_place(index), hint="")


def require_one_kind(name: str, x: np.ndarray, x_test: np.ndarray) -> None:
    """Raises UsageError unless both inputs are uint8, other integers or real numbers."""
    kinds = {(inputs.dtype == np.uint8, inputs.dtype.kind == "f") for inputs in (x, x_test)}
    if len(kinds) > 1:
        raise UsageError(
            f"{name}: x is {x.dtype} and x_test {x_test.dtype}; give both as uint8, which is "
            "scaled to [0, 1], both as other integers, or both as real numbers"
        )


def constant(name: str, argument: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a scale or shift as float32, or raises UsageError if it fits no example of `shape`.

    `name` (of the dataset) and `argument` are for messages.
    """
    with contextlib.suppress(TypeError, ValueError):
        array = np.asarray(value, np.float32)
        batch = (1, *shape)  # a mean of images often has an axis for the batch
        if np.isfinite(array).all() and np.broadcast_shapes(array.shape, batch) == batch:
            return array.reshape(array.shape[-len(shape) :])
    raise UsageError(
        f"{name}: {argument} is {value!s:.60}; use a finite number, or an array of them with "
        f"the shape of an example, {list(shape)}, or of its last axes"
    )


def _find_nonfinite(values: np.ndarray) -> tuple[int, tuple[int, ...]]:
    """Returns the number of NaN and infinite values, and the index of the first, or () if none."""
    number, first = 0, tuple[int, ...]()
    step = rows_per_chunk(values)
    for start in range(0, len(values), step) if values.dtype.kind == "f" else ():
        invalid = ~np.isfinite(values[start : start + step])
        if invalid.any():
            row, *inner = _first_true(invalid)
            first = first or (start + row, *inner)
            number += int(invalid.sum())
    return number, first


def _first_true(mask: np.ndarray) -> tuple[int, ...]:
    """Returns the index of the first True."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))


def _place(index: tuple[int, ...]) -> str:
    """Returns ", column 2" or ", at [0, 5]", the place in the example of an index of the array."""
    inner = index[1:]
    if len(inner) < 2:
        return f", column {inner[0]}" if inner else ""
    return f", at {list(inner)}"


def check_federated(
    name: str, data: FederatedData, federation: Federation, *, rounded: bool = True
) -> None:
    """Raises UsageError, naming client and field, for examples that cannot be used for training.

    Checks types, finite values and the range of labels, and that each client has a labelled
    training example. The message begins with the dataset's `name`. If not `rounded`, x and y may
    still be float64.
    """
    x, y = np.asarray(data.x), np.asarray(data.y)
    for field, values, dtypes in (("x", x, _X_TYPES), ("y", y, _Y_TYPES)):
        if values.dtype.name not in (*dtypes, *(() if rounded else ("float64",))):
            raise UsageError(f"{name}: {field} is {values.dtype}; it must be {', '.join(dtypes)}")
    labels = federation.outputs if data.label_map is None else data.label_map.shape[1]
    if problem := find_problem(x, y, labels):
        holder = describe_holder(data, federation, problem.example)
        raise UsageError(f"{name}: {holder}: {problem.message}{problem.place}{problem.hint}")
    if y.ndim > 1 and y.dtype.kind == "i":
        labelled = np.asarray((y >= 0).any(1))
        for i in range(federation.clients):
            rows = np.asarray(data.train.rows[i])[: int(data.train.size[i])]
            if not labelled[rows].any():
                raise UsageError(
                    f"{name}: client {_label(federation, i)}: y is -1, no label, in all of its "
                    f"{len(rows)} training examples; leave it out"
                )


def describe_holder(data: FederatedData, federation: Federation, row: int) -> str:
    """Returns, for a row of `data.x`, a phrase like "one of the training examples of client 3"."""
    splits = {"training": data.train, "validation": data.validation, "test": data.test}
    for name, split in splits.items():
        matches = (np.asarray(split.rows) == row) & row_mask(split)
        if matches.any():
            client = int(np.argmax(matches.any(1)))
            return f"one of the {name} examples of client {_label(federation, client)}"
    return f"example {row} of no client"  # memory-mapped arrays keep such examples


def row_mask(split: Split) -> np.ndarray:
    """Returns bool [N, longest] for `split.rows`: True for examples, False for padding."""
    return np.arange(np.shape(split.rows)[1]) < np.asarray(split.size)[:, None]


def _label(federation: Federation, client: int) -> str:
    """Returns the number of a client, and in brackets the name of its owner if it differs."""
    owner = federation.owners and federation.owners[client]
    return f"{client} ({owner})" if owner and owner != str(client) else f"{client}"
