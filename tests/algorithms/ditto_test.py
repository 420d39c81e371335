"""Ditto on a scalar quadratic, and without a penalty."""

import chex
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.ditto import Client
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import KEY, train_client, variables, weights

XS, YS = [[[1.0, 0.5], [0.2, -1.0], [0.3, 2.0]]], [[3.0, 1.0, -2.0]]


def make(name="ditto", xs=((1.0,),), ys=(3.0,), training=None, **settings):
    data, federation = linear.federated([xs], [ys])
    training = training or local_training.sgd(learning_rate=0.1, batch_size=1, steps=2)
    return getattr(algorithms, name)(linear.Linear(), training, federation, **settings), data


def test_two_steps_by_hand():
    """f = ½ (v − 3)², w = 1: v = 2 → 2 + 0.1 (1 − 0.5) = 2.05
    → 2.05 + 0.1 (0.95 − 0.525)."""
    algorithm, data = make(penalty=0.5)
    result = train_client(algorithm, variables([1.0]), Client(variables([2.0]), (), ()), data)
    np.testing.assert_allclose(weights(result.variables), [2.0925], rtol=1e-6)
    np.testing.assert_allclose(weights(result.upload), [1.38], rtol=1e-6)  # 1 → 1.2 → 1.38
    np.testing.assert_allclose(result.metrics["loss"], (1 + 0.95**2) / 4, rtol=1e-6)
    np.testing.assert_allclose(result.metrics["shared_loss"], (4 + 1.8**2) / 4, rtol=1e-6)
    chex.assert_trees_all_equal(result.client.variables, result.variables)
    assert algorithm.personalize(None, result.client, None) is result.client.variables


def test_w_equals_fedavg_and_without_a_penalty_v_equals_local():
    """Exact equality, with kept momentum, decay, clipping and a short last batch."""
    training = local_training.sgd(
        learning_rate=0.1,
        momentum=0.9,
        weight_decay=0.01,
        clip_norm=1.0,
        batch_size=2,
        epochs=2,
        keep_optimizer=True,
    )
    algorithm = {n: make(n, XS[0], YS[0], training) for n in ("fedavg", "local")}
    ditto, data = make("ditto", XS[0], YS[0], training, penalty=0.0)
    tied, _ = make("ditto", XS[0], YS[0], training, penalty=3.0)

    def after(algorithm2):
        state = algorithm2.init(KEY)
        client = trees.row(state.clients, 0)
        return train_client(algorithm2, state.server, client, data)

    fedavg, local = (after(algorithm2) for algorithm2, _ in algorithm.values())
    without_penalty, with_penalty = after(ditto), after(tied)
    for result in (without_penalty, with_penalty):
        chex.assert_trees_all_equal(result.upload, fedavg.upload)
        chex.assert_trees_all_equal(result.client.shared_momentum, fedavg.client)
    chex.assert_trees_all_equal(without_penalty.client.variables, local.variables)
    chex.assert_trees_all_equal(without_penalty.client.momentum, local.client.momentum)
    assert (weights(with_penalty.variables) != weights(without_penalty.variables)).all()


def test_own_epochs_and_a_later_phase():
    """v trains for `own_epochs`, and a later phase continues with it."""
    training = local_training.sgd(learning_rate=0.1, batch_size=1, epochs=1)
    algorithm, data = make(training=training, penalty=0.0, own_epochs=2)
    state = algorithm.init(KEY, State(variables([1.0]), (), ()))
    result = train_client(algorithm, state.server, trees.row(state.clients, 0), data)
    np.testing.assert_allclose(weights(result.upload), [1.2], rtol=1e-6)
    np.testing.assert_allclose(weights(result.variables), [1.38], rtol=1e-6)
    stacked = trees.repeat(result.client, 1)
    later = algorithm.init(KEY, State(result.upload, (), stacked))
    np.testing.assert_array_equal(
        weights(trees.row(later.clients.variables, 0)), weights(result.variables)
    )
    assert jnp.array_equal(
        later.server["params"]["fc"]["kernel"], result.upload["params"]["fc"]["kernel"]
    )
