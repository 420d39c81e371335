"""APFL on a scalar quadratic, and at both ends of α."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.apfl import Client
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.errors import UsageError
from tests.algorithms import linear
from tests.algorithms.linear import KEY, variables, weights, work

RATE, TARGET = 0.1, 3.0


def make(name="apfl", xs=((1.0,),), ys=(TARGET,), training=None, **own):
    data, federation = linear.federated([xs], [ys])
    training = training or local_training.sgd(learning_rate=RATE, batch_size=1, steps=3)
    return getattr(algorithms, name)(linear.Linear(), training, federation, **own), data


@pytest.mark.parametrize("alpha_rate", [0.0, 0.2])
def test_three_steps_by_hand(alpha_rate):
    """f(w) = ½ (w − 3)²: all three from the values before the step."""
    made, data = make(alpha=0.25, alpha_rate=alpha_rate)
    done = work(made, variables([1.0]), Client(variables([2.0]), jnp.float32(0.25), ()), data)
    w, v, alpha = 1.0, 2.0, 0.25
    for _ in range(3):
        slope = alpha * v + (1 - alpha) * w - TARGET
        w, v, alpha = (
            w - RATE * (w - TARGET),
            v - RATE * alpha * slope,
            np.clip(alpha - alpha_rate * (v - w) * slope, 0, 1),
        )
    np.testing.assert_allclose(weights(done.upload), [w], rtol=1e-6)
    np.testing.assert_allclose(weights(done.client.own), [v], rtol=1e-6)
    np.testing.assert_allclose(done.client.alpha, alpha, rtol=1e-6)
    np.testing.assert_allclose(weights(done.variables), [alpha * v + (1 - alpha) * w], rtol=1e-6)
    served = made.personalize(State(variables([5.0]), (), ()), done.client, None)
    np.testing.assert_allclose(weights(served), [alpha * v + (1 - alpha) * 5], rtol=1e-6)


def test_alpha_stops_at_its_ends():
    made, data = make(alpha=0.9, alpha_rate=10.0)
    done = work(made, variables([1.0]), Client(variables([2.0]), jnp.float32(0.9), ()), data)
    assert done.client.alpha == 1.0


def test_with_alpha_1_it_is_local_and_its_w_is_always_fedavgs():
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
    xs, ys = [[1.0, 0.5], [0.2, -1.0], [0.3, 2.0]], [3.0, 1.0, -2.0]

    def after(name, **own):
        made, data = make(name, xs, ys, training, **own)
        state = made.init(KEY)
        return work(made, state.server, trees.row(state.clients, 0), data)

    average, alone = after("fedavg"), after("local")
    whole, none = after("apfl", alpha=1.0), after("apfl", alpha=0.0)
    for done in (whole, none):
        chex.assert_trees_all_equal(done.upload, average.upload)
        chex.assert_trees_all_equal(done.client.momentum["w"], average.client)
    chex.assert_trees_all_equal(whole.variables, alone.variables)
    chex.assert_trees_all_equal(whole.client.own, alone.variables)
    chex.assert_trees_all_equal(none.variables, average.variables)


@pytest.mark.parametrize("own", [{"alpha": -0.1}, {"alpha": 1.1}, {"alpha_rate": -1.0}])
def test_wrong_settings(own):
    with pytest.raises(UsageError, match=f"apfl.{next(iter(own))} is"):
        make(**own)
