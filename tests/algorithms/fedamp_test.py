"""FedAMP on scalar quadratics and against NumPy: three models of two weights, one client novel."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.local import Client
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import ClientContext, State
from fedjax_pfl.core.errors import UsageError
from tests.algorithms import linear
from tests.algorithms.linear import KEY, T, variables, weights, work

MODELS = np.array([[1.0, 0.0], [0.6, 0.8], [0.0, -2.0], [5.0, 5.0]])
ACTIVE = np.array([True, True, True, False])


def make(name="fedamp", active=ACTIVE, **own):
    data, federation = linear.federated([[[1.0, 0.0]]] * 4, [[3.0]] * 4)
    training = local_training.sgd(learning_rate=0.1, batch_size=1, steps=2)
    federation = federation._replace(active=active)
    return getattr(algorithms, name)(linear.Linear(), training, federation, **own), data


def rows():
    return jax.tree.map(lambda *a: jnp.stack(a), *(variables(m) for m in MODELS))


def expected(attention, sigma, i):
    others = [j for j in range(3) if j != i]
    if attention == "cosine":
        unit = MODELS / np.linalg.norm(MODELS, axis=1, keepdims=True)
        powers = np.exp([sigma * unit[i] @ unit[j] for j in others])
        xi = 0.7 * powers / powers.sum()
    else:
        xi = 0.4 / sigma * np.exp([-((MODELS[i] - MODELS[j]) ** 2).sum() / sigma for j in others])
        assert xi.sum() < 1
    return MODELS[others].T @ xi + (1 - xi.sum()) * MODELS[i]


@pytest.mark.parametrize("attention", ["cosine", "distance"])
def test_what_comes_down_is_the_mixture(attention):
    """Of active clients and its own, also where it is not active itself."""
    made, _ = make(attention=attention, sigma=2.0, self_weight=0.3, alpha=0.4)
    state = State((), rows(), ())
    for i in (0, 1, 2):
        got = made.send(state, ClientContext(i, None, T, KEY))
        np.testing.assert_allclose(weights(got), expected(attention, 2.0, i), rtol=1e-5, atol=1e-6)
    xi = np.asarray(made.observe(state)["xi"])
    np.testing.assert_allclose(xi.sum(1), 1, rtol=1e-6)
    assert (xi[:3, 3] == 0).all()
    assert xi[3, 3] > 0


def test_weights_of_others_come_to_1_at_most():
    made, _ = make(attention="distance", sigma=100.0, alpha=1e4)
    xi = np.asarray(made.observe(State((), rows(), ()))["xi"])[0]
    np.testing.assert_allclose(xi[[0, 3]], 0, atol=1e-6)
    np.testing.assert_allclose(xi[1] / xi[2], np.exp(-(0.8 - 5.0) / 100), rtol=1e-5)


def test_two_steps_by_hand_and_what_the_server_keeps():
    """f = ½ (θ₀ − 3)² from θ = (1, 1), u = (2, 0), λ/α = .5/.25 = 2."""
    made, data = make(penalty=0.5, alpha=0.25)
    done = work(made, variables([2.0, 0.0]), Client(variables([1.0, 1.0]), ()), data)
    theta = np.array([1.0, 1.0])
    for _ in range(2):
        theta = theta - 0.1 * (np.array([theta[0] - 3, 0]) + 2 * (theta - [2, 0]))
    np.testing.assert_allclose(weights(done.variables), theta, rtol=1e-6)
    chex.assert_trees_all_equal(done.upload, done.client.variables)
    uploads = [done.upload] * 4
    kept = linear.met(made, State((), rows(), ()), [1] * 4, uploads, [True, False, False, False])
    np.testing.assert_allclose(weights(kept.rows)[0], theta, rtol=1e-6)
    np.testing.assert_array_equal(weights(kept.rows)[1:], np.float32(MODELS[1:]))


def test_without_a_penalty_it_is_local():
    """Bit for bit."""
    (made, data), (alone, _) = make(penalty=0.0), make("local")
    mine = trees.row(alone.init(KEY).clients, 0)
    ours, theirs = work(made, variables([2.0, 0.0]), mine, data), work(alone, (), mine, data)
    chex.assert_trees_all_equal(ours.client, theirs.client)


@pytest.mark.parametrize(
    "own",
    [
        {"attention": "dice"},
        {"sigma": 0.0},
        {"alpha": 0.0},
        {"penalty": -1.0},
        {"self_weight": 2.0},
    ],
)
def test_wrong_settings(own):
    with pytest.raises(UsageError, match=f"fedamp.{next(iter(own))} is"):
        make(**own)


def test_nobody_to_mix_with_is_an_error():
    with pytest.raises(UsageError, match="two active clients"):
        make(active=np.array([True, False, False, False]))
