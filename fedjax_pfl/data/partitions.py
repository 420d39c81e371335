"""Partitions, which divide examples among clients.

A partition maps a pool, a random generator and keyword-only settings to counts, int [N, C]: the
number of examples of each class that each client gets. `apportion.assign_examples` then picks the
examples. The partitions in `owners.BY_OWNER` differ: an example goes to a client of its owner.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError, require
from fedjax_pfl.data import apportion, owners
from fedjax_pfl.data.mixtures import clusters, dirichlet, dirichlet_classes, pachinko
from fedjax_pfl.data.pool import (
    Counts,
    Pool,
    check_class_lists,
    client_size,
    require_between,
    superclasses,
)

# Factorized-FL's five groups of ten CIFAR-100 classes, as pairs of superclasses in their official
# (alphabetical) numbering: household devices and furniture; food containers, fruit and vegetables;
# trees and flowers; vehicles 1 and 2; and two superclasses of animals. The paper does not name the
# latter; we use large carnivores, and large omnivores and herbivores.
CIFAR100_DOMAINS = ((5, 6), (3, 4), (17, 2), (18, 19), (8, 11))


def iid(pool: Pool, rng: np.random.Generator, *, examples: int | None = None) -> Counts:
    """Gives every client the same number of examples of each class, plus or minus one.

    Returns int [N, C], the number of examples of each class on each client.

    Args:
      examples: Examples per client. Unset: all are used.
    """
    del rng  # `assign_examples` samples the examples of a client
    if examples is None:
        client_size(pool, None)
        return apportion.round_robin(pool.available, pool.clients)
    total = client_size(pool, examples) * pool.clients
    return apportion.round_robin(apportion.largest_remainder(pool.available, total), pool.clients)


def _counts_of(picks: np.ndarray, classes: int, base: int, extra: int) -> np.ndarray:
    """Returns counts [N, classes]: `base` for each of a client's `picks`, int [N, K], and 1 more
    for each of its first `extra` picks.
    """
    counts = np.zeros((len(picks), classes), np.int64)
    sizes = base + (np.arange(picks.shape[1]) < extra)
    np.put_along_axis(counts, picks, np.broadcast_to(sizes, picks.shape), 1)
    return counts


def classes(
    pool: Pool, rng: np.random.Generator, *, per_client: int = 4, examples: int = 600
) -> Counts:
    """Gives each client `per_client` random classes with equally many examples of each.

    Raises UsageError if the dataset has too few examples.

    Returns int [N, C], the number of examples of each class on each client.
    References: pFedLA's non-IID.1 (4 of 10 classes, 12 of 100).
    Deviations: the paper does not state the number of examples; it is a setting.

    Args:
      per_client: Number of classes per client.
      examples: Examples per client.
    """
    require_between("per_client", per_client, 1, pool.classes, "the number of classes")
    require(
        examples >= per_client,
        f"examples={examples} gives no example of some class: use at least {per_client}",
    )

    def capacity(size: int) -> np.ndarray:
        return pool.available // -(-size // per_client)

    def fits(size: int, clients: int = pool.clients) -> bool:
        return apportion.can_pick(capacity(size), clients, per_client)

    if not fits(examples):
        most = min(examples, pool.total // pool.clients) // per_client
        per_class = apportion.largest_valid(lambda n: fits(n * per_client), most)
        if per_class:
            advice = f"the largest `examples` that fits is {per_class * per_client}"
        elif most := apportion.largest_valid(lambda n: fits(per_client, n), pool.clients):
            advice = f"one example of each class does not fit either; use at most {most} clients"
        else:
            nonempty = int((pool.available > 0).sum())
            advice = f"only {nonempty} classes have examples; use at most that for per_client"
        raise UsageError(
            f"{pool.clients} clients x {per_client} classes x {examples} examples do not fit into "
            f"{pool.total:,} examples of {pool.classes} classes: {advice}"
        )
    picks = apportion.pick_classes(capacity(examples), pool.clients, per_client, rng)
    return _counts_of(picks, pool.classes, *divmod(examples, per_client))


def listed(
    pool: Pool,
    rng: np.random.Generator,
    *,
    classes: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3)),
    examples: int = 600,
) -> Counts:
    """Gives each client the classes listed for it, with equally many examples of each.

    Returns int [N, C], the number of examples of each class on each client.

    Args:
      classes: One list of classes per client; the lists repeat if there are more clients.
      examples: Examples per client.
    """
    del rng
    lists = check_class_lists("listed.classes", classes, pool.classes)
    counts = np.zeros((pool.clients, pool.classes), np.int64)
    for i in range(pool.clients):
        members = lists[i % len(lists)]
        base, extra = divmod(examples, len(members))
        require(
            base > 0,
            f"examples={examples} gives no example of some class: use at least {len(members)}",
        )
        counts[i, list(members)] = base + (np.arange(len(members)) < extra)
    required = counts.sum(0)
    c = int(np.argmax(required - pool.available))
    most = int(examples * pool.available[c] / max(required[c], 1))
    require(
        required[c] <= pool.available[c],
        f"class {c} has {pool.available[c]:,} examples, and examples={examples} per client needs "
        f"{required[c]:,} of it: "
        + (f"the largest that fits is about {most:,}" if most else "use fewer clients"),
    )
    return counts


def dominant(
    pool: Pool,
    rng: np.random.Generator,
    *,
    dominant: int = 2,
    ratio: float = 10.0,
    examples: int = 600,
) -> Counts:
    """Gives each client all classes, with `ratio` times as many examples of `dominant` random ones.

    Numbers of the other classes are rounded down and dominant classes get the rest, so with few
    examples the ratio is larger: 17.7 instead of 10 with 600 examples and 6 of 100 classes.

    Returns int [N, C], the number of examples of each class on each client.
    References: pFedLA's non-IID.2 (2 dominant classes of 10, 6 of 100).
    Deviations: the paper gives neither the ratio nor the number of examples; both are settings.
    Raises UsageError if the dataset has too few examples, or a client too few for all classes.

    Args:
      dominant: Number of dominant classes per client.
      ratio: Examples of a dominant class divided by those of any other class.
      examples: Examples per client.
    """
    require_between("dominant", dominant, 1, pool.classes, "the number of classes")
    require(1 <= ratio < np.inf, f"ratio={ratio}: use a finite number, 1 or more")
    n_rare = pool.classes - dominant

    def sizes(examples: int) -> tuple[int, int, int]:
        """Returns numbers for a client of `examples`: of a rare class, and of a dominant class.

        The third is the number of dominant classes that get one example more.
        """
        low = int(examples / (n_rare + ratio * dominant)) if n_rare else 0
        return low, *divmod(examples - low * n_rare, dominant)

    def capacity(examples: int) -> np.ndarray:
        low, base, extra = sizes(examples)
        left = pool.available - low * pool.clients
        step = base + (extra > 0) - low
        return np.where(left < 0, -1, left // max(step, 1) if step else pool.clients)

    def fits(examples: int) -> bool:
        room = capacity(examples)
        return bool((room >= 0).all()) and apportion.can_pick(room, pool.clients, dominant)

    if examples < 1 or not fits(examples):
        most = apportion.largest_valid(fits, min(examples, pool.total // pool.clients))
        raise UsageError(
            f"{pool.clients} clients x {examples} examples with {dominant} dominant classes do not "
            f"fit into {pool.total:,} examples of {pool.classes} classes: "
            + (f"the largest `examples` that fits is {most}" if most else "use fewer clients")
        )
    low, base, extra = sizes(examples)
    require(
        low > 0 or not n_rare,
        f"examples={examples} leaves no example of a rare class with ratio={ratio}: use at least "
        f"{np.ceil(n_rare + ratio * dominant):.0f}, or a smaller ratio",
    )
    picks = apportion.pick_classes(capacity(examples), pool.clients, dominant, rng)
    counts = _counts_of(picks, pool.classes, base, extra)
    return np.where(counts > 0, counts, low)


def shares(
    pool: Pool,
    rng: np.random.Generator,
    *,
    per_client: int = 2,
    low: float = 0.4,
    high: float = 0.6,
    spare_slot: bool = False,
) -> Counts:
    """Gives each client `per_client` classes and a random share of each, U(low, high) normalised.

    Returns int [N, C], the number of examples of each class on each client.
    Classes are sampled from those given out least so far.
    References: pFedHN, section 5.1. The shares of a class sum to 1.
    Deviations: the paper samples classes freely; those given out least come first in the authors'
    code, and `spare_slot` is of that code, too.

    Args:
      per_client: Number of classes per client.
      low: Smallest share before normalisation.
      high: Largest share before normalisation.
      spare_slot: Normalise over floor(N * per_client / C) + 1 slots. The share of a slot that no
        client takes is lost.
    """
    require_between("per_client", per_client, 1, pool.classes, "the number of classes")
    require(0 < low <= high < np.inf, f"low={low}, high={high}: use 0 < low <= high")
    picks = apportion.pick_least_used(pool.classes, pool.clients, per_client, rng)
    has = np.zeros((pool.clients, pool.classes), bool)
    np.put_along_axis(has, picks, True, 1)
    weights = rng.uniform(low, high, has.shape) * has
    total = weights.sum(0)
    if spare_slot:
        slots = pool.clients * per_client // pool.classes + 1
        spare = np.arange(slots)[:, None] >= has.sum(0)
        total = total + (rng.uniform(low, high, spare.shape) * spare).sum(0)
    return apportion.round_shares(weights / np.where(total > 0, total, 1), pool.available)


def shards(pool: Pool, rng: np.random.Generator, *, per_client: int = 2) -> Counts:
    """Cuts the examples, sorted by class, into equal shards and gives `per_client` to each client.

    Returns int [N, C], the number of examples of each class on each client.

    Args:
      per_client: Number of shards per client.
    """
    number = pool.clients * per_client
    require(
        1 <= number <= pool.total,
        f"{pool.clients} clients x {per_client} shards cannot be cut from {pool.total:,} examples: "
        + (
            f"use per_client from 1 to {pool.total // pool.clients}"
            if pool.clients <= pool.total
            else f"use at most {pool.total} clients"
        ),
    )
    edges = np.arange(number + 1, dtype=np.int64) * pool.total // number
    ends = np.cumsum(pool.available)
    below = np.clip(edges[:, None] - (ends - pool.available), 0, pool.available)
    content = np.diff(below, axis=0)  # int [shards, C]
    return content[rng.permutation(number).reshape(pool.clients, per_client)].sum(1)


def coarse(pool: Pool, rng: np.random.Generator, *, per_client: int = 1) -> Counts:
    """Gives each client `per_client` superclasses, each divided equally among its clients.

    Returns int [N, C], the number of examples of each class on each client.

    Args:
      per_client: Number of superclasses per client.
    """
    group_of = superclasses(pool, "coarse")
    groups = int(group_of.max()) + 1
    require_between("per_client", per_client, 1, groups, "the number of superclasses")
    picks = apportion.pick_least_used(groups, pool.clients, per_client, rng)
    counts = np.zeros((pool.clients, pool.classes), np.int64)
    for g in range(groups):
        clients = np.flatnonzero((picks == g).any(1))
        if len(clients):
            totals = np.where(group_of == g, pool.available, 0)
            counts[clients] += apportion.round_robin(totals, len(clients))
    return counts


def domain_classes(
    pool: Pool, *, domains: int = 5, classes: tuple[tuple[int, ...], ...] = ()
) -> list[np.ndarray]:
    """Returns the classes of each domain, one int array per domain.

    Args:
      pool: For 100 classes in 20 superclasses and five domains, Factorized-FL's pairs of
        superclasses are used. Otherwise domains are ranges of classes.
      domains: Number of domains.
      classes: The classes of each domain, in place of the above.
    """
    if classes:
        result = [np.array(c) for c in check_class_lists("domains.classes", classes, pool.classes)]
        members = np.concatenate(result)
        require(len(set(members)) == len(members), f"domains.classes={classes} has a class twice")
        return result
    require_between("domains", domains, 1, pool.classes, "the number of classes")
    if pool.coarse is not None and (pool.classes, int(pool.coarse.max()), domains) == (100, 19, 5):
        return [np.flatnonzero(np.isin(pool.coarse, pair)) for pair in CIFAR100_DOMAINS]
    return np.array_split(np.arange(pool.classes), domains)


def domain_of(clients: int, domains: int) -> np.ndarray:
    """Returns the domain of each client, int [N]: 0, 0, ..., 1, 1, ..., each nearly as often."""
    return np.arange(clients) * domains // clients


def domains(
    pool: Pool,
    rng: np.random.Generator,
    *,
    domains: int = 5,
    classes: tuple[tuple[int, ...], ...] = (),
) -> Counts:
    """Divides classes into domains and clients among the domains; IID within a domain.

    Returns int [N, C], the number of examples of each class on each client.
    `federate` numbers the labels of each domain from 0; domains share the outputs.
    References: Factorized-FL's multi-domain setting (five groups of ten CIFAR-100 classes).

    Args:
      domains: Number of domains; ignored if classes are given.
      classes: The classes of each domain. Empty: ranges of equal length, or the paper's five
        domains for CIFAR-100.
    """
    del rng
    lists = domain_classes(pool, domains=domains, classes=classes)
    require(
        len(lists) <= pool.clients,
        f"{len(lists)} domains need as many clients: use clients={len(lists)} or more",
    )
    counts = np.zeros((pool.clients, pool.classes), np.int64)
    domain = domain_of(pool.clients, len(lists))
    for d, members in enumerate(lists):
        totals = np.zeros_like(pool.available)
        totals[members] = pool.available[members]
        counts[domain == d] = apportion.round_robin(totals, int((domain == d).sum()))
    return counts


PARTITIONS: dict[str, Callable[..., np.ndarray]] = {
    "iid": iid,
    "classes": classes,
    "listed": listed,
    "dominant": dominant,
    "shares": shares,
    "dirichlet": dirichlet,
    "dirichlet_classes": dirichlet_classes,
    "shards": shards,
    "clusters": clusters,
    "pachinko": pachinko,
    "coarse": coarse,
    "domains": domains,
    "natural": owners.natural,
    "split_owners": owners.split_owners,
}


def partition_settings(name: str) -> dict[str, Any]:
    """Returns the settings of a partition and their defaults, read from its signature."""
    parameters = inspect.signature(PARTITIONS[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
