"""Ditto on a scalar quadratic."""

import chex
import numpy as np

from fedjax_pfl.algorithms.ditto import Client
from fedjax_pfl.core import local_training
from tests.algorithms.linear import make, train_client, variables, weights


def test_two_steps_by_hand():
    """f = ½ (v − 3)², w = 1: v = 2 → 2 + 0.1 (1 − 0.5) = 2.05 → 2.05 + 0.1 (0.95 − 0.525)."""
    training = local_training.sgd(learning_rate=0.1, batch_size=1, steps=2)
    algorithm, data = make("ditto", [[[1.0]]], [[3.0]], training, penalty=0.5)
    result = train_client(algorithm, variables([1.0]), Client(variables([2.0]), (), ()), data)
    np.testing.assert_allclose(weights(result.variables), [2.0925], rtol=1e-6)
    np.testing.assert_allclose(weights(result.upload), [1.38], rtol=1e-6)  # 1 → 1.2 → 1.38
    np.testing.assert_allclose(result.metrics["loss"], (1 + 0.95**2) / 4, rtol=1e-6)
    np.testing.assert_allclose(result.metrics["shared_loss"], (4 + 1.8**2) / 4, rtol=1e-6)
    chex.assert_trees_all_equal(result.client.variables, result.variables)
    assert algorithm.personalize(None, result.client, None) is result.client.variables


def test_own_epochs():
    training = local_training.sgd(learning_rate=0.1, batch_size=1, epochs=1)
    algorithm, data = make("ditto", [[[1.0]]], [[3.0]], training, penalty=0.0, own_epochs=2)
    result = train_client(algorithm, variables([1.0]), Client(variables([1.0]), (), ()), data)
    np.testing.assert_allclose(weights(result.upload), [1.2], rtol=1e-6)
    np.testing.assert_allclose(weights(result.variables), [1.38], rtol=1e-6)
