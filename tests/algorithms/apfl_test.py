"""APFL on a scalar quadratic."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.algorithms.apfl import Client
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import State
from tests.algorithms.linear import make, train_client, variables, weights

RATE, TARGET = 0.1, 3.0


@pytest.mark.parametrize(("alpha", "alpha_rate"), [(0.25, 0.0), (0.25, 0.2), (0.9, 10.0)])
def test_three_steps_by_hand(alpha, alpha_rate):
    """f(w) = ½ (w − 3)². Updates use the values before the step; alpha moves in the first one."""
    training = local_training.sgd(learning_rate=RATE, batch_size=1, steps=3)
    settings = {"alpha": alpha, "alpha_rate": alpha_rate}
    algorithm, data = make("apfl", [[[1.0]]], [[TARGET]], training, **settings)
    client = Client(variables([2.0]), jnp.float32(alpha), ())
    result = train_client(algorithm, variables([1.0]), client, data)
    w, v = 1.0, 2.0
    for s in range(3):
        slope = alpha * v + (1 - alpha) * w - TARGET
        w, v, alpha = (
            w - RATE * (w - TARGET),
            v - RATE * alpha * slope,
            np.clip(alpha - (s == 0) * alpha_rate * (v - w) * slope, 0, 1),
        )
    assert (alpha == 1) == (alpha_rate == 10)
    np.testing.assert_allclose(weights(result.upload), [w], rtol=1e-6)
    np.testing.assert_allclose(weights(result.client.variables), [v], rtol=1e-6)
    np.testing.assert_allclose(result.client.alpha, alpha, rtol=1e-6)
    np.testing.assert_allclose(weights(result.variables), [alpha * v + (1 - alpha) * w], rtol=1e-6)
    served = algorithm.personalize(State(variables([5.0]), (), ()), result.client, None)
    np.testing.assert_allclose(weights(served), [alpha * v + (1 - alpha) * 5], rtol=1e-6)
