"""Weights on the simplex, against all supports tried one by one in NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import simplex

AMONG = np.array([True, True, False, True, True])


def by_supports(form, linear, among):
    """argmin xᵀ A x + b·x over the simplex: the best of the stationary points of all supports."""
    n, best, found = len(linear), np.inf, None
    for size in range(1, n + 1):
        for some in itertools.combinations(np.flatnonzero(among), size):
            s = list(some)
            system = np.block(
                [
                    [2 * form[np.ix_(s, s)], np.ones((size, 1))],
                    [np.ones((1, size)), np.zeros((1, 1))],
                ]
            )
            x = np.zeros(n)
            x[s] = np.linalg.lstsq(system, np.append(-linear[s], 1.0), rcond=None)[0][:size]
            value = x @ form @ x + linear @ x
            if (x >= -1e-12).all() and value < best:
                best, found = value, x
    return found


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_nearest_point(scale):
    y = scale * np.random.default_rng(0).normal(size=5)
    got = np.asarray(simplex.project(jnp.float32(y), jnp.asarray(AMONG)))
    np.testing.assert_allclose(got, by_supports(np.eye(5), -2 * y, AMONG), atol=1e-6)


def test_one_far_above_the_others_gets_exactly_everything():
    got = simplex.project(jnp.array([0.3, 1e9, 0.0]), jnp.ones(3, bool))
    np.testing.assert_array_equal(got, [0, 1, 0])


def test_among_nobody_nothing_is_not_finite():
    for made in (
        simplex.project(jnp.ones(2), jnp.zeros(2, bool)),
        simplex.minimize_quadratic(jnp.eye(2), jnp.zeros(2, bool), 3),
    ):
        np.testing.assert_array_equal(made, [0, 0])


@pytest.mark.parametrize("own", [0.003, 1.0])
def test_least_form(own):
    """Distances between points and variances, as FedPAC has them; some weights are 0."""
    rng, zeros = np.random.default_rng(1), 0
    solve = jax.jit(simplex.minimize_quadratic)
    for _ in range(5):
        gaps = rng.normal(size=(5, 6)) + rng.normal(size=6)
        form = gaps @ gaps.T + own * np.diag(rng.uniform(0.5, 1, 5))
        expected = by_supports(form, np.zeros(5), AMONG)
        got = np.asarray(solve(jnp.float32(form), jnp.asarray(AMONG)))
        np.testing.assert_allclose(got, expected, atol=2e-5)
        zeros += int((expected[AMONG] < 1e-9).sum())
    assert zeros > 0
