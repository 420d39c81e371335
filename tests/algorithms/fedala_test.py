"""FedALA on f = ½ (x a b − y)²: W mixes the head b, the body a is the downloaded one."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.fedala import Client, Mixing
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import KEY, context, deep, kernels, train_client

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


@pytest.mark.parametrize(
    ("first", "weight", "passes", "rate"),
    [(True, 1.0, 3, 0.3), (False, 0.9, 1, 0.3), (False, 0.9, 1, 100.0)],
)
def test_local_training_by_hand(first, weight, passes, rate):
    """Three passes the first time W is learned, later one. W is clipped."""
    algorithm, data = make(weight_rate=rate)
    result = train_client(algorithm, deep([[A]], [[B]]), clients(weight, not first), data)
    weight = learned(weight, passes, rate)
    assert (0 < weight < 1) == (rate < 1)
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


def test_the_served_mixture_and_equal_models():
    algorithm, data = make()
    state = State(deep([[A]], [[B]]), (), ())
    served = algorithm.personalize(state, clients(), context(data))
    weight = learned(1.0, 3, 0.3)
    expected = [A, weight * B + (1 - weight) * CLIENT_HEAD]
    np.testing.assert_allclose(np.ravel(kernels(served)), expected, rtol=1e-5)
    # Equal models do not count as learning.
    mixing = train_client(algorithm, deep([[A]], [[CLIENT_HEAD]]), clients(), data).client.mixing
    assert not bool(mixing.learned)
    np.testing.assert_array_equal(mixing.weights["head"]["kernel"], [[1.0]])


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
