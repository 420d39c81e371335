"""FedBABU on f = ½ (x a b − y)² with the body a and the head b."""

import chex
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.shared.split_model import SplitClient
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import context, deep, kernels, train_client

X, Y, RATE = 1.5, 3.0, 0.1


def make(**settings):
    data, federation = linear.federated([[[X]]], [[Y]])
    training = local_training.sgd(learning_rate=RATE, batch_size=1, epochs=2)
    return algorithms.fedbabu(linear.Deep(), training, federation, **settings), data


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


def test_local_training_changes_only_the_body():
    algorithm, data = make()
    body, head = parts(0.8, 0.5)
    result = train_client(algorithm, body, SplitClient(head, ()), data)
    a, b = descended(0.8, 0.5, 2, RATE, "a")
    np.testing.assert_allclose(kernels(result.upload), [[a]], rtol=1e-6)
    np.testing.assert_allclose(kernels(result.variables), [[a], [b]], rtol=1e-6)
    chex.assert_trees_all_equal(result.client.personal, head)


@pytest.mark.parametrize(("tune", "moves"), [("all", "ab"), ("head", "b"), ("body", "a")])
def test_fine_tuning_by_hand(tune, moves):
    algorithm, data = make(tune=tune, epochs=3, rate=0.05)
    body, head = parts(0.8, 0.5)
    variables = algorithm.personalize(State(body, (), ()), SplitClient(head, ()), context(data))
    expected = descended(0.8, 0.5, 3, 0.05, moves)
    np.testing.assert_allclose(np.ravel(kernels(variables)), np.ravel(expected), rtol=1e-6)
