"""The router of correlations: signatures by NumPy, routes by hand."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core.examples import client_data
from fedjax_pfl.networks import correlation, router
from tests import tiny

KEY = jax.random.key(3)
LAYOUT = (2, 3, 2)
SIZE = 6


@pytest.fixture(scope="module")
def made():
    network = correlation.Correlation(tiny.Net(), LAYOUT, SIZE)
    x, y = jnp.zeros((2, tiny.FEATURES)), jnp.zeros((2, tiny.CLASSES))
    return network, network.init(KEY, x, y), client_data(tiny.federated()[0], 3)


def test_a_signature_is_numpys_correlation_in_any_chunks(made):
    network, variables, data = made
    rows = np.asarray(data.train.rows)[: int(data.train.size)]
    x, y = data.x[rows], jax.nn.one_hot(data.y[rows], tiny.CLASSES)
    seen, told = network.apply(variables, x, y, method="embed")
    wanted = np.array([np.corrcoef(a, b)[0, 1] for a, b in zip(seen.T, told.T, strict=True)])
    chance = np.sum((1 - wanted**2) ** 2) / (len(rows) - 1)
    for size in (1, 5, 64):
        got = correlation.look(network, variables, data, tiny.CLASSES, size)
        np.testing.assert_allclose(got.r, wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got.chance, chance, rtol=1e-4)


def test_a_constant_correlates_with_nothing():
    ones, x = jnp.ones((4, 2)), jnp.arange(8.0).reshape(4, 2)
    got = correlation.signature(correlation.moments(ones, x, jnp.ones(4, bool)), 4)
    np.testing.assert_array_equal(got.r, 0)
    assert float(got.chance) == 0


def test_the_same_images_with_other_labels_have_another_signature(made):
    """Correlations are apart by more than chance; the published mean hardly differs."""
    network, variables, _ = made
    y = jnp.arange(60) % 3
    x = 2 * jax.random.normal(KEY, (3, tiny.FEATURES))[y]
    x += 0.1 * jax.random.normal(jax.random.key(9), x.shape)
    signs, means = [], []
    published = router.Router(tiny.Net(), 17, SIZE, SIZE)
    other = published.init(KEY, x, jax.nn.one_hot(y, 3))
    for labels in (y, (y + 1) % 3):
        told = jax.nn.one_hot(labels, 3)
        sums = correlation.moments(
            *network.apply(variables, x, told, method="embed"), jnp.ones(60, bool)
        )
        signs.append(correlation.signature(sums, 60))
        means.append(published.apply(other, x, told).mean(0))
    apart = float(jnp.sum(jnp.square(signs[0].r - signs[1].r)))
    assert apart > 20 * float(signs[0].chance + signs[1].chance)
    assert float(jnp.linalg.norm(means[0] - means[1])) < 0.2 * float(jnp.linalg.norm(means[0]))


def test_statistics_by_hand():
    """Four clients in two groups: r − m̄ over √T, and ρ of what chance does not explain."""
    r = np.array([[1.0, 0.0], [0.8, 0.2], [-1.0, 0.0], [-0.8, -0.2]])
    mean, square = r.mean(0), (r**2).sum(1).mean()
    total = square - mean @ mean
    for chance, clear in ((0.0, 1.0), (total / 4, 0.75), (2 * total, 0.0)):
        seen = {"batch_stats": {"mean": mean, "square": square, "chance": chance}}

        def apply(one, seen=seen):
            return correlation.Statistics().apply(jax.tree.map(jnp.float32, seen), one)

        got, rho = jax.vmap(apply)(jnp.asarray(r, jnp.float32))
        np.testing.assert_allclose(got, (r - mean) / np.sqrt(total), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(rho, clear, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.mean(np.sum(np.square(got), 1)), 1, rtol=1e-5)


def test_clients_that_differ_by_chance_take_one_route_and_others_their_own(made):
    network, variables, _ = made
    clients = jax.random.normal(KEY, (5, SIZE))
    bias = variables["params"]["router_gates"]["bias"]
    routes = {}
    for chance in (0.0, 100.0):
        seen = {
            "mean": jnp.mean(clients, 0),
            "square": jnp.mean(jnp.sum(clients**2, 1)),
            "chance": jnp.float32(chance),
        }
        with_seen = {
            **variables,
            "batch_stats": {**variables["batch_stats"], correlation.STATISTICS: seen},
        }
        signs = [correlation.Signature(r, jnp.float32(0)) for r in clients]
        routes[chance] = np.stack([correlation.logits(network, with_seen, one) for one in signs])
    wanted = np.asarray(correlation.balanced(bias, LAYOUT))
    np.testing.assert_allclose(routes[100.0], np.tile(wanted, (5, 1)), rtol=1e-5)
    assert len(np.unique(routes[0.0] > 0, axis=0)) > 2


def test_of_two_alternatives_one_is_open_and_a_lone_one_always():
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
    wanted = np.array([[2.0, -1, -1]]) / np.sqrt(2 / 3)
    np.testing.assert_allclose(three[0], wanted, rtol=1e-6)


def test_only_the_map_of_signatures_learns(made):
    network, variables, data = made
    seen = correlation.look(network, variables, data, tiny.CLASSES, 5)
    variables = correlation.averaged(variables, correlation.Signature(-seen.r, jnp.float32(0)), 0.5)
    cotangent = jax.random.normal(KEY, (router.paths(LAYOUT),))
    pulled = correlation.pull(network, variables, seen, cotangent)
    for name in router.EMBEDDINGS:
        chex.assert_trees_all_equal(pulled[name], jax.tree.map(jnp.zeros_like, pulled[name]))
    params = variables["params"]
    step = jax.tree.map(lambda g: 1e-2 * g, pulled["router_gates"])

    def along(sign: float) -> float:
        gates = jax.tree.map(lambda p, d: p + sign * d, params["router_gates"], step)
        there = {**variables, "params": {**params, "router_gates": gates}}
        return float(jnp.sum(cotangent * correlation.logits(network, there, seen)))

    squared = sum(float(jnp.sum(jnp.square(g))) for g in jax.tree.leaves(pulled))
    np.testing.assert_allclose((along(1.0) - along(-1.0)) / 2e-2, squared, rtol=1e-3)


def test_averages_move_by_their_share(made):
    network, variables, data = made
    seen = correlation.look(network, variables, data, tiny.CLASSES, 5)
    old = variables["batch_stats"][correlation.STATISTICS]
    new = correlation.averaged(variables, seen, 0.1)["batch_stats"][correlation.STATISTICS]
    r = np.asarray(seen.r, np.float64)
    np.testing.assert_allclose(new["mean"], 0.9 * old["mean"] + 0.1 * r, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(new["square"], 0.9 * old["square"] + 0.1 * (r @ r), rtol=1e-5)
    np.testing.assert_allclose(new["chance"], 0.9 * old["chance"] + 0.1 * seen.chance, rtol=1e-5)
