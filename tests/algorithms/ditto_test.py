"""Ditto on a scalar quadratic, and where nothing holds."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.ditto import Client
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.errors import UsageError
from tests.algorithms import linear
from tests.algorithms.linear import KEY, variables, weights, work

XS, YS = [[[1.0, 0.5], [0.2, -1.0], [0.3, 2.0]]], [[3.0, 1.0, -2.0]]


def make(name="ditto", xs=((1.0,),), ys=(3.0,), training=None, **own):
    data, federation = linear.federated([xs], [ys])
    training = training or local_training.sgd(learning_rate=0.1, batch_size=1, steps=2)
    return getattr(algorithms, name)(linear.Linear(), training, federation, **own), data


def test_two_steps_by_hand():
    """f = ½ (v − 3)², w = 1: v 2 → 2 + .1 (1 − .5) = 2.05 → 2.05 + .1 (.95 − .525)."""
    made, data = make(penalty=0.5)
    done = work(made, variables([1.0]), Client(variables([2.0]), (), ()), data)
    np.testing.assert_allclose(weights(done.variables), [2.0925], rtol=1e-6)
    np.testing.assert_allclose(weights(done.upload), [1.38], rtol=1e-6)  # 1 → 1.2 → 1.38
    np.testing.assert_allclose(done.metrics["loss"], (1 + 0.95**2) / 4, rtol=1e-6)
    np.testing.assert_allclose(done.metrics["shared_loss"], (4 + 1.8**2) / 4, rtol=1e-6)
    chex.assert_trees_all_equal(done.client.own, done.variables)
    assert made.personalize(None, done.client, None) is done.client.own


def test_its_shared_model_is_fedavgs_and_without_a_penalty_its_own_is_locals():
    """Bit for bit, with momentum that is kept, decay, clipping and a short last batch."""
    training = local_training.sgd(
        learning_rate=0.1,
        momentum=0.9,
        weight_decay=0.01,
        clip_norm=1.0,
        batch_size=2,
        epochs=2,
        keep_optimizer=True,
    )
    made = {n: make(n, XS[0], YS[0], training) for n in ("fedavg", "local")}
    ditto, data = make("ditto", XS[0], YS[0], training, penalty=0.0)
    held, _ = make("ditto", XS[0], YS[0], training, penalty=3.0)

    def after(one):
        state = one.init(KEY)
        mine = trees.row(state.clients, 0)
        return work(one, state.server, mine, data)

    average, alone = (after(one) for one, _ in made.values())
    free, tied = after(ditto), after(held)
    for done in (free, tied):
        chex.assert_trees_all_equal(done.upload, average.upload)
        chex.assert_trees_all_equal(done.client.shared, average.client)
    chex.assert_trees_all_equal(free.client.own, alone.variables)
    chex.assert_trees_all_equal(free.client.momentum, alone.client.momentum)
    assert (weights(tied.variables) != weights(free.variables)).all()


def test_own_epochs_and_a_later_phase():
    """v trains for as long as it is told to, and a later phase goes on from it."""
    training = local_training.sgd(learning_rate=0.1, batch_size=1, epochs=1)
    made, data = make(training=training, penalty=0.0, own_epochs=2)
    state = made.init(KEY, State(variables([1.0]), (), ()))
    done = work(made, state.server, trees.row(state.clients, 0), data)
    np.testing.assert_allclose(weights(done.upload), [1.2], rtol=1e-6)
    np.testing.assert_allclose(weights(done.variables), [1.38], rtol=1e-6)
    stacked = trees.repeat(done.client, 1)
    later = made.init(KEY, State(done.upload, (), stacked))
    np.testing.assert_array_equal(weights(trees.row(later.clients.own, 0)), weights(done.variables))
    assert jnp.array_equal(
        later.server["params"]["fc"]["kernel"], done.upload["params"]["fc"]["kernel"]
    )


@pytest.mark.parametrize("own", [{"penalty": -1.0}, {"own_epochs": 0}])
def test_wrong_settings(own):
    with pytest.raises(UsageError, match=f"ditto.{next(iter(own))} is"):
        make(**own)
