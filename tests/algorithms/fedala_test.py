"""FedALA on f = ½ (x a b − y)²: W mixes the head b, the body a is the downloaded one."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.fedala import Client, Mixing
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from tests import cases, tiny
from tests.algorithms import linear
from tests.algorithms.linear import KEY, context, deep, kernels, train_client
from tests.algorithms.served import trained

X, Y, RATE = 1.5, 3.0, 0.1
A, B, CLIENT_HEAD = 0.8, 3.0, 0.5  # the global model's body and head; the client's head


def make(**settings):
    data, federation = linear.federated([[[X]]], [[Y]])
    training = local_training.sgd(learning_rate=RATE, batch_size=1, epochs=2)
    settings = {"weight_rate": 0.3, "first_passes": 3, **settings}
    return algorithms.fedala(linear.Deep(), training, federation, **settings), data


def clients(weight=1.0, learned=False, head=CLIENT_HEAD):
    layer = {"head": {"kernel": jnp.float32([[head]])}}
    weights = {"head": {"kernel": jnp.float32([[weight]])}}
    return Client(Mixing(layer, weights, jnp.asarray(learned)), ())


def learned(weight, passes, rate):
    for _ in range(passes):
        mixed = weight * B + (1 - weight) * CLIENT_HEAD
        weight = np.clip(weight - rate * (B - CLIENT_HEAD) * (X * A * mixed - Y) * X * A, 0, 1)
    return weight


@pytest.mark.parametrize(("first", "weight", "passes"), [(True, 1.0, 3), (False, 0.9, 1)])
def test_local_training_by_hand(first, weight, passes):
    """Three passes the first time W is learned, later one."""
    algorithm, data = make()
    result = train_client(algorithm, deep([[A]], [[B]]), clients(weight, not first), data)
    weight = learned(weight, passes, 0.3)
    assert 0 < weight < 1
    a, b = A, weight * B + (1 - weight) * CLIENT_HEAD
    for _ in range(2):
        gap = X * a * b - Y
        a, b = a - RATE * gap * X * b, b - RATE * gap * X * a
    np.testing.assert_allclose(
        result.client.mixing.weights["head"]["kernel"], [[weight]], rtol=1e-5
    )
    np.testing.assert_allclose(np.ravel(kernels(result.upload)), [a, b], rtol=1e-5)
    np.testing.assert_allclose(result.client.mixing.theta["head"]["kernel"], [[b]], rtol=1e-5)
    assert bool(result.client.mixing.learned)


def test_a_client_is_served_its_mixture():
    algorithm, data = make()
    state = State(deep([[A]], [[B]]), (), ())
    served = algorithm.personalize(state, clients(), context(data))
    weight = learned(1.0, 3, 0.3)
    np.testing.assert_allclose(
        np.ravel(kernels(served)), [A, weight * B + (1 - weight) * CLIENT_HEAD], rtol=1e-5
    )


def test_equal_models_do_not_count_as_learning():
    algorithm, data = make()
    result = train_client(algorithm, deep([[A]], [[CLIENT_HEAD]]), clients(), data)
    assert not bool(result.client.mixing.learned)
    np.testing.assert_array_equal(result.client.mixing.weights["head"]["kernel"], [[1.0]])


def test_weights_are_clipped():
    algorithm, data = make(weight_rate=100.0)
    result = train_client(algorithm, deep([[A]], [[B]]), clients(0.5, True), data)
    assert float(result.client.mixing.weights["head"]["kernel"][0, 0]) in (0.0, 1.0)


@pytest.mark.slow("three programs of the tiny network; a visit is worked out by hand above")
def test_weight_rate_0_equals_fedavg():
    """Exact equality, with BatchNorm, momentum, decay and clipping, for any client state."""
    federation = tiny.federated()[1]
    fedavg = cases.make("fedavg", federation)
    algorithm = cases.make("fedala", federation, {"weight_rate": 0.0})
    state = algorithm.init(KEY)
    theta = jax.tree.map(lambda leaf: leaf + 1, state.clients.mixing.theta)
    state = state._replace(
        clients=Client(state.clients.mixing._replace(theta=theta), state.clients.momentum)
    )
    fedala_result, fedavg_result = (
        trained(algorithm, state, 3),
        trained(fedavg, fedavg.init(KEY), 3),
    )
    chex.assert_trees_all_equal(fedala_result[:2], fedavg_result[:2])
    chex.assert_trees_all_equal(fedala_result[2].momentum, fedavg_result[2])


def test_share_selects_a_fraction_of_the_examples():
    """Each of ten examples has a gradient in one entry of W; four entries change."""
    eye = np.eye(10)
    data, federation = linear.federated([eye], [np.ones(10)])
    training = local_training.sgd(learning_rate=RATE, batch_size=4, epochs=1)
    net = linear.Deep(outputs=1, width=10)
    algorithm = algorithms.fedala(net, training, federation, share=0.4, first_passes=1)
    mixing = algorithm.init(KEY).clients.mixing
    mixing = trees.row(mixing, 0)._replace(theta={"head": {"kernel": jnp.zeros((10, 1))}})
    result = train_client(algorithm, deep(eye, np.full((10, 1), 2.0)), Client(mixing, ()), data)
    moved = np.asarray(result.client.mixing.weights["head"]["kernel"])[:, 0] != 1
    assert moved.sum() == 4
