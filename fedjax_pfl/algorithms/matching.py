"""Who resembles whom, by one vector of each client."""

from typing import Any

import jax
import jax.numpy as jnp


def cosine(v: jax.Array, i: Any) -> jax.Array:
    """Of row i of v [N, D] with every row: [N], exactly 1 with itself."""
    unit = v / jnp.maximum(jnp.linalg.norm(v, axis=1, keepdims=True), 1e-12)
    return jnp.matmul(unit, unit[i], precision="highest").at[i].set(1.0)


def candidates(
    order: jax.Array, minimum: int, likes: jax.Array, allowed: jax.Array, i: Any
) -> jax.Array:
    """bool [N]: those that are liked, or among the first `minimum`, of those that are allowed.

    order: [N], larger is better; client i itself is always first.
    """
    order = jnp.where(allowed, order, -jnp.inf).at[i].set(jnp.inf)
    place = jnp.argsort(jnp.argsort(-order, stable=True))
    return allowed & (likes | (place < minimum))
