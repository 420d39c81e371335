"""The input of partitions, and the checks that partitions share."""

from typing import NamedTuple

import numpy as np

from fedjax_pfl.core.errors import UsageError, require

Counts = np.ndarray  # int [N, C]: number of examples of each class that each client gets


class Pool(NamedTuple):
    """Number of examples of each class, and the clients to divide them among."""

    available: np.ndarray  # int [C]: examples of each class
    clients: int  # number of clients N
    coarse: np.ndarray | None = None  # int [C]: the superclass of each class; None if unknown
    held_out: int = 0  # number of novel clients, the last ones; they do not train

    @property
    def classes(self) -> int:
        """Returns the number of classes C."""
        return len(self.available)

    @property
    def total(self) -> int:
        """Returns the number of examples of all classes."""
        return int(self.available.sum())


def require_between(name: str, value: int, low: int, high: int, high_means: str) -> None:
    """Raises UsageError unless `low <= value <= high`; the message says what `high` means."""
    require(low <= value <= high, f"{name}={value} must lie between {low} and {high}, {high_means}")


def check_class_lists(name: str, lists: object, classes: int) -> list[tuple[int, ...]]:
    """Returns `lists`, the value of setting `name`, as a list of tuples of distinct classes.

    Raises UsageError for any other value and for a class that is not from 0 to classes - 1.
    """
    example = f"{name}=((0, 1), (2, 3))"
    if not isinstance(lists, list | tuple) or not lists:
        raise UsageError(f"{name} is {lists!r}; list the classes of each, as in {example}")

    def is_valid(item: object) -> bool:
        if not isinstance(item, list | tuple) or not item or {type(c) for c in item} != {int}:
            return False
        return len(set(item)) == len(item) and set(item) <= set(range(classes))

    for item in lists:
        require(
            is_valid(item),
            f"{name} has {item!r}; each item must list distinct classes from 0 to {classes - 1}, "
            f"as in {example}",
        )
    return [tuple(item) for item in lists]


def client_size(pool: Pool, examples: int | None) -> int:
    """Returns the number of examples of a client: `examples`, or an equal share of all if None.

    Raises UsageError if the pool has too few examples.
    """
    most = pool.total // pool.clients
    size = most if examples is None else examples
    require(most > 0, f"{pool.clients} clients for {pool.total:,} examples: use fewer clients")
    require(
        1 <= size <= most,
        f"{pool.clients} clients x {size} examples do not fit into the {pool.total:,} available: "
        f"the largest `examples` is {most}",
    )
    return size


def superclasses(pool: Pool, name: str) -> np.ndarray:
    """Returns the superclass of each class, int [C].

    Raises UsageError, which names the partition `name`, if they are unknown.
    """
    if pool.coarse is None:
        raise UsageError(
            f"partition {name} needs superclasses, which this dataset does not have: use cifar100, "
            "or give `coarse` to `arrays`"
        )
    return pool.coarse
