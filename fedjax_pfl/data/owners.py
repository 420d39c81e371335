"""Partitions by owner: each client has the examples of one owner, or a part of them."""

import numpy as np

from fedjax_pfl.core.errors import require
from fedjax_pfl.data.numbers import rows_by_id

BY_OWNER = ("natural", "split_owners")


def natural(
    owners: np.ndarray, clients: int, rng: np.random.Generator, *, minimum: int = 1
) -> np.ndarray:
    """Makes each client one owner (writer, alphabet), sampled at random.

    Here the first argument is the owner of each example, int [examples]. Returns the client of each
    owner, int32 [owners], -1 for an owner that is not sampled. Clients are in the order of owners.

    Args:
      minimum: Least number of examples; owners with fewer are left out.
    """
    return _first_clients(owners, clients, 1, rng, minimum)


def split_owners(
    owners: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    per_owner: int = 2,
    minimum: int = 1,
) -> np.ndarray:
    """Divides the examples of each owner (domain, speaker) equally among `per_owner` clients.

    Arguments as for `natural`. Returns the first client of each owner, int32 [owners], -1 for an
    owner that is not sampled; `assign_parts` then picks the examples at random.

    Args:
      per_owner: Number of clients of each owner, which divides the number of clients.
      minimum: Least number of examples of a client; owners with too few are left out.
    """
    require(per_owner >= 1, f"per_owner={per_owner} must be at least 1")
    require(
        clients % per_owner == 0,
        f"partition split_owners: clients={clients} is not a multiple of per_owner={per_owner}: "
        f"use clients={per_owner * (clients // per_owner + 1)}",
    )
    return _first_clients(owners, clients, per_owner, rng, minimum)


def _first_clients(
    owners: np.ndarray, clients: int, per_owner: int, rng: np.random.Generator, minimum: int
) -> np.ndarray:
    """Samples owners. Returns the first of `per_owner` clients of each, as `split_owners` does."""
    least, number = max(minimum, 1) * per_owner, clients // per_owner
    sizes = np.bincount(owners)
    eligible = np.flatnonzero(sizes >= least)
    hints = [f"clients={len(eligible) * per_owner} or fewer"] if len(eligible) else []
    if number <= np.count_nonzero(sizes >= per_owner):
        hints.append(f"minimum={np.sort(sizes)[-number] // per_owner} or less")
    advice = ", or ".join(hints or ["a smaller minimum"])
    subject = f"{clients} clients need as many owners"
    if per_owner > 1:
        subject = f"{clients} clients, {per_owner} of each owner, need {number} owners"
    require(
        number <= len(eligible),
        f"{subject} with {least} or more examples, and there are {len(eligible) or 'none'}: use "
        f"{advice}",
    )
    client = np.full(len(sizes), -1, np.int32)
    sampled = np.sort(rng.choice(eligible, number, replace=False))
    client[sampled] = np.arange(number) * per_owner
    return client


def assign_parts(
    owner: np.ndarray,
    use: np.ndarray,
    first_client: np.ndarray,
    per_owner: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Assigns each owner's examples to its clients; their numbers differ by at most one.

    `owner` and `use` are int [examples]; examples of each use are divided separately.
    `first_client`, int [owners], is the first of the `per_owner` clients of each owner, or -1.
    Returns the client of each example, int32 [examples], -1 if its owner is not sampled.
    """
    client = first_client[owner].astype(np.int32)
    if per_owner == 1:
        return client
    for u in np.unique(use):
        sampled = np.where((use == u) & (client >= 0), owner, -1)
        for rows in rows_by_id(sampled, len(first_client)):
            client[rng.permutation(rows)] += np.arange(len(rows), dtype=np.int32) % per_owner
    return client
