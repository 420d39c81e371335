"""MOON against NumPy, on the network (x A) B with features x A."""

from functools import partial

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.moon import Client, cosine
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.errors import UsageError
from tests.algorithms import linear
from tests.algorithms.linear import HEAD, A, X, Y, deep, kernels, train_client

RATE, STEPS, MU, TEMPERATURE = 0.2, 3, 0.7, 0.4
PREVIOUS = np.array([[0.1, 0.9], [-0.6, 0.4]])  # kernel A of the client's previous model


def cosines(a, b):
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def objective(model):
    """Returns cross-entropy plus the contrastive loss as the paper writes it."""
    z = X @ model["a"]
    to_received = np.exp(cosines(z, X @ A) / TEMPERATURE)
    to_previous = np.exp(cosines(z, X @ PREVIOUS) / TEMPERATURE)
    cross_entropy = -np.log(linear.softmax(z @ model["head"])[np.arange(len(Y)), Y])
    return np.mean(cross_entropy - MU * np.log(to_received / (to_received + to_previous)))


def test_one_round_by_hand():
    algorithm, data = linear.make_classifier("moon", mu=MU, temperature=TEMPERATURE)
    model = {"a": A.copy(), "head": HEAD.copy()}
    losses = []
    for _ in range(STEPS):
        losses.append(objective(model))
        slopes = linear.central_differences(partial(objective, model), model)
        model = {name: model[name] - RATE * slopes[name] for name in model}
    result = train_client(algorithm, deep(A, HEAD), Client(deep(PREVIOUS, HEAD), ()), data)
    body, head = kernels(result.upload)
    np.testing.assert_allclose(body, model["a"], rtol=2e-6)
    np.testing.assert_allclose(head, model["head"], rtol=2e-6)
    np.testing.assert_allclose(result.metrics["loss"], np.mean(losses), rtol=2e-6)
    # The client keeps its model for the next round.
    chex.assert_trees_all_equal(result.client.previous, result.upload)
    # The server averages by examples.
    second_upload = deep(3 * A, HEAD)
    state = State(deep(A, HEAD), (), ())
    state = linear.receive(algorithm, state, [4, 1], [result.upload, second_upload], [True, True])
    np.testing.assert_allclose(kernels(state.server)[0], (4 * body + 3 * A) / 5, rtol=1e-6)


def test_only_the_model_is_sent():
    algorithm, data = linear.make_classifier("moon")
    state = algorithm.init(linear.KEY)
    payload = algorithm.send(state._replace(clients=()), linear.context(data))
    chex.assert_trees_all_equal(payload, state.server)
    result = train_client(algorithm, payload, trees.row(state.clients, 0), data)
    traffic = algorithm.traffic(payload, result.upload)
    assert traffic.down == traffic.up == {"body": 4 * 4, "head": 4 * 6}


def test_the_cosine_of_a_zero_vector_is_zero():
    a, b = jnp.float32([[3, 4], [0, 0], [1e-3, 0]]), jnp.float32([[4, 3], [1, 0], [-1e-3, 0]])
    np.testing.assert_allclose(cosine(a, b), [0.96, 0.0, -1.0], rtol=1e-6)


def test_a_network_without_features_is_refused():
    _, federation = linear.federated([X], [Y])
    network = linear.Deep(outputs=3, width=2)
    object.__setattr__(network, "head", "nothing")
    with pytest.raises(UsageError, match=r"^moon compares the inputs of the head"):
        algorithms.moon(network, local_training.sgd(steps=1), federation)
