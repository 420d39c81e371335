"""pFedMe on a scalar quadratic, step by step, and its server."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import State
from tests import tiny
from tests.algorithms import linear
from tests.algorithms.linear import KEY, TASK, context, variables, weights

RATE, TARGET = 0.01, 3.0  # one example x = 1, y = 3: f(θ) = ½ (θ − 3)²


def make(rounds=1, **settings):
    training = local_training.sgd(learning_rate=RATE, batch_size=4, steps=rounds)
    settings = {"penalty": 15.0, "inner_steps": 2, "inner_rate": 0.05, **settings}
    return linear.make("pfedme", [[[1.0]]], [[TARGET]], training, **settings)


def test_one_local_round_by_hand():
    """θ: 1 → 1 + 0.05·2 = 1.1 → 1.1 − 0.05·(−1.9 + 15·0.1) = 1.12; w: 1 + 0.01·15·0.12 = 1.018."""
    algorithm, data = make()
    upload, trained, client_state, metrics = algorithm.train(variables([1.0]), (), context(data))
    np.testing.assert_allclose(weights(trained), [1.12], rtol=1e-6)
    np.testing.assert_allclose(weights(upload), [1.018], rtol=1e-6)
    # The loss where the last step began.
    np.testing.assert_allclose(metrics["loss"], 0.5 * 1.9**2, rtol=1e-6)
    assert client_state == ()


def test_theta_is_kept_between_local_rounds():
    algorithm, data = make(rounds=4)
    upload, trained, _, _ = algorithm.train(variables([1.0]), (), context(data))
    w = theta = 1.0
    for _ in range(4):
        for _ in range(2):
            theta -= 0.05 * ((theta - TARGET) + 15 * (theta - w))
        w -= RATE * 15 * (w - theta)
    np.testing.assert_allclose(weights(trained), [theta], rtol=1e-6)
    np.testing.assert_allclose(weights(upload), [w], rtol=1e-6)
    served = algorithm.personalize(State(variables([1.0]), (), ()), (), context(data))
    np.testing.assert_array_equal(weights(served), weights(trained))


def test_a_large_penalty_ties_theta_to_w():
    for penalty in (15.0, 1.5e3, 1.5e5):
        algorithm, data = make(penalty=penalty, inner_rate=1 / penalty, inner_steps=5)
        served = algorithm.personalize(State(variables([1.0]), (), ()), (), context(data))
        expected = (TARGET - 1) / (penalty + 1)  # the minimum; five steps end 2e-7 from it
        np.testing.assert_allclose(weights(served) - 1, [expected], rtol=1e-4, atol=2e-6)


class Dropped(nn.Module):
    """A linear network that drops half of its inputs."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(1, use_bias=False, name="fc")(x)


def test_each_inner_step_has_its_own_dropout_mask():
    """A step changes a weight by 2 if its input is kept; with one mask for four steps by 0 or 8."""
    data, federation = linear.federated([np.ones((1, 64))], [[0.0]])
    training = local_training.sgd(learning_rate=RATE, batch_size=1, steps=1)
    task = TASK._replace(loss=lambda outputs, y, classes: outputs[:, 0])
    federation = federation._replace(task=task)
    settings = {"penalty": 1e-6, "inner_steps": 4, "inner_rate": 1.0}
    algorithm = algorithms.pfedme(Dropped(), training, federation, **settings)
    start = variables(np.zeros(64))
    _, trained, _, _ = algorithm.train(start, (), context(data))
    change = np.round(-weights(trained), 3)  # what the penalty adds is below 1e-4
    assert set(change) <= {0, 2, 4, 6, 8}
    assert np.isin(change, (2, 4, 6)).sum() >= 48  # expected: 64 · 14/16 = 56, deviation 2.6


@pytest.mark.parametrize(("beta", "expected"), [(1.0, 4.0), (0.25, 8.5), (2.0, -2.0)])
def test_the_server_mixes_in_the_unweighted_mean(beta, expected):
    """w = 10, uploads 2 and 6 from clients with one and three examples; the third is absent."""
    algorithm, _ = make(beta=beta)
    uploads, arrived = [variables([w]) for w in (2.0, 6.0, 99.0)], [True, True, False]
    state = State(variables([10.0]), (), ())
    state = linear.receive(algorithm, state, [1, 3, 5], uploads, arrived)
    np.testing.assert_allclose(weights(state.server), [expected], rtol=1e-6)
    assert state.rows == ()


def test_statistics_are_averaged_without_beta():
    training = local_training.sgd(steps=1)
    algorithm = algorithms.pfedme(tiny.Net(), training, tiny.federated()[1], beta=2.0)
    state = algorithm.init(KEY)
    server = state.server
    uploads = [jax.tree.map(lambda a, s=s: s * a, server) for s in (0.1, 0.3)]
    mixed = linear.receive(algorithm, state, [1, 3], uploads, [True] * 2).server
    var = server["batch_stats"]["norm1"]["var"]
    np.testing.assert_allclose(mixed["batch_stats"]["norm1"]["var"], 0.2 * var, rtol=1e-5)
    kernel = server["params"]["fc1"]["kernel"]
    np.testing.assert_allclose(mixed["params"]["fc1"]["kernel"], -0.6 * kernel, rtol=1e-5)
