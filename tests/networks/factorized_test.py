"""Networks with factorised kernels."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.algorithms.factorized_fl.pruning import collect_mu
from fedjax_pfl.core import trees
from fedjax_pfl.networks import LeNet, ResNet9
from fedjax_pfl.networks.factorized import Factorized, Hadamard, SplitKernels

KEY = jax.random.key(2)
SHAPE = (8, 8, 2)
X = jax.random.normal(KEY, (3, *SHAPE))
SMALL = LeNet(outputs=3, kernels=(4, 5), dense=(6,), kernel_size=3, padding="SAME")


def shapes(net, shape):
    return jax.eval_shape(net.init, KEY, jax.ShapeDtypeStruct((1, *shape), jnp.float32))


def total(tree, leaf):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return sum(int(np.prod(x.shape)) for path, x in leaves if path[-1].key == leaf)


def test_sizes_of_resnet9():
    """2,574,282 numbers, 2,570 in the head; factorised 2,845,164, 2,836 in the head."""
    model = shapes(ResNet9(conv="xla"), (32, 32, 3))
    kernels = total(model["params"], "kernel") - 2560
    assert (kernels, trees.size(model)) == (2_565_824, 2_574_282)
    assert trees.size(model["params"]) - kernels - 2570 + trees.size(model["batch_stats"]) == 5888
    net = Factorized(ResNet9(conv="xla"), (32, 32, 3))
    params = shapes(net, (32, 32, 3))["params"]
    assert total(params, "v") == 270_528 + 10
    assert total(params, "u") == 7 * 9 + 25 + 256
    assert total(params, "mu") == 2_565_824 + 2560
    assert net.factorized == (*(f"conv{i}" for i in range(1, 9)), net.head)
    assert params["conv8"]["v"].shape == (65_536, 1)
    assert trees.size(params[net.head]) == 256 + 10 + 2560 + 10 == 2836
    assert trees.size(shapes(net, (32, 32, 3))) == 2_845_164


def test_layer_names_are_unchanged():
    model, dense = shapes(SMALL, SHAPE), {"u", "v", "mu", "bias"}
    for kind, head in ((Factorized, dense), (SplitKernels, {"kernel", "bias"})):
        net = kind(SMALL, SHAPE)
        params = shapes(net, SHAPE)
        assert set(trees.layers(params)) == set(trees.layers(model)) == set(net.layers)
        assert set(params["params"]["conv1"]) == dense
        assert set(params["params"]["fc2"]) == head
        assert trees.same_shapes(
            jax.eval_shape(net.model_params, params["params"]), model["params"]
        )
    assert Factorized(SMALL, SHAPE).factorized == ("conv1", "conv2", "fc1", "fc2")
    assert SplitKernels(SMALL, SHAPE).factorized == ("conv1", "conv2", "fc1")


@pytest.mark.parametrize("layout", ["kernel", "mixed", "oihw"])
def test_kernel_of_each_layout(layout):
    """Compares W[f, g, i, o] with an entry of u vᵀ + μ."""
    net = Factorized(SMALL, SHAPE, rank=2, layout=layout)
    f = g = 3
    inputs, outputs = 4, 5
    factors = net.factors(KEY, (f, g, inputs, outputs))
    u, v = (np.asarray(factors[name]) for name in "uv")
    mu = np.random.default_rng(0).normal(size=(len(u), len(v))).astype(np.float32)
    actual = np.asarray(net.kernel({**factors, "mu": mu}, (f, g, inputs, outputs)))
    flat = (u @ v.T + mu).ravel()
    for a, b, i, o in np.ndindex(f, g, inputs, outputs):
        if layout == "kernel":
            row, column = a * g + b, i * outputs + o
            expected = (u @ v.T + mu)[row, column]
        elif layout == "mixed":
            expected = (u @ v.T + mu)[i * f + a, o * g + b]
        else:
            expected = flat[((o * inputs + i) * f + a) * g + b]
        np.testing.assert_allclose(actual[a, b, i, o], expected, rtol=1e-5)


def test_apply_equals_the_network_with_these_kernels():
    net = Factorized(SMALL, SHAPE)
    variables = net.init(KEY, X)
    model = {"params": net.model_params(variables["params"])}
    chex.assert_trees_all_equal(net.apply(variables, X), SMALL.apply(model, X))
    assert bool(jnp.any(net.apply(variables, X) != 0))
    np.testing.assert_array_equal(collect_mu(variables)[0], 0)
    bound = np.sqrt(6 / (9 + 1))
    u = variables["params"]["conv1"]["u"]
    assert np.abs(u).max() <= bound
    first, second = (variables["params"][name]["u"] for name in ("conv1", "conv2"))
    assert bool((first != second).any())


def test_hadamard_kernel_and_rank():
    net = Hadamard(SMALL, SHAPE)
    shape = (3, 3, 4, 5)
    factors = jax.tree.map(np.asarray, net.factors(KEY, shape))
    assert net.rank(shape) == 3  # ⌈√5⌉
    assert net.rank((9, 17)) == 5
    sides = []
    for i in (1, 2):
        t, y, x = (factors[f"{name}{i}"] for name in "tyx")
        assert (t.shape, y.shape, x.shape) == ((3, 3, 3, 3), (4, 3), (5, 3))
        sides.append(
            sum(t[:, :, r, s, None, None] * np.outer(y[:, r], x[:, s]) for r, s in np.ndindex(3, 3))
        )
    expected = sides[0] * (sides[1] + 1)
    np.testing.assert_allclose(net.kernel(factors, shape), expected, rtol=1e-4, atol=1e-6)
    dense = jax.tree.map(np.asarray, net.factors(KEY, (9, 17)))
    assert set(dense) == {"x1", "x2", "y1", "y2"}
    first, second = (dense[f"y{i}"] @ dense[f"x{i}"].T for i in (1, 2))
    np.testing.assert_allclose(
        net.kernel(dense, (9, 17)), first * (second + 1), rtol=1e-4, atol=1e-6
    )
    assert np.linalg.matrix_rank(first * second) == 9  # full, from two of rank 5


def test_hadamard_gamma():
    shape = (3, 3, 64, 64)
    sizes = [
        trees.size(Hadamard(SMALL, SHAPE, gamma).factors(KEY, shape)) for gamma in (0.0, 0.5, 1.0)
    ]
    assert sizes[0] < sizes[1] < sizes[2]
    np.testing.assert_allclose(sizes[2], np.prod(shape), rtol=0.05)
    # W1 is initialised with variance 1 / fan-in.
    params = [Hadamard(SMALL, SHAPE).factors(key, shape) for key in jax.random.split(KEY, 20)]
    first = [np.einsum("fgrs,ir,os->fgio", m["t1"], m["y1"], m["x1"]) for m in params]
    np.testing.assert_allclose(np.var(first) * 9 * 64, 1, rtol=0.3)


def test_split_kernels_start_as_the_network():
    """u vᵀ is the best rank-one approximation, with ‖u‖ = ‖v‖."""
    net = SplitKernels(SMALL, SHAPE)
    params, model = net.init(KEY, X), SMALL.init(KEY, X)
    chex.assert_trees_all_close(net.apply(params, X), SMALL.apply(model, X), atol=1e-6)
    chex.assert_trees_all_close(net.model_params(params["params"]), model["params"], atol=1e-7)
    for layer in net.factorized:
        factors = jax.tree.map(np.asarray, params["params"][layer])
        scale = np.linalg.svd(factors["u"] @ factors["v"].T + factors["mu"], compute_uv=False)
        np.testing.assert_allclose(np.sum(factors["mu"] ** 2), np.sum(scale[1:] ** 2), rtol=1e-4)
        for side in "uv":
            np.testing.assert_allclose(np.sum(factors[side] ** 2), scale[0], rtol=1e-4)
