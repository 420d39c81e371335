"""FedAMP against NumPy: four clients with two weights each, one of them held out."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.local import LocalClient
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import ClientContext, State
from tests.algorithms import linear
from tests.algorithms.linear import KEY, T, train_client, variables, weights

MODELS = np.array([[1.0, 0.0], [0.6, 0.8], [0.0, -2.0], [5.0, 5.0]])


def make(**settings):
    data, federation = linear.federated([[[1.0, 0.0]]] * 4, [[3.0]] * 4)
    training = local_training.sgd(learning_rate=0.1, batch_size=1, steps=2)
    federation = federation._replace(active=np.array([True, True, True, False]))
    return algorithms.fedamp(linear.Linear(), training, federation, **settings), data


def rows():
    return jax.tree.map(lambda *a: jnp.stack(a), *(variables(m) for m in MODELS))


def expected(attention, sigma, i):
    peers = [j for j in range(3) if j != i]
    if attention == "cosine":
        unit = MODELS / np.linalg.norm(MODELS, axis=1, keepdims=True)
        powers = np.exp([sigma * unit[i] @ unit[j] for j in peers])
        xi = 0.7 * powers / powers.sum()
    else:
        xi = 0.4 / sigma * np.exp([-((MODELS[i] - MODELS[j]) ** 2).sum() / sigma for j in peers])
        assert xi.sum() < 1
    return MODELS[peers].T @ xi + (1 - xi.sum()) * MODELS[i]


@pytest.mark.parametrize("attention", ["cosine", "distance"])
def test_the_download_is_the_mixture(attention):
    """It contains the models of active clients and the own one, also for a held-out client."""
    algorithm, _ = make(attention=attention, sigma=2.0, self_weight=0.3, alpha=0.4)
    state = State((), rows(), ())
    for i in (0, 1, 2):
        got = algorithm.send(state, ClientContext(i, None, T, KEY))
        np.testing.assert_allclose(weights(got), expected(attention, 2.0, i), rtol=1e-5, atol=1e-6)
    xi = np.asarray(algorithm.observe(state)["xi"])
    np.testing.assert_allclose(xi.sum(1), 1, rtol=1e-6)
    assert (xi[:3, 3] == 0).all()
    assert xi[3, 3] > 0


def test_weights_of_others_sum_to_at_most_1():
    algorithm, _ = make(attention="distance", sigma=100.0, alpha=1e4)
    xi = np.asarray(algorithm.observe(State((), rows(), ()))["xi"])[0]
    np.testing.assert_allclose(xi[[0, 3]], 0, atol=1e-6)
    np.testing.assert_allclose(xi[1] / xi[2], np.exp(-(0.8 - 5.0) / 100), rtol=1e-5)


def test_two_steps_by_hand_and_the_server():
    """f = ½ (θ₀ − 3)² from θ = (1, 1), u = (2, 0), λ/α = 0.5/0.25 = 2."""
    algorithm, data = make(penalty=0.5, alpha=0.25)
    result = train_client(
        algorithm, variables([2.0, 0.0]), LocalClient(variables([1.0, 1.0]), ()), data
    )
    theta = np.array([1.0, 1.0])
    for _ in range(2):
        theta = theta - 0.1 * (np.array([theta[0] - 3, 0]) + 2 * (theta - [2, 0]))
    np.testing.assert_allclose(weights(result.variables), theta, rtol=1e-6)
    chex.assert_trees_all_equal(result.upload, result.client.variables)
    assert algorithm.kept_change == 1  # the next training starts from the same model
    uploads = [result.upload] * 4
    new_state = linear.receive(
        algorithm, State((), rows(), ()), [1] * 4, uploads, [True, False, False, False]
    )
    np.testing.assert_allclose(weights(new_state.rows)[0], theta, rtol=1e-6)
    np.testing.assert_array_equal(weights(new_state.rows)[1:], np.float32(MODELS[1:]))
