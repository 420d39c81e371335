"""Rules that select the clients whose models are mixed, by similarity or by past benefit."""

from typing import Any

import jax
import jax.numpy as jnp

RULES = ("similar", "random", "worst", "none")


def cosine(v: jax.Array, i: Any) -> jax.Array:
    """Cosine similarity between row `i` of `v` [N, D] and every row.

    Returns an array of shape [N] whose entry `i` is exactly 1.
    """
    unit = v / jnp.maximum(jnp.linalg.norm(v, axis=1, keepdims=True), 1e-12)
    return jnp.matmul(unit, unit[i], precision="highest").at[i].set(1.0)


def cosines(v: jax.Array) -> jax.Array:
    """Cosine similarities of all pairs of rows of `v` [N, D], as an array of shape [N, N]."""
    return jax.vmap(cosine, (None, 0))(v, jnp.arange(len(v)))


def candidates(
    order: jax.Array, minimum: int, similar: jax.Array, allowed: jax.Array, i: Any
) -> jax.Array:
    """Selects the similar clients, and in any case the first `minimum`. Returns bool [N].

    Args:
      order: [N], larger is better. Client i itself always comes first.
      minimum: the least number of clients to select.
      similar: bool [N].
      allowed: bool [N]; no other client is selected.
      i: the client that mixes.
    """
    order = jnp.where(allowed, order, -jnp.inf).at[i].set(jnp.inf)
    place = jnp.argsort(jnp.argsort(-order, stable=True))
    return allowed & (similar | (place < minimum))


def leading(
    affinity: jax.Array, free: jax.Array, peers: int, epsilon: jax.Array, key: jax.Array
) -> jax.Array:
    """Selects different clients out of `free`, by affinity or, with probability ε, at random.

    Returns ids, int32 [peers]. Equal affinities are ordered at random, as in the first round.
    """

    def place(free: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        explore_key, order_key = jax.random.split(key)
        best = jnp.max(jnp.where(free, affinity, -jnp.inf))
        open_to = free & (jax.random.bernoulli(explore_key, epsilon) | (affinity == best))
        chosen = jnp.argmax(jnp.where(open_to, jax.random.uniform(order_key, free.shape), -1.0))
        return free.at[chosen].set(False), chosen

    return jax.lax.scan(place, free, jax.random.split(key, peers))[1]
