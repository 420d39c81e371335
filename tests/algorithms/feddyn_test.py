"""FedDyn: a visit and the server by hand, and where it ends."""

import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.feddyn import Client
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.errors import UsageError
from tests.algorithms import linear
from tests.algorithms.linear import KEY, variables, weights, work

RATE, STEPS, ALPHA = 0.1, 5, 0.5
XS, YS, BEST = [[[1.0]], [[2.0]]], [[3.0], [2.0]], 7 / 5  # as SCAFFOLD's


def make(xs=XS, ys=YS, steps=STEPS, alpha=ALPHA):
    data, federation = linear.federated(xs, ys)
    training = local_training.sgd(learning_rate=RATE, batch_size=1, steps=steps)
    made = algorithms.feddyn(linear.Linear(), training, federation, alpha=alpha)
    return made, data, federation.counts


def params(w):
    return variables([w])["params"]


def test_a_visit_by_hand():
    made, data, _ = make()
    done = work(made, variables([1.0]), Client(params(-0.4), ()), data)
    theta = 1.0
    for _ in range(STEPS):
        theta -= RATE * (theta - 3 + 0.4 + ALPHA * (theta - 1.0))
    np.testing.assert_allclose(weights(done.upload), [theta], rtol=1e-6)
    own = weights({"params": done.client.own})
    np.testing.assert_allclose(own, [-0.4 - ALPHA * (theta - 1.0)], rtol=1e-6)


def test_the_server_by_hand():
    """w = 10, h = 1; 12 and 17 arrive of three: h = 1 − .5/3 · 9, w = 14.5 − h/.5."""
    made, _, counts = make(xs=[[[1.0]]] * 3, ys=[[0.0]] * 3)
    state = State({**variables([10.0]), "drift": params(1.0)}, (), ())
    uploads = [variables([w]) for w in (12.0, 17.0, 99.0)]
    server = linear.met(made, state, counts, uploads, [True, True, False]).server
    np.testing.assert_allclose(weights({"params": server["drift"]}), [-0.5], rtol=1e-6)
    np.testing.assert_allclose(weights(server), [14.5 + 1.0], rtol=1e-6)
    assert set(made.send(state, None)) == {"params"} == set(made.personalize(state, (), None))


def test_it_ends_where_the_sum_is_least():
    """With as many steps as it takes to solve each client's problem."""
    made, data, counts = make(steps=100)
    state = linear.play(made, made.init(KEY), data, counts, 60)
    np.testing.assert_allclose(weights(state.server)[0], BEST, rtol=1e-4)
    own = np.asarray(state.clients.own["fc"]["kernel"])[:, 0, 0]
    np.testing.assert_allclose(own, [BEST - 3, 4 * (BEST - 1)], rtol=1e-3)  # each client's slope


def test_alpha_of_zero_is_refused():
    with pytest.raises(UsageError, match=r"feddyn.alpha is 0.0"):
        make(alpha=0.0)
