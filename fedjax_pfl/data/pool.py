"""What is to be partitioned, and the checks that partitions share."""

from typing import NamedTuple

import numpy as np

from fedjax_pfl.core.errors import UsageError


class Pool(NamedTuple):
    """What there is to be partitioned."""

    available: np.ndarray  # int [C]: examples of each class
    clients: int
    coarse: np.ndarray | None = None  # int [C]: the superclass of each class
    held_out: int = 0  # the last so many clients are novel: they take no part in training

    @property
    def classes(self) -> int:
        return len(self.available)

    @property
    def total(self) -> int:
        return int(self.available.sum())


def need(condition: bool, message: str) -> None:
    """Raise the message as the user's error unless the condition holds."""
    if not condition:
        raise UsageError(message)


def between(name: str, value: int, low: int, high: int, of: str) -> None:
    """Check a whole-numbered setting; `of` says what its upper limit is."""
    need(low <= value <= high, f"{name}={value} must lie between {low} and {high}, {of}")


def class_lists(name: str, lists: object, classes: int) -> list[tuple[int, ...]]:
    """Lists of classes as tuples, or an error that shows what one looks like."""
    example = f"{name}=((0, 1), (2, 3))"
    if not isinstance(lists, list | tuple) or not lists:
        raise UsageError(f"{name} is {lists!r}; list the classes of each, as in {example}")

    def fits(one: object) -> bool:
        if not isinstance(one, list | tuple) or not one or {type(c) for c in one} != {int}:
            return False
        return len(set(one)) == len(one) and set(one) <= set(range(classes))

    for one in lists:
        need(
            fits(one),
            f"{name} has {one!r}, and each must be some of the classes 0 to {classes - 1}, once; "
            f"as in {example}",
        )
    return [tuple(one) for one in lists]


def client_size(pool: Pool, examples: int | None) -> int:
    """Examples per client: as asked for, or as many as there are for everybody."""
    most = pool.total // pool.clients
    size = most if examples is None else examples
    need(most > 0, f"{pool.clients} clients for {pool.total:,} examples: use fewer clients")
    need(
        1 <= size <= most,
        f"{pool.clients} clients x {size} examples do not fit into the {pool.total:,} available: "
        f"the largest `examples` is {most}",
    )
    return size


def superclasses(pool: Pool, name: str) -> np.ndarray:
    """int [C], or an error that names the partition."""
    if pool.coarse is None:
        raise UsageError(
            f"partition {name} needs superclasses, which this dataset has not: use cifar100, "
            "or give `coarse` to `arrays`"
        )
    return pool.coarse
