"""pFedMe on a scalar quadratic, step by step, and its server."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import ClientContext, State
from fedjax_pfl.core.errors import UsageError
from tests import tiny
from tests.algorithms import linear
from tests.algorithms.linear import KEY, TASK, T, client, variables, weights

RATE, TARGET = 0.01, 3.0  # one example x = 1, y = 3: f(θ) = ½ (θ − 3)²


def make(rounds=1, training=None, **settings):
    data, federation = linear.federated([[[1.0]], [[1.0]] * 3], [[TARGET], [0.0] * 3])
    training = training or local_training.sgd(learning_rate=RATE, batch_size=4, steps=rounds)
    settings = {"penalty": 15.0, "inner_steps": 2, "inner_rate": 0.05, **settings}
    return algorithms.pfedme(linear.Linear(), training, federation, **settings), data


def test_one_local_round_by_hand():
    """θ: 1 → 1 − .05·(−2) = 1.1 → 1.1 − .05·(−1.9 + 15·.1) = 1.12; w: 1 + .01·15·.12 = 1.018."""
    made, data = make()
    upload, trained, kept, metrics = made.train(
        variables([1.0]), (), ClientContext(0, client(data, 0), T, KEY)
    )
    np.testing.assert_allclose(weights(trained), [1.12], rtol=1e-6)
    np.testing.assert_allclose(weights(upload), [1.018], rtol=1e-6)
    np.testing.assert_allclose(
        metrics["loss"], 0.5 * 1.9**2, rtol=1e-6
    )  # where the last step began
    assert kept == ()


def test_local_rounds_go_on_from_the_last_theta():
    made, data = make(rounds=4)
    upload, trained, _, _ = made.train(
        variables([1.0]), (), ClientContext(0, client(data, 0), T, KEY)
    )
    w = theta = 1.0
    for _ in range(4):
        for _ in range(2):
            theta -= 0.05 * ((theta - TARGET) + 15 * (theta - w))
        w -= RATE * 15 * (w - theta)
    np.testing.assert_allclose(weights(trained), [theta], rtol=1e-6)
    np.testing.assert_allclose(weights(upload), [w], rtol=1e-6)


def test_a_client_is_served_theta_after_its_local_rounds():
    """Not w, and not the θ of the first batch only; of one round 200 steps solve exactly."""
    made, data = make(rounds=4)
    _, trained, _, _ = made.train(variables([1.0]), (), ClientContext(0, client(data, 0), T, KEY))
    served = made.personalize(
        State(variables([1.0]), (), ()), (), ClientContext(0, client(data, 0), T, KEY)
    )
    np.testing.assert_array_equal(weights(served), weights(trained))
    assert weights(served)[0] > 1.15  # one round ends at 1.12
    exact, _ = make(inner_steps=200)
    served = exact.personalize(
        State(variables([1.0]), (), ()), (), ClientContext(0, client(data, 0), T, KEY)
    )
    np.testing.assert_allclose(weights(served), [(TARGET + 15) / 16], rtol=1e-6)


def test_a_large_penalty_ties_theta_to_w():
    for penalty in (15.0, 1.5e3, 1.5e5):
        made, data = make(penalty=penalty, inner_rate=1 / penalty, inner_steps=5)
        served = made.personalize(
            State(variables([1.0]), (), ()), (), ClientContext(0, client(data, 0), T, KEY)
        )
        wanted = (TARGET - 1) / (penalty + 1)  # the minimum; five steps end 2e-7 from it
        np.testing.assert_allclose(weights(served) - 1, [wanted], rtol=1e-4, atol=2e-6)


class Dropped(nn.Module):
    """A linear network that drops half of its inputs."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(1, use_bias=False, name="fc")(x)


def test_each_inner_step_has_a_dropout_mask_of_its_own():
    """A step moves a weight by 2 if its input is kept. With one mask for all, by 0 or 8 in four."""
    data, federation = linear.federated([np.ones((1, 64))], [[0.0]])
    training = local_training.sgd(learning_rate=RATE, batch_size=1, steps=1)
    task = TASK._replace(loss=lambda outputs, y, classes: outputs[:, 0])
    federation = federation._replace(task=task)
    settings = {"penalty": 1e-6, "inner_steps": 4, "inner_rate": 1.0}
    made = algorithms.pfedme(Dropped(), training, federation, **settings)
    start = variables(np.zeros(64))
    _, trained, _, _ = made.train(start, (), ClientContext(0, client(data, 0), T, KEY))
    moved = np.round(-weights(trained), 3)  # what the penalty adds is below 1e-4
    assert set(moved) <= {0, 2, 4, 6, 8}
    assert np.isin(moved, (2, 4, 6)).sum() >= 48  # expected: 64 · 14/16 = 56, deviation 2.6


@pytest.mark.parametrize(("beta", "expected"), [(1.0, 4.0), (0.25, 8.5), (2.0, -2.0)])
def test_the_server_mixes_in_the_plain_mean(beta, expected):
    """w = 10, uploads 2 and 6 from clients with one and three examples."""
    made, _ = make(beta=beta)
    uploads = jax.tree.map(lambda *a: jnp.stack(a), variables([2.0]), variables([6.0]))
    ids, here = jnp.arange(2), jnp.ones(2, bool)
    server, rows = made.receive(
        State(variables([10.0]), (), ()), tiny.cohort(tiny.TRAIN, ids, here, uploads, uploads, T)
    )
    np.testing.assert_allclose(weights(server), [expected], rtol=1e-6)
    assert rows == ()


def test_who_did_not_arrive_does_not_count():
    made, _ = make(beta=0.5)
    uploads = jax.tree.map(lambda *a: jnp.stack(a), variables([2.0]), variables([0.0]))
    ids, here = jnp.array([0, 2]), jnp.array([True, False])
    server, _ = made.receive(
        State(variables([10.0]), (), ()), tiny.cohort(tiny.TRAIN, ids, here, uploads, uploads, T)
    )
    np.testing.assert_allclose(weights(server), [6.0], rtol=1e-6)


def test_statistics_are_averaged_without_beta():
    _, federation = tiny.federated()
    made = algorithms.pfedme(tiny.Net(), local_training.sgd(steps=1), federation, beta=2.0)
    server = made.init(KEY).server
    uploads = jax.tree.map(lambda a: jnp.stack([0.1 * a, 0.3 * a]), server)
    here = jnp.ones(2, bool)
    mixed, _ = made.receive(
        State(server, (), ()), tiny.cohort(tiny.TRAIN, jnp.arange(2), here, uploads, uploads, T)
    )
    var = server["batch_stats"]["norm1"]["var"]
    np.testing.assert_allclose(mixed["batch_stats"]["norm1"]["var"], 0.2 * var, rtol=1e-5)
    kernel = server["params"]["fc1"]["kernel"]
    np.testing.assert_allclose(mixed["params"]["fc1"]["kernel"], -0.6 * kernel, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"penalty": 0.0}, "penalty"),
        ({"inner_steps": 0}, "inner_steps"),
        ({"inner_rate": 0.0}, "inner_rate"),
        ({"inner_rate": 0.2}, "diverge"),
        ({"beta": 0.0}, "beta"),
    ],
)
def test_wrong_settings(settings, word):
    with pytest.raises(UsageError, match=word):
        make(**settings)
