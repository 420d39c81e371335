"""The modular network: with one block per layer, and the gradients of its gates."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.algorithms.fedmn import router
from fedjax_pfl.algorithms.fedmn.modular import Modular, mean
from fedjax_pfl.networks import MLP, LeNet

pytestmark = pytest.mark.slow("gradients of a large network")

KEY = jax.random.key(3)
LAYOUT = (2, 2, 2)


def test_one_block_in_each_layer_is_the_plain_network():
    """Outputs and gradients are exactly equal."""
    encoder = LeNet(kernels=(2, 3), kernel_size=3, dense=())
    baseline = encoder.clone(outputs=3, dense=(7, 5))
    modular = Modular(network=encoder, outputs=3, layout=(1, 1, 1), width=7, hidden=5, dropout=0.0)
    x = jax.random.normal(KEY, (6, 12, 12, 1))
    variables = jax.jit(modular.init)(KEY, x)

    def plain_params(p):
        late = {"fc2": p["block2_1"], "fc3": p["block3_1"]}
        return {**{name: p["encoder1"][name] for name in ("conv1", "conv2", "fc1")}, **late}

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
    modular = Modular(
        network=MLP(hidden=()), outputs=3, layout=LAYOUT, width=4, hidden=5, dropout=0.5
    )
    x = jax.random.normal(KEY, (6, 2))
    variables = modular.init(jax.random.key(1), x)
    return modular, variables, x, jax.jit(modular.apply)


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
    dropped = modular.apply(variables, x, gates, train=True, rngs={"dropout": KEY})
    assert (dropped != apply(variables, x, gates)).any()


def test_a_trimmed_network_ignores_unused_encoders(network):
    """The encoder's output changes neither outputs nor gradients of gates."""
    modular, variables, x, _ = network
    gates = jnp.array([1.0, 0, 1, 0, 1, 0, 0, 1, 1, 1])  # encoder 2 is closed to both blocks
    assert router.active(gates, LAYOUT, True).tolist() == [True, False, True, True, True, True]
    params = variables["params"]
    changed = {**params, "encoder2": jax.tree.map(lambda p: p + 3, params["encoder2"])}

    @functools.partial(jax.jit, static_argnums=0)
    def outputs_and_slopes(trimmed, params):
        apply = modular.clone(trimmed=trimmed).apply
        slopes = jax.grad(lambda gates: jnp.sum(apply({"params": params}, x, gates)))
        return apply({"params": params}, x, gates), slopes(gates)

    for trimmed in (False, True):
        (first, first_slopes), (second, second_slopes) = (
            outputs_and_slopes(trimmed, p) for p in (params, changed)
        )
        np.testing.assert_array_equal(first, second)
        assert bool((first_slopes[jnp.array([1, 3])] == 0).all()) == trimmed
        assert bool((first_slopes == second_slopes).all()) == trimmed
