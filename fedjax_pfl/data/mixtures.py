"""Partitions drawn from Dirichlet distributions. Maps and settings as in `partitions.py`."""

from collections.abc import Callable

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import apportion
from fedjax_pfl.data.pool import Pool, between, client_size, need, superclasses

_ATTEMPTS = 300


def _check_alphas(**alphas: float) -> None:
    for name, value in alphas.items():
        need(0 < value < np.inf, f"{name}={value} must be positive and finite")


def _retry(draw: Callable[[], np.ndarray], minimum: int, pool: Pool) -> np.ndarray:
    """Draw again until the smallest client is large enough; deterministic, as `draw` is."""
    need(minimum >= 0, f"minimum={minimum} must be at least 0")
    need(
        minimum * pool.clients <= pool.total,
        f"{pool.clients} clients with minimum={minimum} do not fit into the {pool.total:,} "
        f"examples: the largest `minimum` is {pool.total // pool.clients}",
    )
    best = -1
    for _ in range(_ATTEMPTS):
        counts = draw()
        smallest = int(counts.sum(1).min())
        if smallest >= minimum:
            return counts
        best = max(best, smallest)
    raise UsageError(
        f"no draw gave each of the {pool.clients} clients minimum={minimum} of the "
        f"{pool.total:,} examples (the best gave the smallest client {best}): "
        f"use a smaller `minimum`, fewer clients or a larger `alpha`"
    )


def dirichlet(
    pool: Pool, rng: np.random.Generator, *, alpha: float = 0.5, minimum: int = 10
) -> np.ndarray:
    """Each class is spread over the clients by Dir(alpha); again until all have `minimum`.

    Args:
      alpha: how evenly classes are spread: the smaller, the fewer clients have most of one.
      minimum: examples that every client has at least; counts are drawn again until it is so.
    """
    _check_alphas(alpha=alpha)

    def draw() -> np.ndarray:
        weights = rng.dirichlet(np.full(pool.clients, alpha), pool.classes).T
        return apportion.cut(weights, pool.available)

    return _retry(draw, minimum, pool)


def dirichlet_classes(
    pool: Pool,
    rng: np.random.Generator,
    *,
    alpha: float = 0.1,
    novel_alpha: float | None = None,
    examples: int | None = None,
    equal: bool = True,
) -> np.ndarray:
    """Each client with its own class proportions p_i from Dir(alpha).

    Args:
      alpha: how evenly a client is made of classes: the smaller, the fewer make up most of it.
      novel_alpha: that of the held-out clients (pFedHN's novel clients); unset: the same.
      examples: per client; unset: all are dealt, and who draws last (in a random order) has to take
        what is left. With fewer than there are, proportions come out as drawn.
      equal: clients of one size; else client i gets p_ic / Σ_j p_jc of all examples of class c
        (pFedHN, section 5.3).
    """
    novel_alpha = alpha if novel_alpha is None else novel_alpha
    _check_alphas(alpha=alpha, novel_alpha=novel_alpha)
    if not equal:
        need(examples is None, "equal=False deals everything: leave `examples` unset")
        alphas = np.where(
            np.arange(pool.clients) < pool.clients - pool.held_out, alpha, novel_alpha
        )
        weights = np.stack([rng.dirichlet(np.full(pool.classes, a)) for a in alphas])
        need(weights.sum(0).all(), f"alpha={alpha} gives some class to no client: use a larger one")
        return apportion.cut(weights / weights.sum(0), pool.available)
    size = client_size(pool, examples)
    left = pool.available.copy()
    counts = np.zeros((pool.clients, pool.classes), np.int64)
    for i in rng.permutation(pool.clients):
        a = novel_alpha if i >= pool.clients - pool.held_out else alpha
        weights = rng.dirichlet(np.full(pool.classes, a))
        counts[i] = apportion.draw(left, size, lambda alive, w=weights: w, rng)  # type: ignore[misc]
        left -= counts[i]
    return counts


def clusters(
    pool: Pool,
    rng: np.random.Generator,
    *,
    clusters: int = 3,
    alpha: float = 0.4,
    minimum: int = 2,
) -> np.ndarray:
    """Classes shuffled into clusters; each cluster's examples spread over clients by Dir(alpha).

    Within a cluster a client's examples are a random draw, whatever their class.
    References: FedEM's CIFAR-10 testbed (80 clients, 3 clusters, alpha .4).
    Deviations: drawn again while a client has fewer than `minimum` examples.

    Args:
      clusters: how many there are.
      alpha: how evenly each is spread: the smaller, the fewer clients have most of it.
      minimum: examples that every client has at least; counts are drawn again until it is so.
    """
    between("clusters", clusters, 1, pool.classes, "the number of classes")
    _check_alphas(alpha=alpha)
    parts = np.array_split(rng.permutation(pool.classes), clusters)

    def draw() -> np.ndarray:
        counts = np.zeros((pool.clients, pool.classes), np.int64)
        for part in parts:
            weights = rng.dirichlet(np.full(pool.clients, alpha))[:, None]
            sizes = apportion.cut(weights, pool.available[part].sum(keepdims=True))[:, 0]
            labels = rng.permutation(np.repeat(part, pool.available[part]))
            np.add.at(counts, (np.repeat(np.arange(pool.clients), sizes), labels), 1)
        return counts

    return _retry(draw, minimum, pool)


def pachinko(
    pool: Pool,
    rng: np.random.Generator,
    *,
    alpha: float = 0.4,
    beta: float = 10.0,
    examples: int | None = None,
) -> np.ndarray:
    """Pachinko allocation: Dir(alpha) over superclasses, then Dir(beta) over their classes.

    Clients of one size, without replacement: what is used up is left out of later draws.
    References: Reddi et al., Adaptive federated optimization, appendix F; used by FedEM and FedMN.

    Args:
      alpha: how evenly a client is made of superclasses: the smaller, the fewer make up most of it.
      beta: how evenly of the classes within a superclass, likewise.
      examples: per client; unset: all are dealt (CIFAR-100: 100 clients x 600).
    """
    coarse = superclasses(pool, "pachinko")
    _check_alphas(alpha=alpha, beta=beta)
    size = client_size(pool, examples)
    tops = int(coarse.max()) + 1
    member = coarse[None, :] == np.arange(tops)[:, None]
    left = pool.available.copy()
    counts = np.zeros((pool.clients, pool.classes), np.int64)
    for i in rng.permutation(pool.clients):
        top = rng.dirichlet(np.full(tops, alpha))
        fine = np.zeros(pool.classes)
        for row in member:
            fine[row] = rng.dirichlet(np.full(row.sum(), beta))

        def weights(
            alive: np.ndarray, top: np.ndarray = top, fine: np.ndarray = fine
        ) -> np.ndarray:
            # A superclass keeps its weight as long as one of its classes is left.
            kept = member @ (fine * alive)
            return top[coarse] * fine * alive / np.where(kept > 0, kept, 1)[coarse]

        counts[i] = apportion.draw(left, size, weights, rng)
        left -= counts[i]
    return counts
