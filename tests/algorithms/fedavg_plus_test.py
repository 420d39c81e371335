"""FedAvg+: what is served, an epoch after FedAvg's model."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import ClientContext, State
from fedjax_pfl.core.errors import UsageError
from tests.algorithms import linear
from tests.algorithms.linear import KEY, client, variables, weights


def make(**own):
    """One example in a batch: f = ½ (w − 3)² twice in an epoch."""
    data, federation = linear.federated([[[1.0], [1.0]]], [[3.0, 3.0]])
    training = local_training.sgd(
        learning_rate=lambda t: 0.1 / (1 + t.astype(jnp.float32)), batch_size=1, epochs=3
    )
    return algorithms.fedavg_plus(linear.Linear(), training, federation, **own), data


@pytest.mark.parametrize(
    ("own", "t", "shrunk"),
    [
        ({"rate": 0.5}, 0, 0.5**2),
        ({"rate": 0.5}, 7, 0.5**2),
        ({"rate": 0.5, "epochs": 2}, 0, 0.5**4),
        ({}, 0, 0.9**2),
        ({}, 1, 0.95**2),
    ],
)
def test_tuning_by_hand(own, t, shrunk):
    """The distance to the optimum, 3 − 1 = 2, shrinks by 1 − rate in each of the steps."""
    made, data = make(**own)
    served = made.personalize(
        State(variables([1.0]), (), ()), (), ClientContext(0, client(data, 0), jnp.int32(t), KEY)
    )
    np.testing.assert_allclose(weights(served), [3 - 2 * shrunk], rtol=1e-6)


def test_wrong_settings():
    for own, word in (({"rate": 0.0}, "above 0"), ({"epochs": 0}, "at least 1")):
        with pytest.raises(UsageError, match=word):
            make(**own)
