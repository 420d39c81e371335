"""Methods that compute means in float32 keep the dtypes of a network in bfloat16."""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import fedjax_pfl as pfl
from tests import cases, tiny


class Narrow(nn.Module):
    """Two dense layers with parameters in bfloat16."""

    head = "fc2"
    layers = ("fc1", "fc2")

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        dtypes = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        x = nn.relu(nn.Dense(8, name="fc1", **dtypes)(x))
        return nn.Dense(3, name="fc2", **dtypes)(x)


@pytest.mark.parametrize("name", ["fedavg", "fedfomo", "pefll"])
def test_dtypes_of_a_round(name: str):
    """A parameter is two bytes, also in an upload."""
    data, federation = tiny.federated()
    training, settings = pfl.local_sgd(0.1, steps=1), cases.CASES[name].settings
    method = cases.FACTORIES[name](Narrow(), training, federation, **settings)
    simulation = pfl.Simulation(method, pfl.PartitionedData(data, federation), evaluate_after=False)
    state, log = simulation.run_round(simulation.init(), 0)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, simulation.init())
    if name != "pefll":  # whose clients upload descriptors and gradients
        sent = sum(log.bytes_up_by_layer[layer] for layer in ("fc1", "fc2"))
        assert sent == federation.clients * 2 * (5 * 8 + 8 + 8 * 3 + 3)
