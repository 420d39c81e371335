"""Tests of example-level privacy: gradients of single examples, noise, and admitted methods."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from fedjax_pfl import algorithms, networks
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.example_noise import ExampleNoise, noised_gradient
from fedjax_pfl.core.examples import Batch, client_data
from fedjax_pfl.simulation.rounds import make_rounds
from fedjax_pfl.testing import example, rules
from fedjax_pfl.transforms.privacy.example_level import example_privacy
from tests import tiny

DATA, FEDERATION = tiny.federated()
NETWORK = networks.MLP(outputs=tiny.CLASSES, hidden=(8,))
KEY = jax.random.key(1)


NOISE = ExampleNoise(0.5, 1.0)


def noisy(noise: ExampleNoise = NOISE, **changes: Any) -> Any:
    return example.training(clip_norm=None, **changes)._replace(example_noise=noise)


def batch_and_gradient() -> tuple[Batch, Any, Any]:
    rng = np.random.default_rng(0)
    x = jnp.float32(rng.normal(size=(6, tiny.FEATURES)) * 3)
    batch = Batch(x, jnp.arange(6) % 3, jnp.array([1, 1, 0, 1, 1, 0], bool))
    data = client_data(DATA, jnp.int32(0))
    params = NETWORK.init(KEY, x)["params"]
    return batch, local_training.gradient(NETWORK, FEDERATION.task, data), params


def test_clipped_gradients_equal_a_loop_and_padding_is_invisible():
    batch, gradient, params = batch_and_gradient()
    noised = noised_gradient(gradient, ExampleNoise(0.5, 0.0))
    (loss, _), grads = jax.jit(noised)(params, {}, batch, KEY)
    total, losses, factors = jax.tree.map(jnp.zeros_like, params), [], []
    for j in np.flatnonzero(batch.mask):
        one = Batch(batch.x[j : j + 1], batch.y[j : j + 1], jnp.ones(1, bool))
        (value, _), g = gradient(params, {}, one, KEY)
        norm = np.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(g)))
        factors.append(min(1.0, 0.5 / norm))
        total = jax.tree.map(lambda t, leaf, f=factors[-1]: t + f * leaf, total, g)
        losses.append(float(value))
    assert min(factors) < 1
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-6)
    chex.assert_trees_all_close(grads, jax.tree.map(lambda t: t / 4, total), rtol=1e-6, atol=1e-7)
    other = batch._replace(x=jnp.where(batch.mask[:, None], batch.x, 1e30))
    chex.assert_trees_all_equal(jax.jit(noised)(params, {}, other, KEY)[1], grads)
    # An example whose gradient is not finite adds nothing, and is counted.
    bad = batch._replace(x=batch.x.at[2].set(jnp.nan), mask=batch.mask.at[2].set(True))
    without = jax.tree.map(lambda g: 4 / 5 * g, grads)
    actual = jax.jit(noised)(params, {}, bad, KEY)[1]
    chex.assert_trees_all_close(actual, without, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_noise_has_the_stated_variance(dtype: Any):
    params = {"w": jnp.zeros(20_000, dtype)}

    def zero(params: Any, non_params: Any, batch: Batch, key: Any) -> Any:
        return (jnp.zeros(()), non_params), jax.tree.map(jnp.zeros_like, params)

    batch = Batch(jnp.zeros((4, 1)), jnp.zeros(4), jnp.array([1, 1, 1, 0], bool))
    grads = noised_gradient(zero, ExampleNoise(0.5, 3.0))(params, {}, batch, KEY)[1]
    assert grads["w"].dtype == dtype
    low, high = chi2.ppf([1e-4, 1 - 1e-4], 20_000)
    noise = np.float64(grads["w"]) / (1.5 / 3)
    assert low < np.sum(np.square(noise)) < high
    assert np.abs(noise).max() > 3.5  # normal numbers drawn in bfloat16 end at 2.9


@pytest.mark.parametrize(
    "name",
    [
        "fedavg",
        pytest.param("pfedhn", marks=pytest.mark.slow("the same programs for another method")),
    ],
)
def test_loose_clipping_without_noise_is_plain_training(name: str):
    def final(training: Any) -> Any:
        algorithm = getattr(algorithms, name)(NETWORK, training, FEDERATION)
        compiled = make_rounds(algorithm, FEDERATION, cohort=4, max_rounds=2)
        state, _ = compiled.run(KEY, compiled.init(KEY), DATA, jnp.int32(0), jnp.int32(2))
        return jax.device_get(state)

    plain = final(example.training(clip_norm=None))
    chex.assert_trees_all_close(final(noisy(ExampleNoise(1e6, 0.0))), plain, rtol=1e-4, atol=1e-5)


ADMITTED = ("fedavg", "fedper", "fedprox", "lg_fedavg", "moon", "pfedhn", "pfedla", "factorized_fl")
REFUSED = {
    "ditto": "trains more than once",
    "fedrep": "trains more than once",
    "fedem": "examples matter for more",
    "fedfomo": "examples matter for more",
    "fedgh": "examples matter for more",
    "fedlc": "examples matter for more",
    "fedproto": "examples matter for more",
    "per_fedavg": "examples matter for more",
    "knn_per": "examples matter for more",
    "scaffold": "collects nothing over steps",
    "local": "uploads nothing",
}


@pytest.mark.parametrize("name", [*ADMITTED, *REFUSED])
def test_only_methods_that_read_examples_by_gradients_are_admitted(name: str):
    def check() -> Algorithm:
        algorithm = getattr(algorithms, name)(NETWORK, noisy(), FEDERATION)
        return example_privacy(DATA, noisy())(algorithm)

    if name in ADMITTED:
        check()
        return
    with pytest.raises(UsageError, match=f"^example-level privacy is not [^\n]*{REFUSED[name]}"):
        check()


def test_batch_norm_and_other_epochs_are_refused():
    with pytest.raises(UsageError, match="use a network without BatchNorm"):
        example_privacy(DATA, noisy())(algorithms.fedavg(tiny.Net(), noisy(), FEDERATION))
    changed = algorithms.fedavg(NETWORK, noisy(epochs=3), FEDERATION)
    with pytest.raises(UsageError, match="changes the epochs, steps or batches"):
        example_privacy(DATA, noisy())(changed)


@pytest.mark.slow("rules of the contract around methods of different structure")
@pytest.mark.parametrize("name", ["fedper", "pfedhn", "pfedla"])
def test_methods_keep_the_rules(name: str):
    def make(federation: Any, settings: Any = ()) -> Algorithm:
        return getattr(algorithms, name)(NETWORK, noisy(), federation)

    subject = rules.Subject(
        name=name,
        make=make,
        world=rules.make_world(example.vectors),
        rows_of_absent_clients_change=name == "pfedhn",
    )
    for rule in ("equals_a_plain_loop", "padding_is_invisible", "absent_clients_are_untouched"):
        getattr(rules, rule)(subject)
