"""BatchNorm equals Flax's, with gradients of first and second order, also with pooling."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.networks.lowerings.conv import max_pool
from fedjax_pfl.networks.normalisation import BatchNorm

KEYS = jax.random.split(jax.random.key(0))
X = 3 + 2 * jax.random.normal(KEYS[0], (6, 4, 6, 5))
MASK = jnp.array([True, True, False, True, True, False])
PARAMS = {
    "scale": jnp.array([1.0, -2.0, 0.5, 0.2, -0.1]),
    "bias": jnp.array([0.0, 1.0, -1.0, 2.0, 3.0]),
}
STATS = {"mean": jnp.arange(5.0), "var": jnp.arange(1.0, 6.0)}


def measure(apply):
    """Returns results, gradients, and gradients of the sum of their cubes."""
    weights = jax.random.normal(KEYS[1], apply(PARAMS, X)[0].shape)
    seen = MASK.reshape(-1, 1, 1, 1).astype(jnp.float32)

    def loss(params, x):
        return jnp.sum(jnp.sin(apply(params, x)[0]) * weights * seen)

    def sum_of_cubes(params, x):  # squares would hide the mean, as gradients of x add up to 0
        gradients = jax.grad(loss, (0, 1))(params, x)
        return sum(jnp.sum(leaf**3) for leaf in jax.tree.leaves(gradients))

    def everything(params, x):
        first = jax.grad(loss, (0, 1))(params, x)
        return apply(params, x), first, jax.grad(sum_of_cubes, (0, 1))(params, x)

    return jax.jit(everything)(PARAMS, X)


_MODES = [(True, MASK), (True, None), (False, MASK)]
_CASES = [(*mode, pool) for mode in _MODES for pool in (None, (2, 3))]
_SLOW = [pytest.param(*case, marks=pytest.mark.slow("more modes")) for case in _CASES[1:]]


@pytest.mark.parametrize(("train", "mask", "pool"), [_CASES[0], *_SLOW])
def test_equals_flax(train, mask, pool):
    flax_layer = nn.BatchNorm(not train, momentum=0.9, use_fast_variance=False)
    flax_mask = None if mask is None else mask.reshape(-1, 1, 1, 1)

    def expected(params, x, max_pool=nn.max_pool):
        variables = {"params": params, "batch_stats": STATS}
        y, new = flax_layer.apply(variables, x, mask=flax_mask, mutable=["batch_stats"])
        return max_pool(y, pool, pool) if pool else y, new

    def actual(params, x):
        variables = {"params": params, "batch_stats": STATS}
        return BatchNorm(pool).apply(variables, x, train, mask, mutable=["batch_stats"])

    # With AVX2 XLA rounds the layer's result in two ways here, which pooling must survive.
    library_pooling = measure(functools.partial(expected, max_pool=max_pool))
    for values in (measure(actual), library_pooling):
        chex.assert_trees_all_close(values, measure(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("train", [True, False])
def test_initial_values_are_those_of_flax(train):
    expected = nn.BatchNorm(not train).init(KEYS[0], X)
    chex.assert_trees_all_equal(BatchNorm().init(KEYS[0], X, train, None), expected)


def test_without_examples_all_rows_count():
    variables = {"params": PARAMS, "batch_stats": STATS}
    apply = jax.jit(
        lambda mask: BatchNorm().apply(variables, X, True, mask, mutable=["batch_stats"])
    )
    chex.assert_trees_all_close(apply(jnp.zeros(6, bool)), apply(jnp.ones(6, bool)))
    mean = np.asarray(X).mean((0, 1, 2))
    np.testing.assert_allclose(
        apply(jnp.zeros(6, bool))[1]["batch_stats"]["mean"], 0.9 * STATS["mean"] + 0.1 * mean, 1e-5
    )
