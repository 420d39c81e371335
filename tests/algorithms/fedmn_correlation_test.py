"""FedMN-correlation: training, traffic and aggregation."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.fedmn import correlation, router
from fedjax_pfl.algorithms.fedmn.modular import blocks
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext
from fedjax_pfl.core.examples import client_data
from tests import cases, tiny

KEY = jax.random.key(3)
LAYOUT, CLIENT = (2, 2, 2), 3
SIZES = {"layout": LAYOUT, "width": 4, "hidden": 5, "size": 3, "dropout": 0.0}


def make(training: local_training.Training) -> Algorithm:
    federation = tiny.federated()[1]
    return algorithms.fedmn_correlation(tiny.Net(), training, federation, **SIZES)


def router_of(tree: Any) -> Any:
    return {name: layer for name, layer in tree["params"].items() if name.startswith("router")}


@pytest.mark.slow("rounds of its own")
def test_only_the_gate_map_learns_and_embeddings_are_sent_once():
    """φx and φy do not change, and are counted in a client's first round."""
    training = local_training.sgd(learning_rate=0.5, batch_size=16, steps=2, rounds=5)
    data = tiny.federated()[0]
    algorithm = make(training)
    state = jax.jit(algorithm.init)(KEY)
    client, data = trees.row(state.clients, CLIENT), client_data(data, CLIENT)
    ctx, train = ClientContext(CLIENT, data, jnp.int32(0), KEY), jax.jit(algorithm.train)
    result = train(state.server, client, ctx)
    statistics = result.upload["batch_stats"][correlation.STATISTICS]
    network = correlation.Correlation(tiny.Net(), LAYOUT, tiny.CLIENTS, 3)
    variables = {"params": router_of(state.server), "batch_stats": state.server["batch_stats"]}
    signature = correlation.client_signature(network, variables, data, 3, 16)
    np.testing.assert_allclose(
        statistics["mean"], signature.r, rtol=1e-5, atol=1e-6
    )  # wholly its own, once
    # In the first round a client is the mean of all that it knows of: all take the route of b.
    b = state.server["params"]["router_gates"]["bias"]
    first_route = jax.nn.sigmoid(correlation.balanced(b, LAYOUT))
    np.testing.assert_allclose(result.client.pi, first_route, rtol=1e-5)
    # Later others are known, and it goes its own way.
    square = jnp.outer(signature.r, signature.r)
    known_statistics = {"mean": signature.r / 2, "square": square, "chance": signature.chance / 40}
    server = {
        **state.server,
        "batch_stats": {**state.server["batch_stats"], correlation.STATISTICS: known_statistics},
    }
    trained_before = client._replace(pi=jnp.full(10, 0.5))
    later = train(server, trained_before, ctx._replace(t=jnp.int32(1), key=jax.random.key(5)))
    for name in router.EMBEDDINGS:
        chex.assert_trees_all_equal(later.upload["params"][name], server["params"][name])
    before, after = (tree["params"]["router_gates"]["kernel"] for tree in (server, later.upload))
    assert before.shape[0] == 3  # of φx, whatever φy's size is
    assert np.abs(after - before).max() > 0
    bills = {}
    for first in (True, False):
        bills[first] = jax.jit(algorithm.traffic)(server, {**result.upload, "first": first})
    assert bool(result.upload["first"])
    assert not bool(later.upload["first"])
    embeddings = trees.bytes_per_layer({k: server["params"][k] for k in router.EMBEDDINGS})
    embeddings = sum(embeddings.values()) + 4 * 2 * tiny.HIDDEN  # and BatchNorm's statistics
    down = {first: int(sum(traffic.down.values())) for first, traffic in bills.items()}
    assert down[True] - down[False] == embeddings
    assert int(sum(bills[True].up.values())) == down[False]


@pytest.mark.slow("rounds of its own")
def test_an_unused_encoder_neither_changes_nor_is_sent():
    """It is not counted, and is averaged over the clients that use it."""
    algorithm = make(cases.training())
    data, names = tiny.federated()[0], blocks(LAYOUT, trimmed=True)
    state, ids = jax.jit(algorithm.init)(KEY), jnp.arange(tiny.CLIENTS)

    def train(i: jax.Array, client: Any) -> Any:
        ctx = ClientContext(i, client_data(data, i), jnp.int32(0), jax.random.fold_in(KEY, i))
        return algorithm.train(state.server, client, ctx)

    result = jax.jit(jax.vmap(train))(ids, state.clients)
    active = np.asarray(result.upload["active"])
    assert active.shape == (tiny.CLIENTS, 6)
    assert not active[:, :2].all()
    bytes_of = trees.bytes_per_layer(state.server)
    for j, name in enumerate(("encoder1", "encoder2")):

        def leaves_of(tree: Any, name: str = name) -> Any:
            return jax.tree.leaves([tree[part][name] for part in ("params", "batch_stats")])

        changed = np.concatenate(
            [
                (np.asarray(leaf) != np.asarray(before)[None]).reshape(tiny.CLIENTS, -1)
                for leaf, before in zip(
                    leaves_of(result.upload), leaves_of(state.server), strict=True
                )
            ],
            1,
        )
        np.testing.assert_array_equal(changed.any(1), active[:, j])
        for k in range(tiny.CLIENTS):
            traffic = algorithm.traffic(state.server, trees.row(result.upload, k)).up
            billed = sum(int(v) for layer, v in traffic.items() if layer.startswith(name))
            size_all = sum(v for layer, v in bytes_of.items() if layer.startswith(name))
            assert billed == size_all * active[k, j]
    n, leaf = (
        np.asarray(tiny.TRAIN, float),
        lambda tree: tree["params"]["encoder1"]["fc1"]["kernel"],
    )
    cohort = tiny.cohort(n, ids, jnp.ones(tiny.CLIENTS, bool), state.server, result.upload, 0)
    share = n * active[:, names.index("encoder1")]
    mixed = np.tensordot(share / max(share.sum(), 1), np.asarray(leaf(result.upload)), 1)
    expected = mixed if share.any() else leaf(state.server)
    np.testing.assert_allclose(
        leaf(algorithm.receive(state, cohort)[0]), expected, rtol=1e-5, atol=1e-6
    )
