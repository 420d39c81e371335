"""pFedGraph on scalar quadratics and against NumPy: four clients, one of which does not arrive."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.errors import UsageError
from tests.algorithms import linear
from tests.algorithms.linear import KEY, play, variables, weights, work
from tests.core.simplex_test import by_supports

FIRST = np.array([0.5, -0.5])
MODELS = np.array([[1.0, 0.0], [0.6, 0.8], [0.0, -2.0], [5.0, 5.0]])
COUNTS, HERE = np.array([1, 3, 4, 9]), np.array([True, True, True, False])
XS = [[[1.0, 0.0]], [[0.0, 2.0]], [[1.0, 1.0]], [[-1.0, 0.5]]]
YS = [[3.0], [1.0], [-1.0], [0.5]]


def make(name="pfedgraph", **own):
    data, federation = linear.federated(XS, YS)
    training = local_training.sgd(learning_rate=0.1, batch_size=1, steps=2)
    return getattr(algorithms, name)(linear.Linear(), training, federation, **own), data


@pytest.mark.parametrize("alpha", [0.1, 8.0])
def test_mixtures_by_hand(alpha):
    """A small α leaves somebody out."""
    made, _ = make(alpha=alpha)
    learned = MODELS - FIRST
    unit = learned / np.linalg.norm(learned, axis=1, keepdims=True)
    p = COUNTS * HERE / COUNTS[HERE].sum()
    w = np.array(
        [by_supports(alpha * np.eye(4), -2 * alpha * p - unit @ own, HERE) for own in unit[HERE]]
    )
    assert (w[:, :3] == 0).any() == (alpha == 0.1)
    rows = jax.tree.map(lambda *a: jnp.stack(a), *[variables([7.0, 7.0])] * 4)
    state = State({"first": variables(FIRST)["params"]}, rows, ())
    met = linear.met(made, state, COUNTS, [variables(m) for m in MODELS], HERE)
    np.testing.assert_allclose(weights(met.rows)[:3], w @ MODELS, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(weights(met.rows)[3], [7.0, 7.0])
    chex.assert_trees_all_equal(met.server, state.server)


def test_two_steps_by_hand():
    """f = ½ (θ₀ − 3)² − .4 cos(θ, u) from θ = u = (2, 1), where cos has no slope at first."""
    made, data = make(penalty=0.4)
    u = theta = np.array([2.0, 1.0])
    for _ in range(2):
        long, own = np.linalg.norm(u), np.linalg.norm(theta)
        slope = u / (long * own) - (theta @ u) * theta / (long * own**3)
        theta = theta - 0.1 * (np.array([theta[0] - 3, 0.0]) - 0.4 * slope)
    done = work(made, variables(u), (), data)
    np.testing.assert_allclose(weights(done.variables), theta, rtol=1e-6)
    assert theta[1] != 1.0
    chex.assert_trees_all_equal(done.upload, done.variables)


def test_with_a_small_alpha_it_is_local():
    """Bit for bit, after three rounds."""
    (made, data), (alone, _) = make(alpha=1e-9, penalty=0.0), make("local")
    ours, theirs = (play(one, one.init(KEY), data, [1] * 4, 3) for one in (made, alone))
    chex.assert_trees_all_equal(ours.rows, theirs.clients.variables)


def test_with_a_large_alpha_it_is_fedavg():
    (made, data), (average, _) = make(alpha=1e9, penalty=0.0), make("fedavg")
    ours, theirs = (play(one, one.init(KEY), data, [1] * 4, 3) for one in (made, average))
    whole = trees.repeat(theirs.server, 4)
    chex.assert_trees_all_close(ours.rows, whole, rtol=1e-5, atol=1e-6)


def test_a_phase_goes_on_where_it_was_and_starts_from_fedavg():
    made, data = make()
    state = play(made, made.init(KEY), data, [1] * 4, 1)
    again = made.init(KEY, state)
    chex.assert_trees_all_equal(again[:2], state[:2])
    average = State(variables([1.0, 2.0]), (), ())
    begun = made.init(KEY, average)
    chex.assert_trees_all_equal(begun.server["first"], average.server["params"])
    np.testing.assert_array_equal(weights(begun.rows)[3], [1.0, 2.0])


@pytest.mark.parametrize("own", [{"alpha": 0.0}, {"penalty": -1.0}])
def test_wrong_settings(own):
    with pytest.raises(UsageError, match=f"pfedgraph.{next(iter(own))} is"):
        make(**own)
