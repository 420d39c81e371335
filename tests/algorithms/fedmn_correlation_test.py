"""FedMN-correlation: training, traffic and aggregation."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.fedmn import correlation, router
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext
from fedjax_pfl.core.examples import client_data
from tests import cases, tiny

KEY = jax.random.key(3)
LAYOUT, CLIENT = (2, 2, 2), 3
SIZES = {"layout": LAYOUT, "width": 4, "hidden": 5, "size": 3, "dropout": 0.0}


def make(training: local_training.Training) -> Algorithm:
    federation = tiny.federated()[1]
    return algorithms.fedmn_correlation(tiny.Net(), training, federation, **SIZES, rounds=5)


def test_only_the_gate_map_learns_and_embeddings_are_sent_once():
    """φx and φy do not change, and are counted in a client's first round."""
    training = local_training.sgd(learning_rate=0.5, batch_size=16, steps=2)
    data = tiny.federated()[0]
    algorithm = make(training)
    state = jax.jit(algorithm.init)(KEY)
    client, data = trees.row(state.clients, CLIENT), client_data(data, CLIENT)
    ctx, train = ClientContext(CLIENT, data, jnp.int32(0), KEY), jax.jit(algorithm.train)
    result = train(state.server, client, ctx)
    statistics = result.upload["batch_stats"][correlation.STATISTICS]
    network = correlation.Correlation(tiny.Net(), LAYOUT, tiny.CLIENTS, 3)
    layers = state.server["params"].items()
    params = {name: layer for name, layer in layers if name.startswith("router")}
    variables = {"params": params, "batch_stats": state.server["batch_stats"]}
    signature = correlation.client_signature(network, variables, data, 3, 16)
    # In the first round the statistics are the client's alone, so its route is that of b.
    np.testing.assert_allclose(statistics["mean"], signature.r, rtol=1e-5, atol=1e-6)
    b = state.server["params"]["router_gates"]["bias"]
    first_route = jax.nn.sigmoid(correlation.balanced(b, LAYOUT))
    np.testing.assert_allclose(result.client.pi, first_route, rtol=1e-5)
    # Later the statistics include other clients.
    square = jnp.outer(signature.r, signature.r)
    mixed_statistics = {"mean": signature.r / 2, "square": square, "chance": signature.chance / 40}
    server = {
        **state.server,
        "batch_stats": {**state.server["batch_stats"], correlation.STATISTICS: mixed_statistics},
    }
    trained_before = client._replace(pi=jnp.full(10, 0.5))
    later = train(server, trained_before, ctx._replace(t=jnp.int32(1), key=jax.random.key(5)))
    for name in router.EMBEDDINGS:
        chex.assert_trees_all_equal(later.upload["params"][name], server["params"][name])
    before, after = (tree["params"]["router_gates"]["kernel"] for tree in (server, later.upload))
    assert before.shape[0] == 3  # of φx, whatever φy's size is
    assert np.abs(after - before).max() > 0
    traffic = {
        first: jax.jit(algorithm.traffic)(server, {**result.upload, "first": first})
        for first in (True, False)
    }
    assert bool(result.upload["first"])
    assert not bool(later.upload["first"])
    embeddings = trees.bytes_per_layer({k: server["params"][k] for k in router.EMBEDDINGS})
    embeddings = sum(embeddings.values()) + 4 * 2 * tiny.HIDDEN  # and BatchNorm's statistics
    down = {first: int(sum(t.down.values())) for first, t in traffic.items()}
    assert down[True] - down[False] == embeddings
    assert int(sum(traffic[True].up.values())) == down[False]


def test_an_unused_encoder_neither_changes_nor_is_sent():
    algorithm, data = make(cases.training()), tiny.federated()[0]
    state, ids = jax.jit(algorithm.init)(KEY), jnp.arange(tiny.CLIENTS)

    def train(i: jax.Array, client: Any) -> Any:
        ctx = ClientContext(i, client_data(data, i), jnp.int32(0), jax.random.fold_in(KEY, i))
        return algorithm.train(state.server, client, ctx)

    result = jax.device_get(jax.jit(jax.vmap(train))(ids, state.clients))
    active = result.upload["active"]
    assert active.shape == (tiny.CLIENTS, 6)
    assert not active[:, :2].all()
    for j, name in enumerate(("encoder1", "encoder2")):
        changed = np.zeros(tiny.CLIENTS, bool)
        for part in ("params", "batch_stats"):
            leaves = map(jax.tree.leaves, (result.upload[part][name], state.server[part][name]))
            for leaf, before in zip(*leaves, strict=True):
                changed |= np.not_equal(leaf, before).reshape(tiny.CLIENTS, -1).any(1)
        np.testing.assert_array_equal(changed, active[:, j])
        for k in range(tiny.CLIENTS):
            traffic = algorithm.traffic(state.server, trees.row(result.upload, k)).up
            sent = sum(int(v) for layer, v in traffic.items() if layer.startswith(name))
            assert (sent > 0) == active[k, j]
