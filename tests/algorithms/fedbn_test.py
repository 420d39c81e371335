"""FedBN: BatchNorm stays on the client, all other layers are shared."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np

from fedjax_pfl import algorithms
from fedjax_pfl.networks import LeNet
from fedjax_pfl.networks.normalisation import batch_norm
from tests import cases, tiny
from tests.algorithms.served import KEY, after_rounds, paths, served


class Misnamed(nn.Module):
    """A dense layer with the name of a norm, and a BatchNorm with the name of a dense layer."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        x = batch_norm(nn.Dense(4, name="norm1")(x), train, mask, "fc1")
        return nn.Dense(tiny.CLASSES, name="BatchNorm_0")(x)


def state_of(model: Any, federation: Any) -> Any:
    return jax.eval_shape(algorithms.fedbn(model, cases.training(), federation).init, KEY)


def test_personal_leaves():
    images = tiny.federated()[1]._replace(input_shape=(28, 28, 1), outputs=10)
    state = state_of(LeNet(batch_norm=True), images)
    assert paths(state.clients.personal) == [
        "batch_stats/norm1/mean",
        "batch_stats/norm1/var",
        "batch_stats/norm2/mean",
        "batch_stats/norm2/var",
        "params/norm1/bias",
        "params/norm1/scale",
        "params/norm2/bias",
        "params/norm2/scale",
    ]
    layers = ("conv1", "conv2", "fc1", "fc2", "fc3")
    assert paths(state.server) == [f"params/{n}/{w}" for n in layers for w in ("bias", "kernel")]


def test_names_of_layers_do_not_matter():
    state = state_of(Misnamed(), tiny.federated()[1])
    personal = [
        "batch_stats/fc1/mean",
        "batch_stats/fc1/var",
        "params/fc1/bias",
        "params/fc1/scale",
    ]
    assert paths(state.clients.personal) == personal


def test_clients_differ_only_in_batch_norm():
    algorithm = cases.make("fedbn", tiny.federated()[1])
    state, log = after_rounds(algorithm, 2)
    assert set(log.down) == set(log.up) == {"fc1", "fc2"}
    first, second = served(algorithm, state, 0), served(algorithm, state, 1)
    model = tiny.Net().init(KEY, np.zeros((1, tiny.FEATURES), np.float32))
    assert jax.tree.structure(first) == jax.tree.structure(model)
    pairs = zip(jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(second), strict=True)
    differ = sorted("/".join(e.key for e in path) for (path, a), b in pairs if (a != b).any())
    assert differ == [
        "batch_stats/norm1/mean",
        "batch_stats/norm1/var",
        "params/norm1/bias",
        "params/norm1/scale",
    ]
