"""APFL on a scalar quadratic, and its limits α = 0 and α = 1."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.apfl import Client
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import KEY, train_client, variables, weights

RATE, TARGET = 0.1, 3.0


def make(name="apfl", xs=((1.0,),), ys=(TARGET,), training=None, **settings):
    data, federation = linear.federated([xs], [ys])
    training = training or local_training.sgd(learning_rate=RATE, batch_size=1, steps=3)
    return getattr(algorithms, name)(linear.Linear(), training, federation, **settings), data


@pytest.mark.parametrize("alpha_rate", [0.0, 0.2])
def test_three_steps_by_hand(alpha_rate):
    """f(w) = ½ (w − 3)². All three updates use the values before the step."""
    algorithm, data = make(alpha=0.25, alpha_rate=alpha_rate)
    result = train_client(
        algorithm, variables([1.0]), Client(variables([2.0]), jnp.float32(0.25), ()), data
    )
    w, v, alpha = 1.0, 2.0, 0.25
    for _ in range(3):
        slope = alpha * v + (1 - alpha) * w - TARGET
        w, v, alpha = (
            w - RATE * (w - TARGET),
            v - RATE * alpha * slope,
            np.clip(alpha - alpha_rate * (v - w) * slope, 0, 1),
        )
    np.testing.assert_allclose(weights(result.upload), [w], rtol=1e-6)
    np.testing.assert_allclose(weights(result.client.variables), [v], rtol=1e-6)
    np.testing.assert_allclose(result.client.alpha, alpha, rtol=1e-6)
    np.testing.assert_allclose(weights(result.variables), [alpha * v + (1 - alpha) * w], rtol=1e-6)
    served = algorithm.personalize(State(variables([5.0]), (), ()), result.client, None)
    np.testing.assert_allclose(weights(served), [alpha * v + (1 - alpha) * 5], rtol=1e-6)


def test_alpha_is_clipped():
    algorithm, data = make(alpha=0.9, alpha_rate=10.0)
    result = train_client(
        algorithm, variables([1.0]), Client(variables([2.0]), jnp.float32(0.9), ()), data
    )
    assert result.client.alpha == 1.0


def test_alpha_1_equals_local_and_w_equals_fedavg():
    """Exact equality, with kept momentum, decay, clipping and a short last batch."""
    training = local_training.sgd(
        learning_rate=0.1,
        momentum=0.9,
        weight_decay=0.01,
        clip_norm=1.0,
        batch_size=2,
        epochs=2,
        keep_optimizer=True,
    )
    xs, ys = [[1.0, 0.5], [0.2, -1.0], [0.3, 2.0]], [3.0, 1.0, -2.0]

    def train(name, **settings):
        algorithm, data = make(name, xs, ys, training, **settings)
        state = algorithm.init(KEY)
        return train_client(algorithm, state.server, trees.row(state.clients, 0), data)

    fedavg, local = train("fedavg"), train("local")
    alpha_1, alpha_0 = train("apfl", alpha=1.0), train("apfl", alpha=0.0)
    for result in (alpha_1, alpha_0):
        chex.assert_trees_all_equal(result.upload, fedavg.upload)
        chex.assert_trees_all_equal(result.client.momentum["w"], fedavg.client)
    chex.assert_trees_all_equal(alpha_1.variables, local.variables)
    chex.assert_trees_all_equal(alpha_1.client.variables, local.variables)
    chex.assert_trees_all_equal(alpha_0.variables, fedavg.variables)
