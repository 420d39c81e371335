"""FedProx on a scalar quadratic, and without a penalty."""

import chex
import numpy as np

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training
from tests import cases, tiny
from tests.algorithms import linear
from tests.algorithms.linear import KEY, context, variables, weights
from tests.algorithms.served import trained


def test_two_steps_by_hand():
    """f = ½ (w − 3)², η = 0.1, μ = 2: 1 + 0.1·2 = 1.2, then 1.2 − 0.1 (−1.8 + 2·0.2) = 1.34."""
    data, federation = linear.federated([[[1.0]]], [[3.0]])
    training = local_training.sgd(learning_rate=0.1, batch_size=1, steps=2)
    algorithm = algorithms.fedprox(linear.Linear(), training, federation, mu=2.0)
    upload, after, _, _ = algorithm.train(variables([1.0]), (), context(data))
    np.testing.assert_allclose(weights(upload), [1.34], rtol=1e-6)
    assert after is upload


def test_mu_0_equals_fedavg():
    """Exact equality, with BatchNorm, momentum, decay and clipping."""
    federation = tiny.federated()[1]

    def make(name, **settings):
        return getattr(algorithms, name)(tiny.Net(), cases.training(), federation, **settings)

    fedavg, fedprox = make("fedavg"), make("fedprox", mu=0.0)
    state = fedavg.init(KEY)
    chex.assert_trees_all_equal(trained(fedprox, state, 3), trained(fedavg, state, 3))
