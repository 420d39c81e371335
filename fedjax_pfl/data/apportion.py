"""Whole numbers that add up: the integer arithmetic under every partition."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

Ints = np.ndarray
_TINY = 1e-12  # keeps a class drawable whose Dirichlet weight has underflowed to zero
T = TypeVar("T")


def deal(labels: Ints, counts: Ints, rng: np.random.Generator) -> Ints:
    """Realise a counts matrix on labelled examples, at random and without replacement.

    Args:
      labels: int [examples].
      counts: int [N, C]; column sums are at most the number of examples of that class.

    Returns:
      int32 [examples]: the client that holds each example, -1 where nobody does.
    """
    client = np.full(len(labels), -1, np.int32)
    ids = np.arange(len(counts), dtype=np.int32)
    for c in np.flatnonzero(counts.sum(0)):
        rows = rng.permutation(np.flatnonzero(labels == c))
        client[rows[: counts[:, c].sum()]] = np.repeat(ids, counts[:, c])
    return client


def cut(shares: np.ndarray, total: Ints) -> Ints:
    """Turn shares into counts by rounding the cumulative boundaries, so that nothing is lost.

    Args:
      shares: float [N, C], columns that sum to at most one.
      total: int [C].

    Returns:
      int [N, C]; a column whose shares sum to one adds up to exactly its total.
    """
    bounds = np.rint(np.minimum(np.cumsum(shares, 0), 1.0) * total).astype(np.int64)
    return np.diff(bounds, axis=0, prepend=0)


def same_shares(counts: Ints, of: Ints, total: Ints) -> Ints:
    """What clients get of `total` when they hold `counts` of `of`; exact integer boundaries.

    Args:
      counts: int [N, C], column sums at most `of`.
      of, total: int [C].

    Returns:
      int [N, C]; where a column of `counts` adds up to `of`, the result adds up to `total`.
    """
    bounds = np.cumsum(counts, 0, dtype=np.int64) * total // np.maximum(of, 1)
    return np.diff(bounds, axis=0, prepend=0)


def proportional(weights: np.ndarray, total: int) -> Ints:
    """Whole numbers [C] in proportion to `weights`, adding up to `total`: largest remainders."""
    exact = weights * (total / weights.sum())
    whole = np.floor(exact).astype(np.int64)
    short = total - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:short]] += 1
    return whole


def round_robin(total: Ints, clients: int) -> Ints:
    """Deal the examples, sorted by class, one by one to the clients in turn.

    Sizes differ by at most one between clients, and so do the counts of every class.
    """
    ends = np.concatenate([[0], np.cumsum(total)])
    up_to = (ends[None, :] - np.arange(clients)[:, None] + clients - 1) // clients
    return np.diff(up_to, axis=1)


def fits(capacity: Ints, clients: int, picks: int) -> bool:
    """Whether every client can pick that many distinct classes, each class `capacity` times."""
    return int(np.clip(capacity, 0, clients).sum()) >= clients * picks


def pick(capacity: Ints, clients: int, picks: int, rng: np.random.Generator) -> np.ndarray:
    """Random distinct classes for each client, no class more often than its capacity.

    Succeeds whenever `fits` says so. Choices are uniform until a class must be taken or spared:
    with r clients to go, a class that can serve all r of them costs nothing, and of the others a
    client may take only as many as leave enough for those who follow.

    Returns:
      int [N, picks].
    """
    left = np.array(capacity)
    chosen = np.zeros((clients, picks), np.int64)
    for r in range(clients, 0, -1):
        order = rng.permutation(np.flatnonzero(left > 0))
        scarce = left[order] < r
        spare = int(np.minimum(left, r).sum()) - int((left >= r).sum()) - (r - 1) * picks
        allowed = ~scarce | (np.cumsum(scarce) <= spare)
        taken = order[allowed][:picks]
        left[taken] -= 1
        chosen[r - 1] = taken
    return chosen[rng.permutation(clients)]


def least_used(classes: int, clients: int, picks: int, rng: np.random.Generator) -> np.ndarray:
    """Distinct classes for each client, always from those that were picked least so far.

    Returns:
      int [N, picks]; classes are used equally often, give or take one.
    """
    used = np.zeros(classes, np.int64)
    chosen = np.zeros((clients, picks), np.int64)
    for row in chosen:
        # Random among equals: a lexical sort by (times used, noise).
        row[:] = np.lexsort((rng.random(classes), used))[:picks]
        used[row] += 1
    return chosen


def draw(
    remaining: Ints,
    size: int,
    weights: Callable[[np.ndarray], np.ndarray],
    rng: np.random.Generator,
) -> Ints:
    """Draw one client's examples without replacement, by class weights.

    Args:
      remaining: int [C], how many are left; at least `size` in all.
      weights: from bool [C], the classes that are not used up, to float [C], their weights.

    Returns:
      int [C], adding up to `size`. Draws from a class that is used up are drawn again.
    """
    taken = np.zeros_like(remaining)
    while (short := size - int(taken.sum())) > 0:
        alive = taken < remaining
        w = np.where(alive, weights(alive) + _TINY, 0.0)
        taken = np.minimum(taken + rng.multinomial(short, w / w.sum()), remaining)
    return taken


def largest(ok: Callable[[int], bool], high: int) -> int:
    """The largest n in 1..high for which `ok(n)`, 0 where there is none."""
    return next((n for n in range(high, 0, -1) if ok(n)), 0)
