"""Optimisation over the probability simplex: vectors of nonnegative weights that sum to 1."""

import jax
import jax.numpy as jnp


def project(y: jax.Array, allowed: jax.Array) -> jax.Array:
    """Computes argmin_x ‖x − y‖² over x ≥ 0 with Σ x = 1.

    Args:
      y: Array of shape [K].
      allowed: bool [K]; x is 0 where False.

    Returns:
      x of shape [K], or zeros if no entry is allowed.
    """
    # The projection does not change if y is shifted; a maximum of 0 keeps digits of large values.
    y = y - jnp.max(y, initial=-1e30, where=allowed)
    descending = -jnp.sort(-jnp.where(allowed, y, -jnp.inf))
    counts = jnp.arange(1, y.shape[0] + 1, dtype=y.dtype)
    threshold = (jnp.cumsum(jnp.where(jnp.isfinite(descending), descending, 0.0)) - 1) / counts
    positive = jnp.maximum(jnp.sum(descending > threshold), 1)
    return jnp.where(allowed, jnp.maximum(y - threshold[positive - 1], 0.0), 0.0)


def minimize_quadratic(matrix: jax.Array, allowed: jax.Array, steps: int = 1000) -> jax.Array:
    """Approximates argmin_x xᵀ A x over x ≥ 0 with Σ x = 1.

    Uses projected gradient descent with momentum, restarted whenever the momentum points uphill.

    References: O'Donoghue and Candès, "Adaptive Restart for Accelerated Gradient Schemes" (2015).

    Args:
      matrix: A, positive semidefinite, of shape [K, K].
      allowed: bool [K]; x is 0 where False.
      steps: Number of gradient steps.

    Returns:
      x of shape [K], or zeros if no entry is allowed.
    """
    matrix = jnp.where(allowed[:, None] & allowed[None], matrix, 0.0)
    lipschitz = jnp.maximum(jnp.max(jnp.sum(jnp.abs(matrix), 1)), 1e-30)

    def step(_: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, lookahead, t = carry
        gradient = jnp.dot(matrix, lookahead, precision="highest")
        new_x = project(lookahead - gradient / lipschitz, allowed)
        uphill = jnp.dot(lookahead - new_x, new_x - x) > 0
        t = jnp.where(uphill, 1.0, t)
        new_t = (1 + jnp.sqrt(1 + 4 * t**2)) / 2
        momentum = jnp.where(uphill, 0.0, (t - 1) / new_t)
        return new_x, new_x + momentum * (new_x - x), new_t

    start = project(jnp.zeros(allowed.shape, matrix.dtype), allowed)
    return jax.lax.fori_loop(0, steps, step, (start, start, jnp.ones((), matrix.dtype)))[0]
