"""Methods that compute means in float32 keep the dtypes of a network in bfloat16."""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pfl as pfl
from fedjax_pfl.core import offload, trees
from tests import cases, tiny

pytestmark = pytest.mark.slow("a program for each method")


class Narrow(nn.Module):
    """Two dense layers with parameters in bfloat16."""

    outputs: int = 3
    head = "fc2"
    layers = ("fc1", "fc2")

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        dtypes = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        x = nn.relu(nn.Dense(8, name="fc1", **dtypes)(x))
        return nn.Dense(self.outputs, name="fc2", **dtypes)(x)


# Methods that mix models in different ways.
QUICK = ("apfl", "factorized_fl", "fedavg", "fedfomo", "scaffold")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow("one method of many"))
        for name in cases.NAMES
        if name != "fedbn"  # needs BatchNorm
    ],
)
def test_dtypes_of_a_round(name: str):
    """A parameter is two bytes, also in an upload."""
    data, federation = tiny.federated()
    training = pfl.local_sgd(0.1, steps=1, momentum=0.9, keep_optimizer=True)
    settings = cases.CASES[name].settings
    with jax.numpy_dtype_promotion("standard"):  # as for users; the tests are strict
        method = cases.FACTORIES[name](Narrow(), training, federation, **settings)
        examples = pfl.PartitionedData(data, federation)
        simulation = pfl.Simulation(method, examples, evaluate_after=False)
        state, log = simulation.run_round(simulation.init(), 0)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, simulation.init())
    if name in ("fedavg", "apfl", "pfedla"):
        sent = sum(log.bytes_up_by_layer[layer] for layer in ("fc1", "fc2"))
        assert sent == federation.clients * 2 * (5 * 8 + 8 + 8 * 3 + 3)


@pytest.mark.parametrize("clients", [3, 7, 10])
def test_a_mean_has_no_bias(clients: int):
    """Shares of 1/7 in bfloat16 would sum to 0.998, and every round would shrink the model.

    One rounding to bfloat16 hides that in most entries, but not in the sum of 4,096.
    """
    rows = np.random.default_rng(clients).uniform(1, 2, (clients, 4096))
    stacked = jnp.asarray(rows, jnp.bfloat16)
    expected = np.asarray(stacked, np.float64).mean(0).sum()
    weights = jnp.ones(clients)
    offloaded = offload.Offloaded(
        source=Stored(np.asarray(stacked)),
        k=0,
        shape=stacked.shape,
        dtype=stacked.dtype,
        ids=jnp.zeros(0, jnp.int32),
        values=jnp.zeros((0, 4096)),
    )
    for mean in (
        trees.weighted_mean(stacked, weights),
        offload.weighted_sum(stacked, weights / clients),
        offload.weighted_sum(offloaded, weights / clients),
    ):
        assert mean.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(mean, np.float64).sum(), expected, rtol=3e-4)


class Stored:
    """A source of rows, as stores have for leaves off the device."""

    def __init__(self, rows: np.ndarray):
        self.rows = rows

    def read(self, leaves: Any, ids: np.ndarray) -> list[np.ndarray]:
        return [self.rows[ids] for _ in leaves]
