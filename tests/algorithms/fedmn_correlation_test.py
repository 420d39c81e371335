"""FedMN-correlation: signatures against NumPy, routes, training and traffic."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.fedmn import correlation, correlation_variant, router
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext
from fedjax_pfl.core.examples import client_data
from tests import cases, tiny

pytestmark = pytest.mark.slow("many programs of a variant")

KEY = jax.random.key(3)
LAYOUT = (2, 3, 2)
SIZE = 6
CLIENTS = 5


@pytest.fixture(scope="module")
def router_and_data():
    network = correlation.Correlation(tiny.Net(), LAYOUT, CLIENTS, SIZE)
    x, y = jnp.zeros((2, tiny.FEATURES)), jnp.zeros((2, tiny.CLASSES))
    return network, network.init(KEY, x, y), client_data(tiny.federated()[0], 3)


@pytest.mark.parametrize(("active", "count"), [([1, 1, 0, 1, 1, 0], 4), ([0] * 6, 1)])
def test_statistics_are_of_the_active_clients(active, count, monkeypatch):
    counts = []

    def correlations(model, layout, clients, size):
        counts.append(clients)
        return correlation.Correlation(model, layout, clients, size)

    monkeypatch.setattr(correlation_variant, "Correlation", correlations)
    federation = tiny.federated()[1]._replace(active=np.array(active, bool))
    algorithms.fedmn_correlation(tiny.Net(), cases.training(), federation, layout=LAYOUT)
    assert counts == [count]


def test_a_signature_equals_numpys_correlation_for_any_batch_size(router_and_data):
    network, variables, data = router_and_data
    rows = np.asarray(data.train.rows)[: int(data.train.size)]
    x, y = data.x[rows], jax.nn.one_hot(data.y[rows], tiny.CLASSES)
    image_embeddings, label_embeddings = network.apply(variables, x, y, method="embed")
    pairs = zip(image_embeddings.T, label_embeddings.T, strict=True)
    expected = np.array([np.corrcoef(a, b)[0, 1] for a, b in pairs])
    chance = (1 - expected**2) ** 2 / (len(rows) - 1)
    for size in (1, 5, 64):
        got = correlation.client_signature(network, variables, data, tiny.CLASSES, size)
        np.testing.assert_allclose(got.r, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got.chance, chance, rtol=1e-3, atol=1e-6)


def test_constant_embeddings_have_correlation_0():
    ones, x = jnp.ones((4, 2)), jnp.arange(8.0).reshape(4, 2)
    got = correlation.signature(correlation.moments(ones, x, jnp.ones(4, bool)), 4)
    np.testing.assert_array_equal(got.r, 0)
    np.testing.assert_array_equal(got.chance, 0)


def test_a_single_example_has_correlation_0():
    image, label = jnp.array([[1.0, 2.0]]), jnp.array([[3.0, -1.0]])
    got = correlation.signature(correlation.moments(image, label, jnp.ones(1, bool)), 1)
    np.testing.assert_array_equal(got.r, 0)
    np.testing.assert_array_equal(got.chance, 0)


def statistics(r: np.ndarray, chance: np.ndarray) -> dict[str, jax.Array]:
    """Returns the running averages for clients with signatures r [K, d]."""
    averages = {"mean": r.mean(0), "square": r.T @ r / len(r), "chance": chance}
    return jax.tree.map(jnp.float32, averages)


def compare_clients(r: np.ndarray, chance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns s [K, d] and ρ [K] of all clients."""
    apply = correlation.Statistics(len(r)).apply
    averages = {"batch_stats": statistics(r, chance)}
    s, rho = jax.vmap(lambda row: apply(averages, row))(jnp.asarray(r, jnp.float32))
    return np.asarray(s), np.asarray(rho)


def test_statistics_by_hand():
    """Four clients, two of them with the opposite sign in the first entry.

    With S = (0.04, 0.01), D r is ±5 and ±1, so λ = 25 and 1. λ₊ = (1 + √½)² = 2.914. Hence s is
    the sign of the first entry and ρ = 1 − 2.914/25. Entries without variance are ignored.
    """
    r = np.array([[1.0, 0.1], [1.0, -0.1], [-1.0, 0.1], [-1.0, -0.1]])
    s, rho = compare_clients(r, np.array([0.04, 0.01]))
    np.testing.assert_allclose(s, [[1, 0], [1, 0], [-1, 0], [-1, 0]], atol=1e-6)
    np.testing.assert_allclose(rho, 1 - (1 + 0.5**0.5) ** 2 / 25, rtol=1e-5)
    for chance in ([1.0, 1.0], [0.0, 0.0]):
        s, rho = compare_clients(r, np.array(chance))
        np.testing.assert_array_equal(s, 0)
        np.testing.assert_array_equal(rho, 0)


def test_statistics_equal_numpy():
    """Three directions: the weakest is ignored, the others are weighted by f."""
    noise = np.random.default_rng(0)
    chance = noise.uniform(0.5, 2.0, SIZE)
    turn = np.linalg.qr(noise.normal(size=(SIZE, SIZE)))[0][:3]
    r = (noise.normal(size=(40, 3)) * [30.0, 6.0, 0.2]) @ turn * np.sqrt(chance) + 1.0
    white = (r - r.mean(0)) / np.sqrt(chance)
    _, size, axes = np.linalg.svd(white, full_matrices=False)
    spread, edge = size**2 / len(r), (1 + np.sqrt(SIZE / len(r))) ** 2
    averages = np.maximum(1 - edge / np.maximum(spread, 1e-12), 0)
    assert (averages > 0).sum() == 2
    expected = white @ axes.T @ np.diag(averages) @ axes / np.sqrt(np.sum(averages**2 * spread))
    s, rho = compare_clients(r, chance)
    np.testing.assert_allclose(s, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(rho, averages.max(), rtol=1e-4)
    np.testing.assert_allclose(np.mean(np.sum(s**2, 1)), 1, rtol=1e-3)


def test_clients_that_differ_by_chance_take_the_same_route(router_and_data):
    network, variables, _ = router_and_data
    clients = np.asarray(jax.random.normal(KEY, (CLIENTS, SIZE)))
    bias = variables["params"]["router_gates"]["bias"]
    routes = {}
    for chance in (0.01, 100.0):
        averages = {correlation.STATISTICS: statistics(clients, np.full(SIZE, chance))}
        state = {**variables, "batch_stats": {**variables["batch_stats"], **averages}}
        signatures = [correlation.Signature(r, jnp.zeros(SIZE)) for r in clients]
        routes[chance] = np.stack([correlation.logits(network, state, s) for s in signatures])
    expected = np.asarray(correlation.balanced(bias, LAYOUT))
    np.testing.assert_allclose(routes[100.0], np.tile(expected, (5, 1)), rtol=1e-5)
    assert len(np.unique(routes[0.01] > 0, axis=0)) > 2


def test_one_of_two_alternatives_is_open_and_a_single_one_always():
    for layout in ((2, 2, 2), (1, 4, 2)):
        z = jax.random.normal(KEY, (router.paths(layout),))
        matrices = router.cut(np.asarray(correlation.balanced(z, layout)), layout)
        for matrix in matrices:
            if matrix.shape[1] == 2:
                np.testing.assert_array_equal((matrix > 0).sum(1), 1)
            elif matrix.shape[1] == 1:
                assert (matrix > 0).all()
        reached, _ = router.connected(correlation.balanced(z, layout) > 0, layout)
        assert bool(reached[-1].all())  # there is a path already
    three = router.cut(np.asarray(correlation.balanced(jnp.array([3.0, 0, 0] * 2), (3, 1))), (3, 1))
    expected = np.array([[2.0, -1, -1]]) / np.sqrt(2 / 3)
    np.testing.assert_allclose(three[0], expected, rtol=1e-6)


def test_only_the_map_of_signatures_has_a_gradient(router_and_data):
    network, variables, data = router_and_data
    signature = correlation.client_signature(network, variables, data, tiny.CLASSES, 5)
    variables = correlation.averaged(
        variables, correlation.Signature(-signature.r, 0.01 * signature.chance), 0.5
    )
    cotangent = jax.random.normal(KEY, (router.paths(LAYOUT),))
    grads = correlation.pull(network, variables, signature, cotangent)
    for name in router.EMBEDDINGS:
        chex.assert_trees_all_equal(grads[name], jax.tree.map(jnp.zeros_like, grads[name]))
    params = variables["params"]
    step = jax.tree.map(lambda g: 1e-2 * g, grads["router_gates"])

    def along(sign: float) -> float:
        gates = jax.tree.map(lambda p, d: p + sign * d, params["router_gates"], step)
        shifted = {**variables, "params": {**params, "router_gates": gates}}
        return float(jnp.sum(cotangent * correlation.logits(network, shifted, signature)))

    squared = sum(float(jnp.sum(jnp.square(g))) for g in jax.tree.leaves(grads))
    np.testing.assert_allclose((along(1.0) - along(-1.0)) / 2e-2, squared, rtol=1e-3)


def test_running_averages_move_by_share(router_and_data):
    network, variables, data = router_and_data
    signature = correlation.client_signature(network, variables, data, tiny.CLASSES, 5)
    old = variables["batch_stats"][correlation.STATISTICS]
    new = correlation.averaged(variables, signature, 0.1)["batch_stats"][correlation.STATISTICS]
    r = np.asarray(signature.r, np.float64)
    np.testing.assert_allclose(new["mean"], 0.9 * old["mean"] + 0.1 * r, rtol=1e-5, atol=1e-7)
    square = 0.9 * old["square"] + 0.1 * np.outer(r, r)
    np.testing.assert_allclose(new["square"], square, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        new["chance"], 0.9 * old["chance"] + 0.1 * signature.chance, rtol=1e-5
    )


# Training and traffic

LAYER_SIZES = {"layout": (2, 2, 2), "width": 4, "hidden": 5, "size": 3, "dropout": 0.0}
CLIENT = 3


def make(training: local_training.Training) -> Algorithm:
    federation = tiny.federated()[1]
    settings = {**LAYER_SIZES, "rounds": 5, "first_round": 20}
    return algorithms.fedmn_correlation(tiny.Net(), training, federation, **settings)


def test_only_the_gate_map_learns_and_embeddings_are_sent_once():
    """φx and φy do not change, and are counted in a client's first round."""
    training = local_training.sgd(learning_rate=0.5, batch_size=16, steps=2)
    data = tiny.federated()[0]
    algorithm = make(training)
    state = jax.jit(algorithm.init)(KEY)
    client, data = trees.row(state.clients, CLIENT), client_data(data, CLIENT)
    ctx, train = ClientContext(CLIENT, data, jnp.int32(20), KEY), jax.jit(algorithm.train)
    result = train(state.server, client, ctx)
    statistics = result.upload["batch_stats"][correlation.STATISTICS]
    network = correlation.Correlation(tiny.Net(), LAYER_SIZES["layout"], tiny.CLIENTS, 3)
    layers = state.server["params"].items()
    params = {name: layer for name, layer in layers if name.startswith("router")}
    variables = {"params": params, "batch_stats": state.server["batch_stats"]}
    signature = correlation.client_signature(network, variables, data, 3, 16)
    # In the first round the statistics are the client's alone, so its route is that of b.
    np.testing.assert_allclose(statistics["mean"], signature.r, rtol=1e-5, atol=1e-6)
    b = state.server["params"]["router_gates"]["bias"]
    first_route = jax.nn.sigmoid(correlation.balanced(b, LAYER_SIZES["layout"]))
    np.testing.assert_allclose(result.client.pi, first_route, rtol=1e-5)
    # Later the statistics include other clients.
    square = jnp.outer(signature.r, signature.r)
    mixed_statistics = {"mean": signature.r / 2, "square": square, "chance": signature.chance / 40}
    server = {
        **state.server,
        "batch_stats": {**state.server["batch_stats"], correlation.STATISTICS: mixed_statistics},
    }
    trained_before = client._replace(pi=jnp.full(10, 0.5))
    later = train(server, trained_before, ctx._replace(t=jnp.int32(21), key=jax.random.key(5)))
    for name in router.EMBEDDINGS:
        chex.assert_trees_all_equal(later.upload["params"][name], server["params"][name])
    before, after = (tree["params"]["router_gates"]["kernel"] for tree in (server, later.upload))
    assert before.shape[0] == 3  # of φx, whatever φy's size is
    assert np.abs(after - before).max() > 0
    assert bool(result.upload["first"])
    assert not bool(later.upload["first"])
    traffic = {
        first: jax.jit(algorithm.traffic)(server, {**result.upload, "first": first})
        for first in (True, False)
    }
    embeddings = trees.bytes_per_layer({k: server["params"][k] for k in router.EMBEDDINGS})
    down = {first: int(sum(t.down.values())) for first, t in traffic.items()}
    statistics_bytes = 4 * 2 * tiny.HIDDEN  # of BatchNorm
    assert down[True] - down[False] == sum(embeddings.values()) + statistics_bytes
    assert int(sum(traffic[True].up.values())) == down[False]
    # A later phase remembers who has the embeddings.
    trained = state._replace(clients=state.clients._replace(pi=jnp.full((tiny.CLIENTS, 10), 0.5)))
    continued = jax.jit(algorithm.init)(KEY, trained)
    np.testing.assert_array_equal(continued.clients.pi, trained.clients.pi)


def test_an_unused_encoder_neither_changes_nor_is_sent():
    algorithm, data = make(cases.training()), tiny.federated()[0]
    state, ids = jax.jit(algorithm.init)(KEY), jnp.arange(tiny.CLIENTS)

    def train(i: jax.Array, client: Any) -> Any:
        ctx = ClientContext(i, client_data(data, i), jnp.int32(20), jax.random.fold_in(KEY, i))
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
