"""Rules that select the clients whose models are mixed, by similarity or by past benefit."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.core.offload import widened

RULES = ("similar", "random", "worst", "none")


def cosine(v: jax.Array, i: Any) -> jax.Array:
    """Cosine similarity between row `i` of `v` [N, D] and every row.

    Returns an array of shape [N], at least float32, whose entry `i` is exactly 1.
    """
    v = widened(v)
    unit = v / jnp.maximum(jnp.linalg.norm(v, axis=1, keepdims=True), 1e-12)
    return jnp.matmul(unit, unit[i], precision="highest").at[i].set(1.0)


def cosines(v: jax.Array) -> jax.Array:
    """Cosine similarities of all pairs of rows of `v` [N, D], as an array of shape [N, N]."""
    return jax.vmap(cosine, (None, 0))(v, jnp.arange(len(v)))


def candidates(
    order: jax.Array, minimum: int, similar: jax.Array, allowed: jax.Array, i: Any
) -> jax.Array:
    """Selects the clients whose models client i mixes. Returns bool [N].

    These are the similar clients and the first `minimum` in the order, if they are allowed.

    Args:
      order: Array of shape [N]; a larger value comes first. Client i always comes first.
      minimum: Number of clients to select even if they are not similar, client i included.
      similar: Bool array of shape [N], the clients similar to client i.
      allowed: Bool array of shape [N]; no other client is selected.
      i: Id of the client that mixes.
    """
    order = jnp.where(allowed, order, -jnp.inf).at[i].set(jnp.inf)
    rank = jnp.argsort(jnp.argsort(-order, stable=True))
    return allowed & (similar | (rank < minimum))


def select_peers(
    affinity: jax.Array, free: jax.Array, peers: int, epsilon: jax.Array, key: jax.Array
) -> jax.Array:
    """Selects distinct clients, each by affinity or, with probability ε, at random.

    Equal affinities, as in the first round, are ordered at random.

    Args:
      affinity: Array of shape [N]; a larger value comes first.
      free: Bool array of shape [N], the clients to select from.
      peers: Number of clients to select.
      epsilon: ε, the probability that a selection ignores affinity.
      key: Random key.

    Returns:
      Client ids, int32 [peers].
    """

    def select(free: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Selects one client; returns (the clients still free, its id)."""
        explore_key, order_key = jax.random.split(key)
        best = jnp.max(jnp.where(free, affinity, -jnp.inf))
        eligible = free & (jax.random.bernoulli(explore_key, epsilon) | (affinity == best))
        selected = jnp.argmax(jnp.where(eligible, jax.random.uniform(order_key, free.shape), -1.0))
        return free.at[selected].set(False), selected

    return jax.lax.scan(select, free, jax.random.split(key, peers))[1]
