"""The modular network: with one block per layer, and its gates by hand."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.algorithms.fedmn import router
from fedjax_pfl.algorithms.fedmn.modular import Modular, blocks, keep_inactive, mean
from fedjax_pfl.networks import MLP, LeNet

KEY = jax.random.key(3)
LAYOUT = (2, 2, 2)


@pytest.mark.parametrize(
    ("encoder", "baseline", "early"),
    [
        (MLP(hidden=()), MLP(outputs=3, hidden=(7, 5)), ["fc1"]),
        (
            LeNet(kernels=(2, 3), kernel_size=3, dense=()),
            LeNet(outputs=3, kernels=(2, 3), kernel_size=3, dense=(7, 5)),
            ["conv1", "conv2", "fc1"],
        ),
    ],
)
def test_one_block_in_each_layer_is_the_plain_network(encoder, baseline, early):
    """Outputs and gradients are exactly equal."""
    modular = Modular(encoder, 3, (1, 1, 1), 7, 5, dropout=0.0)
    x = jax.random.normal(KEY, (6, 12, 12, 1))
    variables = jax.jit(modular.init)(KEY, x)

    def plain_params(p):
        late = {"fc2": p["block2_1"], "fc3": p["block3_1"]}
        return {**{name: p["encoder1"][name] for name in early}, **late}

    def loss(model):
        return lambda p: (jnp.sum(jnp.sin(out := model.apply({"params": p}, x))), out)

    def run(model):
        return jax.jit(jax.grad(loss(model), has_aux=True))

    gradient, out = run(modular)(variables["params"])
    expected_gradient, expected = run(baseline)(plain_params(variables["params"]))
    np.testing.assert_array_equal(out, expected)
    chex.assert_trees_all_equal(plain_params(gradient), expected_gradient)


@pytest.fixture(scope="module")
def network():
    """Returns a network with two blocks in each of three layers, its variables, x and `apply`."""
    modular = Modular(MLP(hidden=()), 3, LAYOUT, 4, 5, dropout=0.5)
    x = jax.random.normal(KEY, (6, 2))
    variables = modular.init(jax.random.key(1), x)
    return modular, variables, x, jax.jit(modular.apply)


def test_every_block_has_its_own_parameters(network):
    _, variables, _, _ = network
    assert list(blocks(LAYOUT)) == ["block2_1", "block2_2", "block3_1", "block3_2"]
    assert set(variables["params"]) == {"encoder1", "encoder2", *blocks(LAYOUT)}
    for first, second in (
        ("encoder1", "encoder2"),
        ("block2_1", "block2_2"),
        ("block3_1", "block3_2"),
    ):
        pairs = zip(
            *(jax.tree.leaves(variables["params"][n]) for n in (first, second)), strict=True
        )
        assert all((a != b).all() for a, b in pairs)


def reference(variables, x, gates):
    """Computes equation (13) in NumPy, block by block; blocks without an input are ignored."""
    p = jax.device_get(variables["params"])
    values = [
        np.maximum(np.asarray(x) @ p[e]["fc1"]["kernel"] + p[e]["fc1"]["bias"], 0)
        for e in ("encoder1", "encoder2")
    ]
    first, second, last = router.cut(np.asarray(gates), LAYOUT)
    for number, matrix in ((2, first), (3, second)):
        after = []
        for j, row in enumerate(matrix, 1):
            inputs = [v for gate, v in zip(row, values, strict=True) if gate and v is not None]
            if not inputs:
                after.append(None)
                continue
            layer = p[f"block{number}_{j}"]
            out = np.mean(inputs, 0) @ layer["kernel"] + layer["bias"]
            after.append(np.maximum(out, 0) if number == 2 else out)
        values = after
    outputs = [v for gate, v in zip(last[0], values, strict=True) if gate and v is not None]
    return np.mean(outputs, 0) if outputs else np.zeros((len(x), 3))


def test_inputs_are_means_of_open_predecessors(network):
    """Random gates, with dead ends and blocks without an input."""
    _, variables, x, apply = network
    rng = np.random.default_rng(0)
    for gates in [np.ones(10), np.zeros(10), *(rng.random((40, 10)) < 0.5)]:
        out = apply(variables, x, jnp.asarray(gates, jnp.float32))
        np.testing.assert_allclose(out, reference(variables, x, gates), rtol=1e-5, atol=1e-6)


def test_a_block_without_input_has_no_effect(network):
    """Its bias is large and its outgoing gates are open."""
    _, variables, x, apply = network
    gates = jnp.asarray([1, 1, 0, 0, 1, 1, 1, 1, 1, 1], jnp.float32)  # nothing into block2_2
    changed = {**variables["params"], "block2_2": {**variables["params"]["block2_2"]}}
    changed["block2_2"]["bias"] = changed["block2_2"]["bias"] + 1e3
    np.testing.assert_array_equal(apply({"params": changed}, x, gates), apply(variables, x, gates))


def test_gradients_of_closed_gates(network):
    """∂/∂c_k of Σ c u / Σ c by hand; u_k if all gates are closed, and never NaN."""
    u = [jnp.array([1.0, 2.0]), jnp.array([4.0, -2.0])]
    first = jax.jacobian(lambda c: mean(c, u))
    np.testing.assert_allclose(first(jnp.array([1.0, 0.0]))[:, 1], u[1] - u[0])
    np.testing.assert_allclose(first(jnp.array([1.0, 1.0]))[:, 0], (u[0] - u[1]) / 4)
    np.testing.assert_allclose(first(jnp.zeros(2)), jnp.stack(u, 1))
    modular, variables, x, _ = network
    gradient = jax.grad(lambda gates: jnp.sum(jnp.sin(modular.apply(variables, x, gates))))
    gates = jnp.asarray([1, 0, 0, 0, 1, 1, 0, 1, 1, 1], jnp.float32)  # nothing into block2_2
    got = gradient(gates)
    assert np.isfinite(got).all()
    assert got[1] != 0  # closed, between two that are on a path
    # Out of block2_2, which has no input, and into it and block3_2, which has none either.
    assert not np.asarray(got)[[2, 3, 5, 7]].any()
    assert np.isfinite(gradient(jnp.zeros(10))).all()


def test_dropout_is_active_only_in_training(network):
    modular, variables, x, apply = network
    gates = jnp.ones(10)
    rngs = {"dropout": KEY}
    dropped = modular.apply(variables, x, gates, train=True, rngs=rngs)
    assert (dropped != apply(variables, x, gates)).any()


def test_keep_inactive_works_on_any_tree():
    names = blocks(LAYOUT)

    def block(value):
        return {name: {"kernel": jnp.full(2, value)} for name in names}

    def tree(value):
        return (
            {"params": {**block(value), "encoder1": {"fc1": {"bias": value}}}},
            ((), block(value)),
        )

    active = jnp.array([True, False, False, True])
    new, momentum = keep_inactive(active, names, tree(jnp.ones(())), tree(jnp.zeros(())))
    assert new["params"]["encoder1"]["fc1"]["bias"] == 1
    for part in (new["params"], momentum[1]):
        assert [float(part[name]["kernel"][0]) for name in names] == [1, 0, 0, 1]


def test_keep_inactive_includes_encoders_of_a_trimmed_network():
    names = blocks(LAYOUT, trimmed=True)
    assert names[:3] == ["encoder1", "encoder2", "block2_1"]

    def tree(value):
        return {name: {"fc1": {"bias": jnp.full(2, value)}} for name in names}

    active = jnp.array([True, False, True, True, False, True])
    new = keep_inactive(active, names, tree(1.0), tree(0.0))
    assert [float(new[name]["fc1"]["bias"][0]) for name in names] == [1, 0, 1, 1, 0, 1]


def test_a_trimmed_network_ignores_unused_encoders(network):
    """The encoder's output changes neither outputs nor gradients of gates."""
    modular, variables, x, _ = network
    gates = jnp.array([1.0, 0, 1, 0, 1, 0, 0, 1, 1, 1])  # encoder 2 is closed to both blocks
    assert router.active(gates, LAYOUT, True).tolist() == [True, False, True, True, True, True]
    second = {
        **variables,
        "params": {
            **variables["params"],
            "encoder2": jax.tree.map(lambda p: p + 3, variables["params"]["encoder2"]),
        },
    }

    @functools.partial(jax.jit, static_argnums=0)
    def outputs_and_slopes(trimmed, of):
        clone = modular.clone(trimmed=trimmed)

        def total(g):
            return jnp.sum(clone.apply(of, x, g))

        return clone.apply(of, x, gates), jax.grad(total)(gates)

    for trimmed in (False, True):
        first, two = (outputs_and_slopes(trimmed, of) for of in (variables, second))
        np.testing.assert_array_equal(first[0], two[0])
        assert bool((first[1][jnp.array([1, 3])] == 0).all()) == trimmed
        assert bool((first[1] == two[1]).all()) == trimmed
