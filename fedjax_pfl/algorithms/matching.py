"""Which clients are mixed: by how alike they are, or by what they have been worth."""

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.core import far
from fedjax_pfl.core.algorithm import Cohort, PyTree

RULES = ("similar", "random", "worst", "none")


def cosine(v: jax.Array, i: Any) -> jax.Array:
    """Of row i of v [N, D] with every row: [N], exactly 1 with itself."""
    unit = v / jnp.maximum(jnp.linalg.norm(v, axis=1, keepdims=True), 1e-12)
    return jnp.matmul(unit, unit[i], precision="highest").at[i].set(1.0)


def cosines(v: jax.Array) -> jax.Array:
    """Of every row of v [N, D] with every row: [N, N]."""
    return jax.vmap(cosine, (None, 0))(v, jnp.arange(len(v)))


def as_like_as_best(sigma: jax.Array, i: Any, others: jax.Array) -> jax.Array:
    """The similarities [N] with that of client i to itself no more than to its best peer.

    It stays 1 where there are no `others`, bool [N].
    """
    best = jnp.max(jnp.where(others, sigma, -jnp.inf))
    return sigma.at[i].set(jnp.where(jnp.isfinite(best), best, 1.0))


def candidates(
    order: jax.Array, minimum: int, likes: jax.Array, allowed: jax.Array, i: Any
) -> jax.Array:
    """bool [N]: those that are liked, or among the first `minimum`, of those that are allowed.

    order: [N], larger is better; client i itself is always first.
    """
    order = jnp.where(allowed, order, -jnp.inf).at[i].set(jnp.inf)
    place = jnp.argsort(jnp.argsort(-order, stable=True))
    return allowed & (likes | (place < minimum))


class Signatures(NamedTuple):
    """What clients are compared by: v* of a factorised layer, or how training has moved it.

    Rows are {"params": what each client uploaded}, and "moved": [N, D] where that is followed.
    """

    layer: str
    followed: bool

    def of(self, models: PyTree, leaf: str = "v") -> jax.Array:
        """[K, D] of K models, by default their v*."""
        leaves = reduce(dict.__getitem__, self.layer.split("/"), models["params"])[leaf]
        return far.each(jnp.ravel, leaves)

    def first(self, rows: PyTree) -> PyTree:
        """The rows before the first round."""
        return rows | {"moved": jnp.zeros_like(self.of(rows))} if self.followed else rows

    def after(self, rows: PyTree, cohort: Cohort) -> PyTree:
        """The rows of a cohort after its round, stacked as its uploads are."""
        if not self.followed:
            return cohort.uploads
        step = self.of(cohort.uploads) - self.of(cohort.payloads)
        before = rows["moved"].at[cohort.ids].get(mode="fill", fill_value=0.0)
        return {**cohort.uploads, "moved": before + step}

    def likeness(self, rows: PyTree, i: Any, others: jax.Array) -> jax.Array:
        """σ of client i: [N]; by what has moved, it is as like itself as its best peer is."""
        if not self.followed:
            return cosine(self.of(rows), i)
        return as_like_as_best(cosine(rows["moved"], i), i, others)

    def observed(self, rows: PyTree) -> dict[str, jax.Array]:
        """All cosines [N, N], by name."""
        found = {leaf: cosines(self.of(rows, leaf)) for leaf in ("u", "v")}
        return found | ({"moved": cosines(rows["moved"])} if self.followed else {})


def leading(
    affinity: jax.Array, free: jax.Array, peers: int, epsilon: jax.Array, key: jax.Array
) -> jax.Array:
    """int32 [peers]: different clients out of `free`, by affinity or, with probability ε, any.

    Equal affinities, as all are in the first round, are ordered at random.
    """

    def place(free: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        explore_key, order_key = jax.random.split(key)
        best = jnp.max(jnp.where(free, affinity, -jnp.inf))
        open_to = free & (jax.random.bernoulli(explore_key, epsilon) | (affinity == best))
        chosen = jnp.argmax(jnp.where(open_to, jax.random.uniform(order_key, free.shape), -1.0))
        return free.at[chosen].set(False), chosen

    return jax.lax.scan(place, free, jax.random.split(key, peers))[1]
