"""FedPer, FedRep, FedBN and LG-FedAvg: the parts of the model, and a round of FedPer."""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import trees
from fedjax_pfl.networks import LeNet
from fedjax_pfl.networks.normalisation import BatchNorm
from tests import cases, tiny
from tests.algorithms.served import KEY, after_rounds, paths, served, trained

LENET = LeNet(batch_norm=True)
IMAGES = tiny.federated()[1]._replace(input_shape=(28, 28, 1), outputs=10)


class Misnamed(nn.Module):
    """A dense layer with the name of a norm, and a BatchNorm with the name of a dense layer."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        x = BatchNorm(name="fc1")(nn.Dense(4, name="norm1")(x), train, mask)
        return nn.Dense(tiny.CLASSES, name="BatchNorm_0")(x)


NORM1 = {f"{part}/norm1/{leaf}" for part, leaf in (("params", "bias"), ("params", "scale"))}
NORM1 |= {"batch_stats/norm1/mean", "batch_stats/norm1/var"}
NORMS = NORM1 | {path.replace("norm1", "norm2") for path in NORM1}
HEAD = {"params/fc2/bias", "params/fc2/kernel"}


def leaves(*layers: str) -> set[str]:
    return {f"params/{layer}/{leaf}" for layer in layers for leaf in ("bias", "kernel")}


@pytest.mark.parametrize(
    ("name", "network", "settings", "personal"),
    [
        ("fedper", tiny.Net(), {}, HEAD),
        ("fedrep", tiny.Net(), {}, HEAD),
        ("lg_fedavg", tiny.Net(), {}, NORM1 | {"params/fc1/kernel"}),
        ("fedbn", LENET, {}, NORMS),
        ("fedbn", Misnamed(), {}, {path.replace("norm1", "fc1") for path in NORM1}),
        ("lg_fedavg", LENET, {"shared_layers": 1}, NORMS | leaves("conv1", "conv2", "fc1", "fc2")),
        ("lg_fedavg", LENET, {"shared_layers": 3}, NORMS | leaves("conv1", "conv2")),
        ("lg_fedavg", LENET, {"shared_layers": 4}, NORM1 | leaves("conv1")),
    ],
)
def test_personal_leaves(name, network, settings, personal):
    """FedBN selects by module, not by name. A BatchNorm belongs to the layer before it."""
    federation = IMAGES if isinstance(network, LeNet) else tiny.federated()[1]
    algorithm = getattr(algorithms, name)(network, cases.training(), federation, **settings)
    state = jax.eval_shape(algorithm.init, KEY)
    assert set(paths(state.clients.personal)) == personal
    example = jnp.zeros((1, *federation.input_shape))
    model = jax.eval_shape(network.init, KEY, example)
    assert set(paths(state.server)) == set(paths(model)) - personal


def test_a_round_of_fedper():
    """Clients train as in FedAvg; the body is averaged, the head is not."""
    federation = tiny.federated()[1]
    algorithm, fedavg = (cases.make(name, federation) for name in ("fedper", "fedavg"))
    start = fedavg.init(KEY)
    models = [trained(fedavg, start, i)[1] for i in range(tiny.CLIENTS)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    mean = trees.weighted_mean(stacked, jnp.asarray(tiny.TRAIN, jnp.float32))
    state, log = after_rounds(algorithm._replace(init=lambda key, _: algorithm.init(KEY, start)), 1)
    for i, model in enumerate(models):
        expected = {**mean, "params": {**mean["params"], "fc2": model["params"]["fc2"]}}
        chex.assert_trees_all_close(served(algorithm, state, i), expected, rtol=1e-5, atol=1e-6)
    assert set(log.down) == set(log.up) == {"fc1", "norm1"}
    assert np.asarray(log.down["fc1"]).sum() == tiny.CLIENTS * 4 * tiny.FEATURES * 8
