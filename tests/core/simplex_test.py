"""Optimisation over the simplex, compared with a search over all supports in NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import simplex

ALLOWED = np.array([True, True, False, True, True])


def by_supports(matrix, linear, allowed):
    """Computes argmin xᵀ A x + b·x over the simplex from the stationary points of all supports."""
    n, best, best_x = len(linear), np.inf, None
    for size in range(1, n + 1):
        for support in itertools.combinations(np.flatnonzero(allowed), size):
            s = list(support)
            ones = np.ones((size, 1))
            system = np.block([[2 * matrix[np.ix_(s, s)], ones], [ones.T, np.zeros((1, 1))]])
            x = np.zeros(n)
            x[s] = np.linalg.lstsq(system, np.append(-linear[s], 1.0), rcond=None)[0][:size]
            value = x @ matrix @ x + linear @ x
            if (x >= -1e-12).all() and value < best:
                best, best_x = value, x
    return best_x


def test_project():
    for scale in (0.1, 1.0, 10.0):
        y = scale * np.random.default_rng(0).normal(size=5)
        x = np.asarray(simplex.project(jnp.float32(y), jnp.asarray(ALLOWED)))
        np.testing.assert_allclose(x, by_supports(np.eye(5), -2 * y, ALLOWED), atol=1e-6)
    x = simplex.project(jnp.array([0.3, 1e9, 0.0]), jnp.ones(3, bool))
    np.testing.assert_array_equal(x, [0, 1, 0])
    nothing = jnp.zeros(2, bool)
    np.testing.assert_array_equal(simplex.project(jnp.ones(2), nothing), [0, 0])
    np.testing.assert_array_equal(simplex.minimize_quadratic(jnp.eye(2), nothing, 3), [0, 0])


@pytest.mark.parametrize("variance", [0.003, 1.0])
def test_minimize_quadratic(variance):
    """Distances and variances, as in FedPAC; some weights are 0."""
    rng, zeros = np.random.default_rng(1), 0
    solve = jax.jit(simplex.minimize_quadratic)
    for _ in range(5):
        gaps = rng.normal(size=(5, 6)) + rng.normal(size=6)
        matrix = gaps @ gaps.T + variance * np.diag(rng.uniform(0.5, 1, 5))
        expected = by_supports(matrix, np.zeros(5), ALLOWED)
        x = np.asarray(solve(jnp.float32(matrix), jnp.asarray(ALLOWED)))
        np.testing.assert_allclose(x, expected, atol=2e-5)
        zeros += int((expected[ALLOWED] < 1e-9).sum())
    assert zeros > 0
