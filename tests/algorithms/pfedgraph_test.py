"""pFedGraph on quadratics and against NumPy: four clients, one of them absent."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import train_client, variables, weights
from tests.core.simplex_test import by_supports

FIRST = np.array([0.5, -0.5])
MODELS = np.array([[1.0, 0.0], [0.6, 0.8], [0.0, -2.0], [5.0, 5.0]])
COUNTS, ARRIVED = np.array([1, 3, 4, 9]), np.array([True, True, True, False])
XS = [[[1.0, 0.0]], [[0.0, 2.0]], [[1.0, 1.0]], [[-1.0, 0.5]]]
YS = [[3.0], [1.0], [-1.0], [0.5]]


def make(**settings):
    training = local_training.sgd(learning_rate=0.1, batch_size=1, steps=2)
    return linear.make("pfedgraph", XS, YS, training, **settings)


@pytest.mark.parametrize("alpha", [0.1, 8.0])
def test_mixtures_by_hand(alpha):
    """With a small α some weights are 0."""
    algorithm, _ = make(alpha=alpha)
    learned = MODELS - FIRST
    unit = learned / np.linalg.norm(learned, axis=1, keepdims=True)
    p = COUNTS * ARRIVED / COUNTS[ARRIVED].sum()
    w = np.array(
        [
            by_supports(alpha * np.eye(4), -2 * alpha * p - unit @ row, ARRIVED)
            for row in unit[ARRIVED]
        ]
    )
    assert (w[:, :3] == 0).any() == (alpha == 0.1)
    rows = jax.tree.map(lambda *a: jnp.stack(a), *[variables([7.0, 7.0])] * 4)
    state = State({"first": variables(FIRST)["params"]}, rows, ())
    new_state = linear.receive(algorithm, state, COUNTS, [variables(m) for m in MODELS], ARRIVED)
    np.testing.assert_allclose(weights(new_state.rows)[:3], w @ MODELS, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(weights(new_state.rows)[3], [7.0, 7.0])
    chex.assert_trees_all_equal(new_state.server, state.server)


def test_two_steps_by_hand():
    """f = ½ (θ₀ − 3)² − 0.4 cos(θ, u) from θ = u = (2, 1), where the gradient of cos is 0."""
    algorithm, data = make(penalty=0.4)
    u = theta = np.array([2.0, 1.0])
    for _ in range(2):
        u_norm, theta_norm = np.linalg.norm(u), np.linalg.norm(theta)
        slope = u / (u_norm * theta_norm) - (theta @ u) * theta / (u_norm * theta_norm**3)
        theta = theta - 0.1 * (np.array([theta[0] - 3, 0.0]) - 0.4 * slope)
    result = train_client(algorithm, variables(u), (), data)
    np.testing.assert_allclose(weights(result.variables), theta, rtol=1e-6)
    assert theta[1] != 1.0
    chex.assert_trees_all_equal(result.upload, result.variables)
