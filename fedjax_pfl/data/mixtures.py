"""Partitions sampled from Dirichlet distributions; arguments and results as in `partitions.py`."""

from collections.abc import Callable

import numpy as np

from fedjax_pfl.core.errors import UsageError, require
from fedjax_pfl.data import apportion
from fedjax_pfl.data.pool import Counts, Pool, client_size, require_between, superclasses

_ATTEMPTS = 300
_MOST_SHARES = 1e7  # shares to sample in all attempts together; takes a few seconds
_LARGEST_ALPHA = 1e100  # sums of larger ones would overflow


def _check_alphas(**alphas: float) -> None:
    """Raises UsageError unless all concentrations, given by name, are positive and not huge."""
    for name, value in alphas.items():
        require(
            0 < value <= _LARGEST_ALPHA,
            f"{name}={value} must be positive, at most {_LARGEST_ALPHA}",
        )


def _retry(sample: Callable[[], np.ndarray], minimum: int, pool: Pool) -> np.ndarray:
    """Calls `sample` until each client has `minimum` examples, or raises UsageError.

    `sample` returns random counts, int [N, C]. Returns the first valid counts.
    """
    require(minimum >= 0, f"minimum={minimum} must be at least 0")
    require(
        minimum * pool.clients <= pool.total,
        f"{pool.clients} clients with minimum={minimum} do not fit into the {pool.total:,} "
        f"examples: the largest `minimum` is {pool.total // pool.clients}",
    )
    best = -1
    for _ in range(min(_ATTEMPTS, max(10, int(_MOST_SHARES / (pool.clients * pool.classes))))):
        counts = sample()
        smallest = int(counts.sum(1).min())
        if smallest >= minimum:
            return counts
        best = max(best, smallest)
    raise UsageError(
        f"no sample gave each of the {pool.clients} clients minimum={minimum} of the "
        f"{pool.total:,} examples (the best gave the smallest client {best}): "
        f"use a smaller `minimum`, fewer clients or a larger `alpha`"
    )


def dirichlet(
    pool: Pool, rng: np.random.Generator, *, alpha: float = 0.5, minimum: int = 10
) -> Counts:
    """Divides each class among the clients by shares from Dir(alpha).

    Returns int [N, C], the number of examples of each class on each client.

    Args:
      alpha: Concentration: with a small alpha, few clients hold most of a class.
      minimum: Least number of examples of a client; shares are sampled until it is met.
    """
    _check_alphas(alpha=alpha)

    def sample() -> np.ndarray:
        weights = rng.dirichlet(np.full(pool.clients, alpha), pool.classes).T
        return apportion.round_shares(weights, pool.available)

    return _retry(sample, minimum, pool)


def dirichlet_classes(
    pool: Pool,
    rng: np.random.Generator,
    *,
    alpha: float = 0.1,
    novel_alpha: float | None = None,
    examples: int | None = None,
    equal: bool = True,
) -> Counts:
    """Gives each client class proportions p_i sampled from Dir(alpha).

    Returns int [N, C], the number of examples of each class on each client.

    Args:
      alpha: Concentration: with a small alpha, few classes make up most of a client.
      novel_alpha: Concentration for held-out clients (novel clients in pFedHN). Unset: alpha.
      examples: Examples per client; must be unset if not `equal`. Unset: all are used. Clients
        then choose in random order, and the last ones take the examples that are left.
      equal: Give all clients equally many examples. If False, client i gets p_ic / Σ_j p_jc of all
        examples of class c (pFedHN, section 5.3).
    """
    novel_alpha = alpha if novel_alpha is None else novel_alpha
    _check_alphas(alpha=alpha, novel_alpha=novel_alpha)
    if not equal:
        require(examples is None, "equal=False uses all examples: leave `examples` unset")
        alphas = np.where(
            np.arange(pool.clients) < pool.clients - pool.held_out, alpha, novel_alpha
        )
        weights = np.stack([rng.dirichlet(np.full(pool.classes, a)) for a in alphas])
        require(
            weights.sum(0).all(), f"alpha={alpha} gives some class to no client: use a larger one"
        )
        return apportion.round_shares(weights / weights.sum(0), pool.available)
    size = client_size(pool, examples)
    left = pool.available.copy()
    counts = np.zeros((pool.clients, pool.classes), np.int64)
    for i in rng.permutation(pool.clients):
        a = novel_alpha if i >= pool.clients - pool.held_out else alpha
        p = rng.dirichlet(np.full(pool.classes, a))
        counts[i] = apportion.sample_counts(left, size, lambda _, p=p: p, rng)  # type: ignore[misc]
        left -= counts[i]
    return counts


def clusters(
    pool: Pool, rng: np.random.Generator, *, clusters: int = 3, alpha: float = 0.4, minimum: int = 2
) -> Counts:
    """Groups classes into random clusters and divides each cluster by shares from Dir(alpha).

    Returns int [N, C], the number of examples of each class on each client.
    Within a cluster a client's examples are a random sample, of any class.
    References: FedEM's CIFAR-10 testbed (80 clients, 3 clusters, alpha 0.4).
    Deviations: sampled again while a client has fewer than `minimum` examples.

    Args:
      clusters: Number of clusters.
      alpha: Concentration: with a small alpha, few clients hold most of a cluster.
      minimum: Least number of examples of a client; shares are sampled until it is met.
    """
    require_between("clusters", clusters, 1, pool.classes, "the number of classes")
    _check_alphas(alpha=alpha)
    parts = np.array_split(rng.permutation(pool.classes), clusters)

    def sample() -> np.ndarray:
        counts = np.zeros((pool.clients, pool.classes), np.int64)
        for part in parts:
            weights = rng.dirichlet(np.full(pool.clients, alpha))[:, None]
            sizes = apportion.round_shares(weights, pool.available[part].sum(keepdims=True))[:, 0]
            labels = rng.permutation(np.repeat(part, pool.available[part]))
            np.add.at(counts, (np.repeat(np.arange(pool.clients), sizes), labels), 1)
        return counts

    return _retry(sample, minimum, pool)


def pachinko(
    pool: Pool,
    rng: np.random.Generator,
    *,
    alpha: float = 0.4,
    beta: float = 10.0,
    examples: int | None = None,
) -> Counts:
    """Samples superclasses from Dir(alpha), then their classes from Dir(beta).

    This is Pachinko allocation. Returns int [N, C], the number of examples of each class on each
    client. All clients have equally many examples, without replacement; a class without examples is
    left out of later samples.
    References: Reddi et al., Adaptive federated optimization, appendix F; used by FedEM and FedMN.

    Args:
      alpha: Concentration: with a small alpha, few superclasses make up most of a client.
      beta: Concentration of the classes within a superclass.
      examples: Examples per client. Unset: all are used (CIFAR-100: 100 clients x 600).
    """
    coarse = superclasses(pool, "pachinko")
    _check_alphas(alpha=alpha, beta=beta)
    size = client_size(pool, examples)
    groups = int(coarse.max()) + 1
    member = coarse[None, :] == np.arange(groups)[:, None]  # bool [superclasses, C]
    left = pool.available.copy()
    counts = np.zeros((pool.clients, pool.classes), np.int64)
    for i in rng.permutation(pool.clients):
        p_super = rng.dirichlet(np.full(groups, alpha))
        p_class = np.zeros(pool.classes)
        for row in member:
            p_class[row] = rng.dirichlet(np.full(row.sum(), beta))

        def weights(
            has_examples: np.ndarray, p_super: np.ndarray = p_super, p_class: np.ndarray = p_class
        ) -> np.ndarray:
            # A superclass keeps its weight while one of its classes has examples.
            mass = member @ (p_class * has_examples)
            return p_super[coarse] * p_class * has_examples / np.where(mass > 0, mass, 1)[coarse]

        counts[i] = apportion.sample_counts(left, size, weights, rng)
        left -= counts[i]
    return counts
