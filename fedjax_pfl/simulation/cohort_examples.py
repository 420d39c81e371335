"""Examples of a cohort, for programs that do not have all examples on the device."""

from typing import Any

import numpy as np

from fedjax_pfl.core import trees
from fedjax_pfl.core.examples import FederatedData, Split


def cohort_data(
    data: FederatedData, ids: np.ndarray, capacity: int, *, test: bool
) -> FederatedData:
    """Returns the examples of K clients as a federation of these clients, in NumPy arrays.

    Args:
      data: Examples of all clients.
      ids: Client ids [K]; client k of the result is client ids[k].
      capacity: Length of `x` and `y` of the result, at least `max_examples`. Unused rows are zero.
      test: Whether to include test examples. Otherwise the test splits are empty.
    """
    none = Split(np.zeros((len(data.train.size), 1), np.int32), np.zeros_like(data.train.size))
    splits = [data.train, data.validation, data.test if test else none]
    tables = [Split(np.asarray(s.rows)[ids], np.asarray(s.size)[ids]) for s in splits]
    masks = [np.arange(rows.shape[1]) < size[:, None] for rows, size in tables]
    used = np.unique(np.concatenate([t.rows[mask] for t, mask in zip(tables, masks, strict=True)]))

    def take(examples: Any) -> np.ndarray:
        """Returns the used rows of an array of all examples, [capacity, ...]."""
        taken = np.zeros((capacity, *examples.shape[1:]), examples.dtype)
        taken[: len(used)] = examples[used]
        return taken

    train, validation, test_split = (
        Split(np.where(mask, np.searchsorted(used, t.rows), 0).astype(np.int32), t.size)
        for t, mask in zip(tables, masks, strict=True)
    )
    label_map, classes = trees.row((data.label_map, data.classes), ids)
    return FederatedData(
        x=take(data.x),
        y=take(data.y),
        train=train,
        validation=validation,
        test=test_split,
        scale=data.scale,
        shift=data.shift,
        label_map=label_map,
        classes=classes,
    )


def max_examples(data: FederatedData, clients: int, *, test: bool) -> int:
    """Returns the largest number of examples that any K clients have together, at least 1.

    Args:
      data: Examples of all clients.
      clients: K, the number of clients.
      test: Whether to count test examples, besides those for training and validation.
    """
    splits = (data.train, data.validation, data.test) if test else (data.train, data.validation)
    counts = np.sum([np.asarray(split.size, np.int64) for split in splits], 0)
    largest = int(np.sort(counts)[-clients:].sum())
    return max(1, min(largest, len(data.y)))
