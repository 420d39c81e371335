"""FedPer: the head stays on the client, the body is averaged, both train together."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core import trees
from tests import cases, tiny
from tests.algorithms.served import KEY, after_rounds, paths, served, trained


def test_personal_leaves():
    algorithm = cases.make("fedper", tiny.federated()[1])
    state = jax.eval_shape(algorithm.init, KEY)
    assert paths(state.clients.personal) == ["params/fc2/bias", "params/fc2/kernel"]
    assert paths(state.server) == [
        "batch_stats/norm1/mean",
        "batch_stats/norm1/var",
        "params/fc1/kernel",
        "params/norm1/bias",
        "params/norm1/scale",
    ]


def test_one_client_equals_local():
    federation = tiny.federated(clients=1)[1]
    models = []
    for name in ("fedper", "local"):
        algorithm = cases.make(name, federation)
        state, _ = after_rounds(algorithm, 3, clients=1)
        models.append(served(algorithm, state, 0))
    chex.assert_trees_all_close(*models, rtol=1e-6, atol=1e-7)


def test_a_round_by_hand():
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
