"""LG-FedAvg: early layers stay on the client, the last layers are averaged."""

from typing import Any

import chex
import jax
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.networks import LeNet
from tests import cases, tiny
from tests.algorithms.served import KEY, after_rounds, paths, served


def layers(tree: Any) -> list[str]:
    return sorted({path.split("/")[1] for path in paths(tree)})


def test_personal_leaves():
    state = jax.eval_shape(cases.make("lg_fedavg", tiny.federated()[1]).init, KEY)
    assert paths(state.clients.personal) == [
        "batch_stats/norm1/mean",
        "batch_stats/norm1/var",
        "params/fc1/kernel",
        "params/norm1/bias",
        "params/norm1/scale",
    ]
    assert paths(state.server) == ["params/fc2/bias", "params/fc2/kernel"]


@pytest.mark.parametrize(
    ("count", "personal"),
    [
        (1, ["conv1", "conv2", "fc1", "fc2", "norm1", "norm2"]),
        (3, ["conv1", "conv2", "norm1", "norm2"]),
        (4, ["conv1", "norm1"]),
    ],
)
def test_a_batch_norm_belongs_to_the_layer_before_it(count: int, personal: list[str]):
    images = tiny.federated()[1]._replace(input_shape=(28, 28, 1), outputs=10)
    algorithm = algorithms.lg_fedavg(
        LeNet(batch_norm=True), cases.training(), images, shared_layers=count
    )
    state = jax.eval_shape(algorithm.init, KEY)
    all_layers = {"conv1", "norm1", "conv2", "norm2", "fc1", "fc2", "fc3"}
    assert layers(state.clients.personal) == personal
    assert layers(state.server) == sorted(all_layers - set(personal))


@pytest.mark.slow("two methods' rounds")
def test_a_phase_after_fedavg_starts_from_its_model():
    federation = tiny.federated()[1]
    algorithm = cases.make("lg_fedavg", federation)
    start, _ = after_rounds(cases.make("fedavg", federation), 2)
    state0 = algorithm.init(KEY, start)
    for i in range(tiny.CLIENTS):
        chex.assert_trees_all_equal(served(algorithm, state0, i), start.server)
    state, log = after_rounds(algorithm._replace(init=lambda key, _: algorithm.init(key, start)), 2)
    assert set(log.down) == set(log.up) == {"fc2"}
    first, second = served(algorithm, state, 0), served(algorithm, state, 1)
    chex.assert_trees_all_equal(first["params"]["fc2"], second["params"]["fc2"])
