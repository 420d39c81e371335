"""FedDyn: local training and server by hand, and its limit."""

import numpy as np

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.feddyn import Client
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import KEY, train_client, variables, weights

RATE, STEPS, ALPHA = 0.1, 5, 0.5
XS, YS, BEST = [[[1.0]], [[2.0]]], [[3.0], [2.0]], 7 / 5  # as SCAFFOLD's


def make(xs=XS, ys=YS, steps=STEPS, alpha=ALPHA):
    data, federation = linear.federated(xs, ys)
    training = local_training.sgd(learning_rate=RATE, batch_size=1, steps=steps)
    algorithm = algorithms.feddyn(linear.Linear(), training, federation, alpha=alpha)
    return algorithm, data, federation.counts


def params(w):
    return variables([w])["params"]


def test_local_training_by_hand():
    algorithm, data, _ = make()
    result = train_client(algorithm, variables([1.0]), Client(params(-0.4), ()), data)
    theta = 1.0
    for _ in range(STEPS):
        theta -= RATE * (theta - 3 + 0.4 + ALPHA * (theta - 1.0))
    np.testing.assert_allclose(weights(result.upload), [theta], rtol=1e-6)
    g = weights({"params": result.client.g})
    np.testing.assert_allclose(g, [-0.4 - ALPHA * (theta - 1.0)], rtol=1e-6)


def test_the_server_by_hand():
    """w = 10, h = 1, uploads 12 and 17, one client absent: h = 1 − 0.5/3 · 9, w = 14.5 − h/0.5."""
    algorithm, _, counts = make(xs=[[[1.0]]] * 3, ys=[[0.0]] * 3)
    state = State({**variables([10.0]), "drift": params(1.0)}, (), ())
    uploads = [variables([w]) for w in (12.0, 17.0, 99.0)]
    server = linear.receive(algorithm, state, counts, uploads, [True, True, False]).server
    np.testing.assert_allclose(weights({"params": server["drift"]}), [-0.5], rtol=1e-6)
    np.testing.assert_allclose(weights(server), [14.5 + 1.0], rtol=1e-6)
    assert (
        set(algorithm.send(state, None))
        == {"params"}
        == set(algorithm.personalize(state, (), None))
    )


def test_it_converges_to_the_minimum_of_the_sum():
    """Each client takes enough steps to solve its problem."""
    algorithm, data, counts = make(steps=100)
    state = linear.run_rounds(algorithm, algorithm.init(KEY), data, counts, 60)
    np.testing.assert_allclose(weights(state.server)[0], BEST, rtol=1e-4)
    g = np.asarray(state.clients.g["fc"]["kernel"])[:, 0, 0]
    np.testing.assert_allclose(g, [BEST - 3, 4 * (BEST - 1)], rtol=1e-3)  # each client's slope
