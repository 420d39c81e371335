"""SCAFFOLD: the paper's option II, its server, and its limit."""

import numpy as np

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.scaffold import Client
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import KEY, train_client, variables, weights

RATE, STEPS = 0.1, 5
# f_1 = ½ (w − 3)² and f_2 = ½ (2w − 2)²; the sum has its minimum at 7/5.
XS, YS, MINIMUM = [[[1.0]], [[2.0]]], [[3.0], [2.0]], 7 / 5


def make(name="scaffold", xs=XS, ys=YS, **settings):
    training = local_training.sgd(learning_rate=RATE, batch_size=1, steps=STEPS)
    return linear.make(name, xs, ys, training, **settings)


def control(w):
    return variables([w])["params"]


def test_local_training_is_option_2_of_the_paper():
    algorithm, data = make()
    payload = {**variables([1.0]), "control": control(0.7)}
    result = train_client(algorithm, payload, Client(control(-0.4), ()), data)
    y = 1.0
    for _ in range(STEPS):
        y -= RATE * (y - 3 + 0.4 + 0.7)
    c_i = -0.4 - 0.7 + (1.0 - y) / (STEPS * RATE)
    np.testing.assert_allclose(weights(result.variables), [y], rtol=1e-6)
    np.testing.assert_allclose(weights({"params": result.client.control}), [c_i], rtol=1e-6)
    change = weights({"params": result.upload["control_change"]})
    np.testing.assert_allclose(change, [c_i + 0.4], rtol=1e-6)
    assert set(result.variables) == {"params"}
    # A client without examples keeps its control variate.
    empty = data._replace(train=data.train._replace(size=0 * data.train.size))
    result = train_client(algorithm, payload, Client(control(-0.4), ()), empty)
    np.testing.assert_array_equal(weights({"params": result.client.control}), np.float32([-0.4]))
    np.testing.assert_array_equal(weights(result.variables), [1.0])


def test_the_server_by_hand():
    """x = 10, c = 1, uploads 2 and 6 with changes 0.3 and −0.9; one client absent, one held out."""
    data, federation = linear.federated([[[1.0]]] * 4, [[0.0]] * 4)
    federation = federation._replace(active=np.arange(4) < 3)
    training = local_training.sgd(learning_rate=RATE, batch_size=1, steps=STEPS)
    algorithm = algorithms.scaffold(linear.Linear(), training, federation, server_rate=0.5)
    uploads = [
        {**variables([y]), "control_change": control(d)}
        for y, d in ((2.0, 0.3), (6.0, -0.9), (99.0, 9.0), (99.0, 9.0))
    ]
    state = State({**variables([10.0]), "control": control(1.0)}, (), ())
    arrived = [True, True, False, False]
    server = linear.receive(algorithm, state, data.train.size, uploads, arrived).server
    np.testing.assert_allclose(weights(server), [0.5 * 10 + 0.5 * 4], rtol=1e-6)
    np.testing.assert_allclose(weights({"params": server["control"]}), [1 - 0.6 / 3], rtol=1e-6)


def test_without_an_active_client_the_control_variate_is_zero():
    """A group of clients has none in a phase of held-out clients of other groups."""
    federation = linear.federated([[[1.0]]] * 2, [[0.0]] * 2)[1]
    federation = federation._replace(active=np.zeros(2, bool))
    training = local_training.sgd(learning_rate=RATE, batch_size=1, steps=STEPS)
    state = algorithms.scaffold(linear.Linear(), training, federation).init(KEY)
    np.testing.assert_array_equal(weights({"params": state.server["control"]}), [0.0])


def test_it_converges_to_the_minimum_and_fedavg_does_not():
    limits = []
    for name in ("scaffold", "fedavg"):
        algorithm, data = make(name)
        state, _ = linear.run_rounds(algorithm, algorithm.init(KEY), data, [1, 1], 60)
        limits.append(weights(state.server)[0])
    np.testing.assert_allclose(limits[0], MINIMUM, rtol=1e-5)
    assert abs(limits[1] - MINIMUM) > 0.1
