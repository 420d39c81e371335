"""FedBABU by hand: f = ½ (x a b − y)² with the body a and the head b."""

import chex
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.shared.split_model import Client
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import ClientContext, State
from fedjax_pfl.core.errors import UsageError
from tests.algorithms import linear
from tests.algorithms.linear import KEY, T, client, deep, kernels, work

X, Y, RATE = 1.5, 3.0, 0.1


def make(**own):
    data, federation = linear.federated([[[X]]], [[Y]])
    training = local_training.sgd(learning_rate=RATE, batch_size=1, epochs=2)
    return algorithms.fedbabu(linear.Deep(), training, federation, **own), data


def parts(a, b):
    return trees.split(deep([[a]], [[b]]), {"body"})


def descended(a, b, steps, rate, moves="ab"):
    for _ in range(steps):
        gap = X * a * b - Y
        a, b = (
            a - rate * gap * X * b * ("a" in moves),
            b - rate * gap * X * a * ("b" in moves),
        )
    return [a], [b]


def test_a_visit_trains_the_body_alone():
    made, data = make()
    body, head = parts(0.8, 0.5)
    done = work(made, body, Client(head, ()), data)
    a, b = descended(0.8, 0.5, 2, RATE, "a")
    np.testing.assert_allclose(kernels(done.upload), [[a]], rtol=1e-6)
    np.testing.assert_allclose(kernels(done.variables), [[a], [b]], rtol=1e-6)
    chex.assert_trees_all_equal(done.client.own, head)


@pytest.mark.parametrize(("tune", "moves"), [("all", "ab"), ("head", "b"), ("body", "a")])
def test_a_client_is_served_what_it_has_tuned(tune, moves):
    made, data = make(tune=tune, epochs=3, rate=0.05)
    body, head = parts(0.8, 0.5)
    got = made.personalize(
        State(body, (), ()), Client(head, ()), ClientContext(0, client(data, 0), T, KEY)
    )
    wanted = descended(0.8, 0.5, 3, 0.05, moves)
    np.testing.assert_allclose(np.ravel(kernels(got)), np.ravel(wanted), rtol=1e-6)


@pytest.mark.parametrize("own", [{"epochs": 0}, {"rate": 0.0}, {"tune": "none"}])
def test_wrong_settings(own):
    with pytest.raises(UsageError, match=f"fedbabu.{next(iter(own))} is"):
        make(**own)
