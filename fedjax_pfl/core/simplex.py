"""Weights that are not negative and come to 1: the nearest ones, and those of least square."""

import jax
import jax.numpy as jnp


def project(y: jax.Array, among: jax.Array) -> jax.Array:
    """argmin_x ‖x − y‖² over x ≥ 0 with Σ x = 1, where x is 0 but `among` these places.

    Args:
      y: [K]. among: bool [K].
    """
    # A shift changes nothing, and with the largest at 0 large ones lose no digits.
    y = y - jnp.max(y, initial=-1e30, where=among)
    falling = -jnp.sort(-jnp.where(among, y, -jnp.inf))
    counted = jnp.arange(1, y.shape[0] + 1, dtype=y.dtype)
    level = (jnp.cumsum(jnp.where(jnp.isfinite(falling), falling, 0.0)) - 1) / counted
    positive = jnp.maximum(jnp.sum(falling > level), 1)
    return jnp.where(among, jnp.maximum(y - level[positive - 1], 0.0), 0.0)


def minimize_quadratic(form: jax.Array, among: jax.Array, steps: int = 1000) -> jax.Array:
    """argmin_x xᵀ A x over x ≥ 0 with Σ x = 1, where x is 0 but `among` these places.

    By projected gradients with momentum, which starts anew where it leads uphill (O'Donoghue and
    Candès, 2015).

    Args:
      form: A, [K, K], symmetric and not negative. among: bool [K].
    """
    form = jnp.where(among[:, None] & among[None], form, 0.0)
    longest = jnp.maximum(jnp.max(jnp.sum(jnp.abs(form), 1)), 1e-30)

    def step(_: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, ahead, t = now
        slope = jnp.dot(form, ahead, precision="highest")
        new = project(ahead - slope / longest, among)
        uphill = jnp.dot(ahead - new, new - x) > 0
        t = jnp.where(uphill, 1.0, t)
        following = (1 + jnp.sqrt(1 + 4 * t**2)) / 2
        momentum = jnp.where(uphill, 0.0, (t - 1) / following)
        return new, new + momentum * (new - x), following

    begin = project(jnp.zeros(among.shape, form.dtype), among)
    return jax.lax.fori_loop(0, steps, step, (begin, begin, jnp.ones((), form.dtype)))[0]
