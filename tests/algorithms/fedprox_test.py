"""FedProx on a scalar quadratic."""

import numpy as np

from fedjax_pfl.core import local_training
from tests.algorithms.linear import make, train_client, variables, weights


def test_two_steps_by_hand():
    """f = ½ (w − 3)², η = 0.1, μ = 2: 1 + 0.1·2 = 1.2, then 1.2 − 0.1 (−1.8 + 2·0.2) = 1.34."""
    training = local_training.sgd(learning_rate=0.1, batch_size=1, steps=2)
    algorithm, data = make("fedprox", [[[1.0]]], [[3.0]], training, mu=2.0)
    upload, model, _, _ = train_client(algorithm, variables([1.0]), (), data)
    np.testing.assert_allclose(weights(upload), [1.34], rtol=1e-6)
    np.testing.assert_array_equal(weights(model), weights(upload))
