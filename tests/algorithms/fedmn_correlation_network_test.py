"""The router of correlations: signatures by NumPy, routes by hand."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.algorithms.fedmn import correlation, router
from fedjax_pfl.core.examples import client_data
from tests import tiny

KEY = jax.random.key(3)
LAYOUT = (2, 3, 2)
SIZE = 6
CLIENTS = 5


@pytest.fixture(scope="module")
def made():
    network = correlation.Correlation(tiny.Net(), LAYOUT, CLIENTS, SIZE)
    x, y = jnp.zeros((2, tiny.FEATURES)), jnp.zeros((2, tiny.CLASSES))
    return network, network.init(KEY, x, y), client_data(tiny.federated()[0], 3)


def test_a_signature_is_numpys_correlation_in_any_chunks(made):
    network, variables, data = made
    rows = np.asarray(data.train.rows)[: int(data.train.size)]
    x, y = data.x[rows], jax.nn.one_hot(data.y[rows], tiny.CLASSES)
    seen, told = network.apply(variables, x, y, method="embed")
    wanted = np.array([np.corrcoef(a, b)[0, 1] for a, b in zip(seen.T, told.T, strict=True)])
    chance = (1 - wanted**2) ** 2 / (len(rows) - 1)
    for size in (1, 5, 64):
        got = correlation.look(network, variables, data, tiny.CLASSES, size)
        np.testing.assert_allclose(got.r, wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got.chance, chance, rtol=1e-3, atol=1e-6)


def test_a_constant_correlates_with_nothing():
    ones, x = jnp.ones((4, 2)), jnp.arange(8.0).reshape(4, 2)
    got = correlation.signature(correlation.moments(ones, x, jnp.ones(4, bool)), 4)
    np.testing.assert_array_equal(got.r, 0)
    np.testing.assert_array_equal(got.chance, 0)


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
    assert apart > 20 * float(jnp.sum(signs[0].chance + signs[1].chance))
    assert float(jnp.linalg.norm(means[0] - means[1])) < 0.2 * float(jnp.linalg.norm(means[0]))


def statistics(r: np.ndarray, chance: np.ndarray) -> dict[str, jax.Array]:
    """What clients with the signatures r [K, d] leave at the server."""
    kept = {"mean": r.mean(0), "square": r.T @ r / len(r), "chance": chance}
    return jax.tree.map(jnp.float32, kept)


def seen_by_all(r: np.ndarray, chance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """s [K, d] and ρ [K] of each client."""
    apply = correlation.Statistics(len(r)).apply
    kept = {"batch_stats": statistics(r, chance)}
    s, rho = jax.vmap(lambda one: apply(kept, one))(jnp.asarray(r, jnp.float32))
    return np.asarray(s), np.asarray(rho)


def test_what_tells_clients_apart_by_hand():
    """Four clients, of which two have the other sign in the first number; λ₊ = (1 + √½)² = 2.914.

    With S = (.04, .01) D r is ±5 along the first axis and ±1 along the second: λ = 25 and 1, so
    that s is the sign along the first, and ρ = 1 − 2.914/25. A number of no variance is left out.
    """
    r = np.array([[1.0, 0.1], [1.0, -0.1], [-1.0, 0.1], [-1.0, -0.1]])
    s, rho = seen_by_all(r, np.array([0.04, 0.01]))
    np.testing.assert_allclose(s, [[1, 0], [1, 0], [-1, 0], [-1, 0]], atol=1e-6)
    np.testing.assert_allclose(rho, 1 - (1 + 0.5**0.5) ** 2 / 25, rtol=1e-5)
    for chance in ([1.0, 1.0], [0.0, 0.0]):
        s, rho = seen_by_all(r, np.array(chance))
        np.testing.assert_array_equal(s, 0)
        np.testing.assert_array_equal(rho, 0)


def test_what_tells_clients_apart_is_numpys():
    """Three directions, of which the weak one is left out and the others count by how clear."""
    noise = np.random.default_rng(0)
    chance = noise.uniform(0.5, 2.0, SIZE)
    turn = np.linalg.qr(noise.normal(size=(SIZE, SIZE)))[0][:3]
    r = (noise.normal(size=(40, 3)) * [30.0, 6.0, 0.2]) @ turn * np.sqrt(chance) + 1.0
    white = (r - r.mean(0)) / np.sqrt(chance)
    _, size, axes = np.linalg.svd(white, full_matrices=False)
    spread, edge = size**2 / len(r), (1 + np.sqrt(SIZE / len(r))) ** 2
    kept = np.maximum(1 - edge / np.maximum(spread, 1e-12), 0)
    assert (kept > 0).sum() == 2
    wanted = white @ axes.T @ np.diag(kept) @ axes / np.sqrt(np.sum(kept**2 * spread))
    s, rho = seen_by_all(r, chance)
    np.testing.assert_allclose(s, wanted, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(rho, kept.max(), rtol=1e-4)
    np.testing.assert_allclose(np.mean(np.sum(s**2, 1)), 1, rtol=1e-3)


def test_clients_of_one_group_take_one_route():
    """Two groups, each client with chance of its own: as many routes as groups, and none shared.

    A map of signatures as they are gives nearly every client a route of its own.
    """
    noise = np.random.default_rng(1)
    size, clients, layout = 16, 12, (2, 2, 2)
    group = np.arange(clients) % 2
    r = np.where(group, 1, -1)[:, None] * np.where(np.arange(size) < 4, 0.15, 0.0)
    r = r + noise.normal(scale=0.05, size=(clients, size))
    s, rho = seen_by_all(r, np.full(size, 0.05**2))
    assert (rho > 0.5).all()
    gates = correlation.Gates(router.paths(layout))
    plain = (r - r.mean(0)) / np.sqrt(np.mean(np.sum((r - r.mean(0)) ** 2, 1)))
    for seed in range(3):
        variables = gates.init(jax.random.key(seed), jnp.zeros(size), 1.0)

        def routes(found: np.ndarray, variables=variables) -> list[int]:
            z = [gates.apply(variables, jnp.asarray(one, jnp.float32), 1.0) for one in found]
            opened = np.stack([correlation.balanced(one, layout) > 0 for one in z])
            return np.unique(opened, axis=0, return_inverse=True)[1].tolist()

        own, before = routes(s), routes(plain)
        assert len(set(own)) < len(set(before))
        assert not {one for one, g in zip(own, group, strict=True) if g} & {
            one for one, g in zip(own, group, strict=True) if not g
        }


def test_clients_that_differ_by_chance_take_one_route_and_others_their_own(made):
    network, variables, _ = made
    clients = np.asarray(jax.random.normal(KEY, (CLIENTS, SIZE)))
    bias = variables["params"]["router_gates"]["bias"]
    routes = {}
    for chance in (0.01, 100.0):
        seen = statistics(clients, np.full(SIZE, chance))
        with_seen = {
            **variables,
            "batch_stats": {**variables["batch_stats"], correlation.STATISTICS: seen},
        }
        signs = [correlation.Signature(r, jnp.zeros(SIZE)) for r in clients]
        routes[chance] = np.stack([correlation.logits(network, with_seen, one) for one in signs])
    wanted = np.asarray(correlation.balanced(bias, LAYOUT))
    np.testing.assert_allclose(routes[100.0], np.tile(wanted, (5, 1)), rtol=1e-5)
    assert len(np.unique(routes[0.01] > 0, axis=0)) > 2


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
    variables = correlation.averaged(
        variables, correlation.Signature(-seen.r, 0.01 * seen.chance), 0.5
    )
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
    square = 0.9 * old["square"] + 0.1 * np.outer(r, r)
    np.testing.assert_allclose(new["square"], square, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(new["chance"], 0.9 * old["chance"] + 0.1 * seen.chance, rtol=1e-5)
