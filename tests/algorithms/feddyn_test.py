"""FedDyn: local training, server and limit."""

import numpy as np

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.feddyn import Client
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import KEY, train_client, variables, weights
from tests.algorithms.scaffold_test import MINIMUM, RATE, STEPS, XS, YS

ALPHA = 0.5


def make(steps=STEPS):
    training = local_training.sgd(learning_rate=RATE, batch_size=1, steps=steps)
    return linear.make("feddyn", XS, YS, training, alpha=ALPHA)


def params(w):
    return variables([w])["params"]


def test_local_training_by_hand():
    algorithm, data = make()
    result = train_client(algorithm, variables([1.0]), Client(params(-0.4), ()), data)
    theta = 1.0
    for _ in range(STEPS):
        theta -= RATE * (theta - 3 + 0.4 + ALPHA * (theta - 1.0))
    np.testing.assert_allclose(weights(result.upload), [theta], rtol=1e-6)
    g = weights({"params": result.client.g})
    np.testing.assert_allclose(g, [-0.4 - ALPHA * (theta - 1.0)], rtol=1e-6)


def test_the_server_by_hand():
    """w = 10, h = 1, uploads 12 and 17; one client absent, one held out.

    h = 1 − 0.5/3 · 9 and w = 14.5 − h/0.5.
    """
    data, federation = linear.federated([[[1.0]]] * 4, [[0.0]] * 4)
    federation = federation._replace(active=np.arange(4) < 3)
    training = local_training.sgd(learning_rate=RATE, batch_size=1, steps=STEPS)
    algorithm = algorithms.feddyn(linear.Linear(), training, federation, alpha=ALPHA)
    state = State({**variables([10.0]), "drift": params(1.0)}, (), ())
    uploads = [variables([w]) for w in (12.0, 17.0, 99.0, 99.0)]
    arrived = [True, True, False, False]
    server = linear.receive(algorithm, state, data.train.size, uploads, arrived).server
    np.testing.assert_allclose(weights({"params": server["drift"]}), [-0.5], rtol=1e-6)
    np.testing.assert_allclose(weights(server), [14.5 + 1.0], rtol=1e-6)
    assert set(algorithm.send(state, None)) == {"params"}
    assert set(algorithm.personalize(state, (), None)) == {"params"}


def test_a_group_without_clients_that_train_has_no_drift():
    _, federation = linear.federated(XS, YS)
    federation = federation._replace(active=np.zeros(len(XS), bool))
    method = algorithms.feddyn(linear.Linear(), local_training.sgd(steps=1), federation)
    np.testing.assert_array_equal(weights({"params": method.init(KEY).server["drift"]}), 0)


def test_it_converges_to_the_minimum_of_the_sum():
    """Each client takes enough steps to solve its problem."""
    algorithm, data = make(steps=100)
    state, _ = linear.run_rounds(algorithm, algorithm.init(KEY), data, [1, 1], 60)
    np.testing.assert_allclose(weights(state.server)[0], MINIMUM, rtol=1e-4)
    g = np.asarray(state.clients.g["fc"]["kernel"])[:, 0, 0]
    np.testing.assert_allclose(g, [MINIMUM - 3, 4 * (MINIMUM - 1)], rtol=1e-3)  # the slopes
