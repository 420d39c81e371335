"""FedMN's router: distribution of gates, paths by enumeration, means over examples."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from fedjax_pfl.algorithms.fedmn import router
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.examples import client_data
from tests import tiny

KEY = jax.random.key(3)
LAYOUT = (2, 3, 2)
GATES = router.paths(LAYOUT)


def test_number_of_paths():
    assert router.paths((2, 2, 2)) == 2 * 2 + 2 * 2 + 2 == 10
    assert router.paths((3, 3, 3)) == 21
    assert router.paths((1, 4, 3)) == 4 + 12 + 3
    shapes = [m.shape for m in router.cut(jnp.arange(GATES), LAYOUT)]
    assert shapes == [(3, 2), (2, 3), (1, 2)]
    np.testing.assert_array_equal(
        jnp.concatenate([m.ravel() for m in router.cut(jnp.arange(GATES), LAYOUT)]), range(GATES)
    )


@pytest.mark.slow("many draws")
def test_gates_open_with_probability_pi_at_every_temperature():
    """Chi-square test over 11 gates with 20,000 samples; every τ opens the same gates.

    One path is always open.
    """
    pi, draws = np.linspace(0.05, 0.95, GATES), 20_000
    always, free = [0, 6, 12], np.setdiff1d(np.arange(GATES), [0, 6, 12])
    z = jnp.asarray(np.log(pi / (1 - pi)), jnp.float32).at[jnp.array(always)].set(1e9)
    noise = jax.random.logistic(KEY, (draws, GATES))
    opened, distance = [], []
    for tau in (1.0, 0.3, 0.1, 1e-3):
        soft = jax.vmap(lambda n, tau=tau: router.sample(z, n, tau, LAYOUT, False))(noise)
        opened.append(np.asarray(soft > 0.5))
        distance.append(float(jnp.mean(jnp.minimum(soft, 1 - soft))))
        assert opened[-1][:, always].all()
        deviation = (opened[-1].sum(0) - draws * pi) ** 2 / (draws * pi * (1 - pi))
        assert deviation[free].sum() < chi2.ppf(0.999, len(free))
    assert all((gates_at == opened[0]).all() for gates_at in opened)
    assert distance == sorted(distance, reverse=True)
    assert distance[-1] < 1e-3  # τ → 0: Bernoulli


def test_hard_gates_are_exactly_0_or_1_with_the_soft_gradient():
    z, tau = jax.random.normal(KEY, (50, GATES)), 0.7
    noise = jax.random.logistic(jax.random.key(4), (50, GATES))
    weights = jnp.arange(1.0, GATES + 1)

    def loss(hard):
        def weighted_sum(z, noise):
            gates = router.sample(z, noise, tau, LAYOUT, hard)
            return jnp.sum(gates * weights), gates

        return jax.jit(jax.vmap(jax.grad(weighted_sum, has_aux=True)))(z, noise)

    (soft_gradient, soft), (gradient, hard) = loss(False), loss(True)
    assert set(np.unique(hard)) == {0.0, 1.0}
    np.testing.assert_array_equal(gradient, soft_gradient)
    assert (np.abs(gradient) > 0).all()
    v = 1 / (1 + np.exp(-(np.asarray(z, float) + noise) / tau))
    expected = weights[None] * v * (1 - v) / tau
    rescued = (soft == 1) & (v < 0.5)  # opened because no path was
    np.testing.assert_allclose(soft, np.where(rescued, 1, v), rtol=1e-4, atol=1e-6)
    assert rescued.any()
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


def routes(gates):
    """Returns the open paths and all paths, by enumeration, as lists of gate ids."""
    first, second, last = router.cut(np.arange(GATES), LAYOUT)
    all_paths = itertools.product(range(2), range(3), range(2))
    paths = [(first[b, a], second[c, b], last[0, c]) for a, b, c in all_paths]
    return [p for p in paths if gates[list(p)].all()], paths


def test_the_likeliest_path_is_opened_if_none_is_open():
    rng, rescues = np.random.default_rng(0), 0
    decide = jax.jit(lambda z: router.decide(z, LAYOUT))
    for _ in range(60):
        z = rng.normal(-0.2, 1, GATES).astype(np.float32)
        above, got = z > 0, np.asarray(decide(z))
        open_paths, all_paths = routes(above)
        if open_paths:
            np.testing.assert_array_equal(got, above)
            continue
        rescues += 1
        pi = 1 / (1 + np.exp(-z))
        best = max(all_paths, key=lambda p: np.prod(pi[list(p)]))
        expected = above.copy()
        expected[list(best)] = True
        np.testing.assert_array_equal(got, expected)
    assert 10 < rescues < 50


def test_active_blocks_have_an_input():
    """A trimmed network has only blocks and encoders that reach the output."""
    rng = np.random.default_rng(1)
    active, trimmed = (
        jax.jit(lambda gates, t=t: router.active(gates, LAYOUT, t)) for t in (False, True)
    )
    first, second, _ = router.cut(np.arange(GATES), LAYOUT)
    dead_ends = 0
    for _ in range(60):
        gates = rng.random(GATES)
        opened = gates > 0.5
        middle = [opened[first[b]].any() for b in range(3)]
        end = [(opened[second[c]] & middle).any() for c in range(2)]
        np.testing.assert_array_equal(active(gates), middle + end)
        open_paths, _ = routes(opened)
        encoders = [any(p[0] in first[:, a] for p in open_paths) for a in range(2)]
        useful = [any(p[0] in first[b] for p in open_paths) for b in range(3)]
        useful += [any(p[1] in second[c] for p in open_paths) for c in range(2)]
        np.testing.assert_array_equal(trimmed(gates), encoders + useful)
        dead_ends += sum(middle + end) - sum(useful)
    assert dead_ends > 0


def test_temperature_falls_exponentially():
    temperature = router.schedule((1.0, 0.1), rounds=11, first_round=5)
    tau = np.array([temperature(jnp.int32(t)) for t in range(5, 18)])
    np.testing.assert_allclose(tau[:11], 10 ** (-np.arange(11) / 10), rtol=1e-5)
    np.testing.assert_allclose(tau[11:], 0.1, rtol=1e-5)


@pytest.fixture(scope="module")
def routed():
    """Returns a router with non-initial BatchNorm statistics in φx, and client 3's data."""
    network = router.Router(network=tiny.Net(), gates=GATES, x_size=4, y_size=3)
    variables = network.init(KEY, jnp.zeros((1, tiny.FEATURES)), jnp.zeros((1, tiny.CLASSES)))
    model_stats = jax.tree.map(lambda s: s + 0.3, variables["batch_stats"])
    return network, {**variables, "batch_stats": model_stats}, client_data(tiny.federated()[0], 3)


def test_logits_depend_on_neither_batch_size_nor_padding(routed):
    network, variables, data = routed
    z = router.logits(network, variables, data, tiny.CLASSES, 64)
    rows = np.asarray(data.train.rows)[: int(data.train.size)]
    x, y = (
        np.asarray(data.x)[rows],
        np.eye(tiny.CLASSES, dtype=np.float32)[np.asarray(data.y)[rows]],
    )
    np.testing.assert_allclose(z, network.apply(variables, x, y).mean(0), rtol=1e-5, atol=1e-6)
    for size in (1, 5, 12):
        again = router.logits(network, variables, data, tiny.CLASSES, size)
        np.testing.assert_allclose(again, z, rtol=1e-5, atol=1e-6)
    wide = client_data(tiny.federated(extra=9, filler=7)[0], 3)
    again = router.logits(network, variables, wide, tiny.CLASSES, 5)
    np.testing.assert_allclose(again, z, rtol=1e-5, atol=1e-6)


@pytest.mark.slow("a program of its own")
def test_the_gradient_uses_every_example(routed):
    """Compares it with the gradient of the mean over all examples in one batch."""
    network, variables, data = routed
    cotangent = jax.random.normal(KEY, (GATES,))
    rows = data.train.rows[: int(data.train.size)]
    x, y = data.x[rows], jax.nn.one_hot(data.y[rows], tiny.CLASSES)
    params, model_state = local_training.split_variables(variables)

    def mean_logits(params):
        return jnp.sum(
            cotangent * jnp.mean(network.apply({"params": params, **model_state}, x, y), 0)
        )

    expected = jax.grad(mean_logits)(params)
    for size in (5, 64):
        got = router.pull(network, variables, data, tiny.CLASSES, size, cotangent)
        chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-6)
    assert float(trees.squared_norm(expected["router_encoder"])) > 0
