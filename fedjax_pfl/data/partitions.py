"""How examples are spread over clients: each partition is a matrix of counts.

A partition maps (pool, rng) and keyword-only settings to counts, int [N, C]: how many examples of
each class each client gets. `apportion.deal` then picks the examples. Only `natural` differs: there
the owner of an example decides.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import apportion
from fedjax_pfl.data.mixtures import clusters, dirichlet, dirichlet_classes, pachinko
from fedjax_pfl.data.pool import Pool, between, class_lists, client_size, need, superclasses

# Factorized-FL's five groups of ten CIFAR-100 classes, as pairs of superclasses in their official
# (alphabetical) numbering: household devices and furniture; food containers, fruit and vegetables;
# trees and flowers; vehicles 1 and 2; and two superclasses of animals, which the paper does not
# name: large carnivores, large omnivores and herbivores.
CIFAR100_DOMAINS = ((5, 6), (3, 4), (17, 2), (18, 19), (8, 11))


def iid(pool: Pool, rng: np.random.Generator, *, examples: int | None = None) -> np.ndarray:
    """Every client gets the same number of each class, give or take one.

    Args:
      examples: per client; unset: all are dealt.
    """
    del rng  # which examples a client gets is drawn in `deal`
    if examples is None:
        client_size(pool, None)
        return apportion.round_robin(pool.available, pool.clients)
    total = client_size(pool, examples) * pool.clients
    return apportion.round_robin(apportion.proportional(pool.available, total), pool.clients)


def _spread(chosen: np.ndarray, classes: int, base: int, extra: int) -> np.ndarray:
    """counts [N, C]: `base` of every picked class, and one more of the first `extra` picks."""
    counts = np.zeros((len(chosen), classes), np.int64)
    amounts = base + (np.arange(chosen.shape[1]) < extra)
    np.put_along_axis(counts, chosen, np.broadcast_to(amounts, chosen.shape), 1)
    return counts


def classes(
    pool: Pool, rng: np.random.Generator, *, per_client: int = 4, examples: int = 600
) -> np.ndarray:
    """Each client gets `per_client` random classes, equally many examples of each.

    References: pFedLA's non-IID.1 (4 of 10 classes, 12 of 100).
    Deviations: the paper leaves the number of examples open; it is a setting.

    Args:
      per_client: how many classes a client has.
      examples: per client.
    """
    between("per_client", per_client, 1, pool.classes, "the number of classes")
    need(
        examples >= per_client,
        f"examples={examples} gives no example of some class: use at least {per_client}",
    )

    def capacity(size: int) -> np.ndarray:
        return pool.available // -(-size // per_client)

    def ok(size: int, clients: int = pool.clients) -> bool:
        return apportion.fits(capacity(size), clients, per_client)

    if not ok(examples):
        most = min(examples, pool.total // pool.clients) // per_client
        slot = apportion.largest(lambda n: ok(n * per_client), most)
        if slot:
            advice = f"the largest `examples` that fits is {slot * per_client}"
        else:
            most = apportion.largest(lambda n: ok(per_client, n), pool.clients)
            held = int((pool.available > 0).sum())
            advice = (
                f"not even one of each does; use at most {most} clients"
                if most
                else f"only {held} classes have examples; use at most that for per_client"
            )
        raise UsageError(
            f"{pool.clients} clients x {per_client} classes x {examples} examples do not fit into "
            f"{pool.total:,} examples of {pool.classes} classes: {advice}"
        )
    chosen = apportion.pick(capacity(examples), pool.clients, per_client, rng)
    return _spread(chosen, pool.classes, *divmod(examples, per_client))


def listed(
    pool: Pool,
    rng: np.random.Generator,
    *,
    classes: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3)),
    examples: int = 600,
) -> np.ndarray:
    """Each client has the classes that are listed for it, equally many examples of each.

    Args:
      classes: one list per client; the lists start over where there are more clients.
      examples: per client.
    """
    lists = class_lists("listed.classes", classes, pool.classes)
    counts = np.zeros((pool.clients, pool.classes), np.int64)
    for i in range(pool.clients):
        own = lists[i % len(lists)]
        need(
            len(own) <= examples,
            f"examples={examples} gives no example of some class: use at least {len(own)}",
        )
        counts[i, list(own)] = examples // len(own) + (np.arange(len(own)) < examples % len(own))
    wanted = counts.sum(0)
    c = int(np.argmax(wanted - pool.available))
    most = int(examples * pool.available[c] / max(wanted[c], 1))
    need(
        wanted[c] <= pool.available[c],
        f"class {c} has {pool.available[c]:,} examples, and examples={examples} per client needs "
        f"{wanted[c]:,} of it: "
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
) -> np.ndarray:
    """Each client gets all classes, `ratio` times as many examples of `dominant` random ones.

    References: pFedLA's non-IID.2 (2 dominant classes of 10, 6 of 100).
    Deviations: the paper gives neither the ratio nor the number of examples; both are settings.

    Args:
      dominant: how many classes of each client are.
      ratio: examples of such a class for one of any other.
      examples: per client.
    """
    between("dominant", dominant, 1, pool.classes, "the number of classes")
    need(ratio >= 1, f"ratio={ratio} would make the dominant classes rare: use 1 or more")
    others = pool.classes - dominant

    def amounts(size: int) -> tuple[int, int, int]:
        low = int(size / (others + ratio * dominant)) if others else 0
        return low, *divmod(size - low * others, dominant)

    def capacity(size: int) -> np.ndarray:
        low, base, extra = amounts(size)
        room = pool.available - low * pool.clients
        more = base + (extra > 0) - low
        return np.where(room < 0, -1, room // max(more, 1) if more else pool.clients)

    def ok(size: int) -> bool:
        room = capacity(size)
        return bool((room >= 0).all()) and apportion.fits(room, pool.clients, dominant)

    if examples < 1 or not ok(examples):
        size = apportion.largest(ok, min(examples, pool.total // pool.clients))
        raise UsageError(
            f"{pool.clients} clients x {examples} examples with {dominant} dominant classes do not "
            f"fit into {pool.total:,} examples of {pool.classes} classes: "
            + (f"the largest `examples` that fits is {size}" if size else "use fewer clients")
        )
    low, base, extra = amounts(examples)
    chosen = apportion.pick(capacity(examples), pool.clients, dominant, rng)
    counts = _spread(chosen, pool.classes, base, extra)
    return np.where(counts > 0, counts, low)


def shares(
    pool: Pool,
    rng: np.random.Generator,
    *,
    per_client: int = 2,
    low: float = 0.4,
    high: float = 0.6,
    spare_slot: bool = False,
) -> np.ndarray:
    """Each client gets `per_client` classes and of each a random share, U(low, high) normalised.

    Classes are drawn from those that have been given out least.
    References: pFedHN, section 5.1. The shares of a class sum to one.
    Deviations: none by default; with `spare_slot` it is the authors' code.

    Args:
      per_client: how many classes a client has.
      low: least share that is drawn, before those of a class are made to sum to one.
      high: largest such share.
      spare_slot: normalise over floor(N * per_client / C) + 1 slots; the share of one that no
        client takes is lost.
    """
    between("per_client", per_client, 1, pool.classes, "the number of classes")
    need(0 < low <= high < np.inf, f"low={low}, high={high}: use 0 < low <= high")
    chosen = apportion.least_used(pool.classes, pool.clients, per_client, rng)
    has = np.zeros((pool.clients, pool.classes), bool)
    np.put_along_axis(has, chosen, True, 1)
    weights = rng.uniform(low, high, has.shape) * has
    whole = weights.sum(0)
    if spare_slot:
        slots = pool.clients * per_client // pool.classes + 1
        spare = np.arange(slots)[:, None] >= has.sum(0)
        whole = whole + (rng.uniform(low, high, spare.shape) * spare).sum(0)
    return apportion.cut(weights / np.where(whole > 0, whole, 1), pool.available)


def shards(pool: Pool, rng: np.random.Generator, *, per_client: int = 2) -> np.ndarray:
    """Examples sorted by class are cut into equal shards; each client gets `per_client` of them.

    Args:
      per_client: how many shards a client has.
    """
    number = pool.clients * per_client
    need(
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
    content = np.diff(below, axis=0)
    return content[rng.permutation(number).reshape(pool.clients, per_client)].sum(1)


def coarse(pool: Pool, rng: np.random.Generator, *, per_client: int = 1) -> np.ndarray:
    """Each client gets `per_client` superclasses, each shared equally with others that have it.

    Args:
      per_client: how many superclasses a client has.
    """
    top = superclasses(pool, "coarse")
    tops = int(top.max()) + 1
    between("per_client", per_client, 1, tops, "the number of superclasses")
    chosen = apportion.least_used(tops, pool.clients, per_client, rng)
    counts = np.zeros((pool.clients, pool.classes), np.int64)
    for t in range(tops):
        holders = np.flatnonzero((chosen == t).any(1))
        if len(holders):
            ours = np.where(top == t, pool.available, 0)
            counts[holders] += apportion.round_robin(ours, len(holders))
    return counts


def domain_classes(
    pool: Pool, *, domains: int = 5, groups: tuple[tuple[int, ...], ...] = ()
) -> list[np.ndarray]:
    """The classes of each domain: those given, the paper's for CIFAR-100, or equal runs of classes.

    The paper's pairs are used where there are 100 classes in 20 superclasses and five domains.
    """
    if groups:
        chosen = [np.array(g) for g in class_lists("domains.groups", groups, pool.classes)]
        flat = np.concatenate(chosen)
        need(len(set(flat)) == len(flat), f"domains.groups={groups} has a class twice")
        return chosen
    between("domains", domains, 1, pool.classes, "the number of classes")
    if pool.coarse is not None and (pool.classes, int(pool.coarse.max()), domains) == (100, 19, 5):
        return [np.flatnonzero(np.isin(pool.coarse, pair)) for pair in CIFAR100_DOMAINS]
    return np.array_split(np.arange(pool.classes), domains)


def domain_of(clients: int, domains: int) -> np.ndarray:
    """int [N]: the domain of each client, in runs of equal length, give or take one."""
    return np.arange(clients) * domains // clients


def domains(
    pool: Pool,
    rng: np.random.Generator,
    *,
    domains: int = 5,
    groups: tuple[tuple[int, ...], ...] = (),
) -> np.ndarray:
    """Classes are cut into domains, clients into as many runs; IID within a domain.

    `federate` numbers the labels of each domain from 0, so that domains share the outputs.
    References: Factorized-FL's multi-domain setting (five groups of ten CIFAR-100 classes).

    Args:
      domains: how many there are; not read where groups are given.
      groups: the classes of each domain; none: equal runs of classes, or the paper's five domains
        of CIFAR-100.
    """
    del rng
    cuts = domain_classes(pool, domains=domains, groups=groups)
    need(
        len(cuts) <= pool.clients,
        f"{len(cuts)} domains need as many clients: use clients={len(cuts)} or more",
    )
    counts = np.zeros((pool.clients, pool.classes), np.int64)
    owner = domain_of(pool.clients, len(cuts))
    for d, members in enumerate(cuts):
        ours = np.zeros_like(pool.available)
        ours[members] = pool.available[members]
        counts[owner == d] = apportion.round_robin(ours, int((owner == d).sum()))
    return counts


def natural(
    owners: np.ndarray, clients: int, rng: np.random.Generator, *, minimum: int = 1
) -> np.ndarray:
    """Each client is one owner (writer, alphabet): as many random ones as there are clients.

    `owners` is int [examples].

    Args:
      minimum: owners with fewer examples are left out.

    Returns:
      int32 [owners]: the client that an owner is, -1 where it is none. Owners keep their order.
    """
    sizes = np.bincount(owners)
    eligible = np.flatnonzero(sizes >= max(minimum, 1))
    hints = [f"clients={len(eligible)} or fewer"] if len(eligible) else []
    if clients <= np.count_nonzero(sizes):
        hints.append(f"minimum={np.sort(sizes)[-clients]} or less")
    advice = ", or ".join(hints or ["a smaller minimum"])
    need(
        clients <= len(eligible),
        f"{clients} clients need as many owners with {minimum} or more examples, and there are "
        f"{len(eligible) or 'none'}: use {advice}",
    )
    client = np.full(len(sizes), -1, np.int32)
    client[np.sort(rng.choice(eligible, clients, replace=False))] = np.arange(clients)
    return client


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
    "natural": natural,
}


def partition_settings(name: str) -> dict[str, Any]:
    """The settings of a partition and their defaults, as its signature has them."""
    parameters = inspect.signature(PARTITIONS[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
