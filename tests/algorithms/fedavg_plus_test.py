"""FedAvg+: the fine-tuned model."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import context, variables, weights


def make(**settings):
    """Returns FedAvg+ and data with two batches of one example, f = ½ (w − 3)²."""
    data, federation = linear.federated([[[1.0], [1.0]]], [[3.0, 3.0]])
    training = local_training.sgd(
        learning_rate=lambda t: 0.1 / (1 + t.astype(jnp.float32)), batch_size=1, epochs=3
    )
    return algorithms.fedavg_plus(linear.Linear(), training, federation, **settings), data


@pytest.mark.parametrize(
    ("settings", "t", "factor"),
    [
        ({"rate": 0.5}, 0, 0.5**2),
        ({"rate": 0.5}, 7, 0.5**2),
        ({"rate": 0.5, "epochs": 2}, 0, 0.5**4),
        ({}, 0, 0.9**2),
        ({}, 1, 0.95**2),
    ],
)
def test_fine_tuning_by_hand(settings, t, factor):
    """Each step multiplies the distance to the optimum, 3 − 1 = 2, by 1 − rate."""
    algorithm, data = make(**settings)
    served = algorithm.personalize(
        State(variables([1.0]), (), ()), (), context(data, t=jnp.int32(t))
    )
    np.testing.assert_allclose(weights(served), [3 - 2 * factor], rtol=1e-6)
