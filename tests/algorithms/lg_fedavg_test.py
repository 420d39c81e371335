"""LG-FedAvg: the early layers stay, the last ones are averaged."""

from typing import Any

import chex
import jax
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks import LeNet
from tests import cases, tiny
from tests.algorithms.served import KEY, after_rounds, paths, served


def layers(tree: Any) -> list[str]:
    return sorted({path.split("/")[1] for path in paths(tree)})


def test_personal_leaves():
    state = jax.eval_shape(cases.make("lg_fedavg", tiny.federated()[1]).init, KEY)
    assert paths(state.clients.own) == [
        "batch_stats/norm1/mean",
        "batch_stats/norm1/var",
        "params/fc1/kernel",
        "params/norm1/bias",
        "params/norm1/scale",
    ]
    assert paths(state.server) == ["params/fc2/bias", "params/fc2/kernel"]


@pytest.mark.parametrize(
    ("count", "own"),
    [
        (1, ["conv1", "conv2", "fc1", "fc2", "norm1", "norm2"]),
        (3, ["conv1", "conv2", "norm1", "norm2"]),
        (4, ["conv1", "norm1"]),
    ],
)
def test_a_batch_norm_goes_with_the_layer_before_it(count: int, own: list[str]):
    images = tiny.federated()[1]._replace(input_shape=(28, 28, 1), outputs=10)
    made = algorithms.lg_fedavg(
        LeNet(batch_norm=True), cases.training(), images, shared_layers=count
    )
    state = jax.eval_shape(made.init, KEY)
    every = {"conv1", "norm1", "conv2", "norm2", "fc1", "fc2", "fc3"}
    assert layers(state.clients.own) == own
    assert layers(state.server) == sorted(every - set(own))


@pytest.mark.slow("two methods' rounds")
def test_from_fedavg_all_are_first_served_its_model():
    federation = tiny.federated()[1]
    made = cases.make("lg_fedavg", federation)
    start, _ = after_rounds(cases.make("fedavg", federation), 2)
    begun = made.init(KEY, start)
    for i in range(tiny.CLIENTS):
        chex.assert_trees_all_equal(served(made, begun, i), start.server)
    state, log = after_rounds(made._replace(init=lambda key, _: made.init(key, start)), 2)
    assert set(log.down) == set(log.up) == {"fc2"}
    one, other = served(made, state, 0), served(made, state, 1)
    chex.assert_trees_all_equal(one["params"]["fc2"], other["params"]["fc2"])


@pytest.mark.parametrize("count", [0, 2])
def test_something_is_shared_and_something_stays(count: int):
    with pytest.raises(UsageError, match=rf"^lg_fedavg.shared_layers is {count}.*1 to 1"):
        algorithms.lg_fedavg(tiny.Net(), cases.training(), tiny.federated()[1], shared_layers=count)
