"""Integer arithmetic of partitions: counts of examples that add up exactly."""

from collections.abc import Callable

import numpy as np

from fedjax_pfl.data.numbers import rows_by_id

Ints = np.ndarray  # an array of integers
_GOLDEN_RATIO = (5**0.5 - 1) / 2  # its multiples modulo 1 are spread evenly
_TINY = 1e-12  # keeps a class selectable if its Dirichlet weight has underflowed to zero


def assign_examples(labels: Ints, counts: Ints, rng: np.random.Generator) -> Ints:
    """Assigns labelled examples to clients at random, without replacement.

    `counts`, int [N, C], must have column sums of at most the number of examples of that class.
    Returns the client that holds each example, int32 [examples], -1 for an unused example.
    """
    client = np.full(len(labels), -1, np.int32)
    ids = np.arange(len(counts), dtype=np.int32)
    members = rows_by_id(labels, counts.shape[1])
    for c in np.flatnonzero(counts.sum(0)):
        rows = rng.permutation(members[c])
        client[rows[: counts[:, c].sum()]] = np.repeat(ids, counts[:, c])
    return client


def round_shares(shares: np.ndarray, totals: Ints) -> Ints:
    """Converts each client's fractions `shares` [N, C] of each class to numbers of examples.

    `totals` [C] has the number of examples of each class. Cumulative sums over clients are rounded.
    Each column of shares sums to at most 1. Returns int [N, C]; a column whose shares sum to 1 adds
    up to exactly its total.
    """
    bounds = np.rint(np.minimum(np.cumsum(shares, 0), 1.0) * totals).astype(np.int64)
    return np.diff(bounds, axis=0, prepend=0)


def scale_counts(counts: Ints, totals: Ints, new_totals: Ints) -> Ints:
    """Scales counts [N, C] from `totals` [C] to `new_totals` [C] in exact integer arithmetic.

    Totals are numbers of examples of each class, `counts` those on each client, which add up to at
    most `totals`. Cumulative sums over clients are rounded, each class with an offset of its own:
    otherwise the same clients would get one example less of every class.
    Returns int [N, C]; a column that adds up to its total adds up to its new total.
    """
    totals = np.maximum(totals, 1)
    offsets = (np.arange(len(totals)) * _GOLDEN_RATIO % 1 * totals).astype(np.int64)
    bounds = (np.cumsum(counts, 0, dtype=np.int64) * new_totals + offsets) // totals
    return np.diff(bounds, axis=0, prepend=0)


def largest_remainder(weights: np.ndarray, total: int) -> Ints:
    """Returns `total` split in proportion to `weights` [C] by largest remainders, int [C]."""
    exact = weights * (total / weights.sum())
    counts = np.floor(exact).astype(np.int64)
    missing = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts


def round_robin(totals: Ints, clients: int) -> Ints:
    """Gives the examples, sorted by class, singly to the clients in turn.

    `totals`, int [C], has the number of examples of each class, and `clients` is N.

    Returns counts, int [N, C]. Sizes of clients differ by at most one, and so do the counts of
    every class.
    """
    ends = np.concatenate([[0], np.cumsum(totals)])
    cumulative = (ends[None, :] - np.arange(clients)[:, None] + clients - 1) // clients
    return np.diff(cumulative, axis=1)


def can_pick(capacity: Ints, clients: int, picks: int) -> bool:
    """Returns True if each client can pick `picks` classes, no class above its `capacity` [C]."""
    return int(np.clip(capacity, 0, clients).sum()) >= clients * picks


def pick_classes(capacity: Ints, clients: int, picks: int, rng: np.random.Generator) -> np.ndarray:
    """Picks random distinct classes for each client, no class more often than its capacity.

    `capacity`, int [C], is the number of clients that may pick each class; `can_pick` must be True.
    Picks are uniform, except where that would leave too few classes for the clients that follow.
    Returns the classes of each client, int [N, picks].
    """
    left = np.array(capacity)
    classes = np.zeros((clients, picks), np.int64)
    for r in range(clients, 0, -1):
        order = rng.permutation(np.flatnonzero(left > 0))
        scarce = left[order] < r
        spare = int(np.minimum(left, r).sum()) - int((left >= r).sum()) - (r - 1) * picks
        allowed = ~scarce | (np.cumsum(scarce) <= spare)
        row = order[allowed][:picks]
        left[row] -= 1
        classes[r - 1] = row
    return classes[rng.permutation(clients)]


def pick_least_used(classes: int, clients: int, picks: int, rng: np.random.Generator) -> np.ndarray:
    """Picks `picks` of the classes for each client, always among those picked least so far.

    Returns int [N, picks] with distinct classes, from 0 to classes - 1, in each row. No class is
    picked more than once more often than another; `rng` breaks ties.
    """
    used = np.zeros(classes, np.int64)
    result = np.zeros((clients, picks), np.int64)
    for row in result:
        row[:] = np.lexsort((rng.random(classes), used))[:picks]  # by uses, ties at random
        used[row] += 1
    return result


def sample_counts(
    available: Ints,
    size: int,
    weights: Callable[[np.ndarray], np.ndarray],
    rng: np.random.Generator,
) -> Ints:
    """Samples the classes of one client's examples by class weights, without replacement.

    `available`, int [C], are the examples left of each class, at least `size` in total. `weights`
    maps bool [C], True for classes with examples left, to their weights, float [C].
    Returns the number of examples of each class, int [C], which add up to `size`. Samples beyond
    the last example of a class are sampled again, from the classes that are left.
    """
    counts = np.zeros_like(available)
    while (missing := size - int(counts.sum())) > 0:
        has_examples = counts < available
        w = np.where(has_examples, weights(has_examples) + _TINY, 0.0)
        counts = np.minimum(counts + rng.multinomial(missing, w / w.sum()), available)
    return counts


def largest_valid(is_valid: Callable[[int], bool], high: int) -> int:
    """Returns the largest n in 1..high with `is_valid(n)`, or 0 if there is none."""
    return next((n for n in range(high, 0, -1) if is_valid(n)), 0)
