"""SCAFFOLD: the paper's option II, its server, and its limit."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.scaffold import Client
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import KEY, train_client, variables, weights

RATE, STEPS = 0.1, 5
# f_1 = ½ (w − 3)², f_2 = ½ (2w − 2)²: of their sum w = 7/5 is the least
XS, YS, BEST = [[[1.0]], [[2.0]]], [[3.0], [2.0]], 7 / 5


def make(name="scaffold", xs=XS, ys=YS, active=True, **settings):
    data, federation = linear.federated(xs, ys)
    federation = federation._replace(active=federation.active & np.asarray(active))
    training = local_training.sgd(learning_rate=RATE, batch_size=1, steps=STEPS)
    algorithm = getattr(algorithms, name)(linear.Linear(), training, federation, **settings)
    return algorithm, data, federation.counts


def control(w):
    return variables([w])["params"]


def test_local_training_is_option_2_of_the_paper():
    algorithm, data, _ = make()
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


def test_the_server_by_hand():
    """x = 10, c = 1, uploads 2 and 6 with changes 0.3 and −0.9, one client absent."""
    algorithm, _, counts = make(xs=[[[1.0]]] * 3, ys=[[0.0]] * 3, server_rate=0.5)
    uploads = [
        {**variables([y]), "control_change": control(d)}
        for y, d in ((2.0, 0.3), (6.0, -0.9), (99.0, 9.0))
    ]
    state = State({**variables([10.0]), "control": control(1.0)}, (), ())
    server = linear.receive(algorithm, state, counts, uploads, [True, True, False]).server
    np.testing.assert_allclose(weights(server), [0.5 * 10 + 0.5 * 4], rtol=1e-6)
    np.testing.assert_allclose(weights({"params": server["control"]}), [1 - 0.6 / 3], rtol=1e-6)


def test_held_out_clients_do_not_count():
    algorithm, _, counts = make(xs=[[[1.0]]] * 3, ys=[[0.0]] * 3, active=[True, True, False])
    uploads = [{**variables([2.0]), "control_change": control(0.5)}] * 3
    state = State({**variables([2.0]), "control": control(0.0)}, (), ())
    server = linear.receive(algorithm, state, counts, uploads, [True, False, False]).server
    np.testing.assert_allclose(weights({"params": server["control"]}), [0.5 / 2], rtol=1e-6)


def test_it_converges_to_the_minimum_and_fedavg_does_not():
    ends = []
    for name in ("scaffold", "fedavg"):
        algorithm, data, counts = make(name)
        state = linear.run_rounds(algorithm, algorithm.init(KEY), data, counts, 60)
        ends.append(weights(state.server)[0])
    np.testing.assert_allclose(ends[0], BEST, rtol=1e-5)
    assert abs(ends[1] - BEST) > 0.1


def test_a_client_without_steps_keeps_its_control_variate():
    algorithm, data, _ = make()
    empty = data._replace(train=data.train._replace(size=0 * data.train.size))
    payload = {**variables([1.0]), "control": control(0.7)}
    result = train_client(algorithm, payload, Client(control(-0.4), ()), empty)
    np.testing.assert_array_equal(weights({"params": result.client.control}), np.float32([-0.4]))
    np.testing.assert_array_equal(weights(result.variables), [1.0])


def test_a_later_phase_continues_the_control_variates():
    algorithm, *_ = make()
    clients = Client(jax.tree.map(lambda leaf: jnp.stack([leaf, 3 * leaf]), control(1.0)), ())
    state = algorithm.init(KEY, State({**variables([5.0]), "control": control(2.0)}, (), clients))
    np.testing.assert_array_equal(weights({"params": trees.row(state.clients.control, 1)}), [3.0])
    np.testing.assert_array_equal(weights({"params": state.server["control"]}), [2.0])
