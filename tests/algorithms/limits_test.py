"""With an extreme setting a method equals a simpler one."""

import os
from functools import cache

import chex
import jax
import numpy as np
import pytest

from fedjax_pfl.core import local_training
from tests.algorithms.linear import KEY, make_classifier, run_rounds

pytestmark = pytest.mark.slow("two programs for each limit")

RNG = np.random.default_rng(0)
XS, YS = RNG.normal(size=(4, 3, 2)), RNG.integers(0, 3, (4, 3))
TRAINING = local_training.sgd(
    learning_rate=0.1,
    momentum=0.9,
    weight_decay=0.01,
    clip_norm=1.0,
    batch_size=2,  # the second batch is short
    epochs=2,
    keep_optimizer=True,
)
_FLUTE = ("collapse", "head_decay", "feature_decay", "server_rate", "head_epochs")


def assert_equal(models, expected):
    """Compares bit for bit. Only AVX2 fuses the steps of two programs differently."""
    rtol, atol = (1e-5, 1e-6) if "AVX2" in os.environ["XLA_FLAGS"] else (0, 0)
    chex.assert_trees_all_close(models, expected, rtol=rtol, atol=atol)


@cache
def after_rounds(name, rounds=2, **settings):
    """Returns the state after the rounds, and the models of the last local training."""
    algorithm, data = make_classifier(name, XS, YS, TRAINING, **settings)
    return run_rounds(algorithm, jax.jit(algorithm.init)(KEY), data, [3] * 4, rounds)


@pytest.mark.parametrize(
    ("name", "settings", "baseline", "rounds"),
    [
        ("apfl", {"alpha": 0.0}, "fedavg", 2),
        ("apfl", {"alpha": 1.0}, "local", 2),
        ("ditto", {"penalty": 0.0}, "local", 2),
        ("fedala", {"weight_rate": 0.0}, "fedavg", 2),
        ("fedamp", {"penalty": 0.0}, "local", 2),
        ("fedas", {"align_rate": 0.0}, "fedper", 1),
        ("fedcac", {"critical_share": 0.0}, "fedavg", 2),
        ("feddbe", {}, "fedavg", 1),
        ("fedlc", {"tau": 0.0}, "fedavg", 2),
        ("fedpac", {"penalty": 0.0, "head_epochs": 10}, "fedrep", 1),
        ("fedprox", {"mu": 0.0}, "fedavg", 2),
        ("fedproto", {"penalty": 0.0}, "local", 2),
        ("floco", {"endpoints": 1, "place_after": 1}, "fedavg", 2),
        ("flute", dict.fromkeys(_FLUTE, 0), "fedper", 2),
        ("fedtgp", {"penalty": 0.0}, "local", 2),
        ("fml", {"alpha": 1.0}, "local", 2),
        ("l2gd", {"pull": 0.0}, "local", 2),
        ("l2gd", {"pull": 1.0}, "fedavg", 2),
        ("moon", {"mu": 0.0}, "fedavg", 2),
        ("pfedgraph", {"alpha": 1e-9, "penalty": 0.0}, "local", 2),
    ],
)
def test_exact_limits(name, settings, baseline, rounds):
    """Momentum is kept, gradients are clipped, and the last batch is short."""
    _, models = after_rounds(name, rounds, **settings)
    _, expected = after_rounds(baseline, rounds)
    assert_equal(models["params"], expected["params"])


def test_pfedgraph_with_a_large_alpha_equals_fedavg():
    _, models = after_rounds("pfedgraph", alpha=1e9, penalty=0.0)
    chex.assert_trees_all_close(models, after_rounds("fedavg")[1], rtol=1e-5, atol=1e-6)


def test_global_models_of_ditto_and_apfl_equal_fedavg():
    fedavg, _ = after_rounds("fedavg")
    for penalty in (0.0, 3.0):
        ditto, _ = after_rounds("ditto", penalty=penalty)
        assert_equal(ditto.server, fedavg.server)
        assert_equal(ditto.clients.shared_momentum, fedavg.clients)
    for alpha in (0.0, 1.0):
        apfl, _ = after_rounds("apfl", alpha=alpha)
        assert_equal(apfl.server, fedavg.server)
        assert_equal(apfl.clients.momentum["w"], fedavg.clients)
