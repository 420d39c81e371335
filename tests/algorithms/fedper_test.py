"""FedPer: the head stays, the body is averaged, both are trained together."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import trees
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks import MLP
from tests import cases, tiny
from tests.algorithms.served import KEY, after_rounds, paths, served, trained


def test_personal_leaves():
    made = cases.make("fedper", tiny.federated()[1])
    state = jax.eval_shape(made.init, KEY)
    assert paths(state.clients.own) == ["params/fc2/bias", "params/fc2/kernel"]
    assert paths(state.server) == [
        "batch_stats/norm1/mean",
        "batch_stats/norm1/var",
        "params/fc1/kernel",
        "params/norm1/bias",
        "params/norm1/scale",
    ]


def test_one_client_is_local():
    federation = tiny.federated(clients=1)[1]
    models = []
    for name in ("fedper", "local"):
        made = cases.make(name, federation)
        state, _ = after_rounds(made, 3, clients=1)
        models.append(served(made, state, 0))
    chex.assert_trees_all_close(*models, rtol=1e-6, atol=1e-7)


def test_a_round_by_hand():
    """Each client does FedAvg's work; the body is its mean and the head its own."""
    federation = tiny.federated()[1]
    made, fedavg = (cases.make(name, federation) for name in ("fedper", "fedavg"))
    start = fedavg.init(KEY)
    models = [trained(fedavg, start, i)[1] for i in range(tiny.CLIENTS)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    mean = trees.weighted_mean(stacked, jnp.asarray(tiny.TRAIN, jnp.float32))
    state, log = after_rounds(made._replace(init=lambda key, _: made.init(KEY, start)), 1)
    for i, model in enumerate(models):
        wanted = {**mean, "params": {**mean["params"], "fc2": model["params"]["fc2"]}}
        chex.assert_trees_all_close(served(made, state, i), wanted, rtol=1e-5, atol=1e-6)
    assert set(log.down) == set(log.up) == {"fc1", "norm1"}
    assert np.asarray(log.down["fc1"]).sum() == tiny.CLIENTS * 4 * tiny.FEATURES * 8


def test_a_network_of_one_layer_is_an_error():
    with pytest.raises(UsageError, match="fc1"):
        algorithms.fedper(MLP(hidden=()), cases.training(), tiny.federated()[1])
