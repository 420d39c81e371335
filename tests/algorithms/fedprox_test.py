"""FedProx on a scalar quadratic, and FedAvg where nothing holds."""

import chex
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.core.errors import UsageError
from tests import cases, tiny
from tests.algorithms import linear
from tests.algorithms.linear import KEY, T, client, variables, weights
from tests.algorithms.served import trained


def test_two_steps_by_hand():
    """f = ½ (w − 3)², w = 1, η = .1, μ = 2: 1 + .1·2 = 1.2; then 1.2 − .1 (−1.8 + 2·.2) = 1.34."""
    data, federation = linear.federated([[[1.0]]], [[3.0]])
    training = local_training.sgd(learning_rate=0.1, batch_size=1, steps=2)
    made = algorithms.fedprox(linear.Linear(), training, federation, mu=2.0)
    upload, after, _, _ = made.train(
        variables([1.0]), (), ClientContext(0, client(data, 0), T, KEY)
    )
    np.testing.assert_allclose(weights(upload), [1.34], rtol=1e-6)
    assert after is upload


def test_without_a_penalty_it_is_fedavg():
    """Bit for bit, BatchNorm, momentum, decay and clipping included."""
    federation = tiny.federated()[1]

    def make(name, **own):
        return getattr(algorithms, name)(tiny.Net(), cases.training(), federation, **own)

    average, held = make("fedavg"), make("fedprox", mu=0.0)
    state = average.init(KEY)
    chex.assert_trees_all_equal(trained(held, state, 3), trained(average, state, 3))


def test_a_negative_penalty_is_refused():
    with pytest.raises(UsageError, match="at least 0"):
        algorithms.fedprox(tiny.Net(), cases.training(), tiny.federated()[1], mu=-1.0)
