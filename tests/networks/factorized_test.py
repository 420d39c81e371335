"""Networks with factorised kernels: shapes, ranks and counts."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.algorithms.factorized_fl.pruning import bytes_used, collect_mu, prune
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
    found = jax.tree_util.tree_leaves_with_path(tree)
    return sum(int(np.prod(x.shape)) for path, x in found if path[-1].key == leaf)


def test_numbers_of_resnet9():
    """2,574,282 with a plain head of 2,570; factorised 2,845,164, of which 2,836 in the head."""
    plain = shapes(ResNet9(conv="xla"), (32, 32, 3))
    kernels = total(plain["params"], "kernel") - 2560
    assert (kernels, trees.size(plain)) == (2_565_824, 2_574_282)
    assert trees.size(plain["params"]) - kernels - 2570 + trees.size(plain["batch_stats"]) == 5888
    net = Factorized(ResNet9(conv="xla"), (32, 32, 3))
    made = shapes(net, (32, 32, 3))["params"]
    assert total(made, "v") == 270_528 + 10
    assert total(made, "u") == 7 * 9 + 25 + 256
    assert total(made, "mu") == 2_565_824 + 2560
    assert net.factorized == (*(f"conv{i}" for i in range(1, 9)), net.head)
    assert made["conv8"]["v"].shape == (65_536, 1)
    assert trees.size(made[net.head]) == 256 + 10 + 2560 + 10 == 2836
    assert trees.size(shapes(net, (32, 32, 3))) == 2_845_164


def test_layers_keep_their_names():
    plain, dense = shapes(SMALL, SHAPE), {"u", "v", "mu", "bias"}
    for kind, head in ((Factorized, dense), (SplitKernels, {"kernel", "bias"})):
        net = kind(SMALL, SHAPE)
        made = shapes(net, SHAPE)
        assert set(trees.layers(made)) == set(trees.layers(plain)) == set(net.layers)
        assert set(made["params"]["conv1"]) == dense
        assert set(made["params"]["fc2"]) == head
        assert trees.same_shapes(jax.eval_shape(net.model_params, made["params"]), plain["params"])
    assert Factorized(SMALL, SHAPE).factorized == ("conv1", "conv2", "fc1", "fc2")
    assert SplitKernels(SMALL, SHAPE).factorized == ("conv1", "conv2", "fc1")


@pytest.mark.parametrize("layout", ["kernel", "mixed", "oihw"])
def test_kernels_by_hand(layout):
    """W[f, g, i, o] as each layout says, and π of μ is read in the same way."""
    net = Factorized(SMALL, SHAPE, rank=2, layout=layout)
    f = g = 3
    inputs, outputs = 4, 5
    factors = net.factors(KEY, (f, g, inputs, outputs))
    u, v = (np.asarray(factors[name]) for name in "uv")
    mu = np.random.default_rng(0).normal(size=(len(u), len(v))).astype(np.float32)
    got = np.asarray(net.kernel({**factors, "mu": mu}, (f, g, inputs, outputs)))
    flat = (u @ v.T + mu).ravel()
    for a, b, i, o in np.ndindex(f, g, inputs, outputs):
        if layout == "kernel":
            row, column = a * g + b, i * outputs + o
            wanted = (u @ v.T + mu)[row, column]
        elif layout == "mixed":
            wanted = (u @ v.T + mu)[i * f + a, o * g + b]
        else:
            wanted = flat[((o * inputs + i) * f + a) * g + b]
        np.testing.assert_allclose(got[a, b, i, o], wanted, rtol=1e-5)


def test_each_kernel_is_of_the_rank_where_there_is_no_bias():
    """The (I·O) × F² unfolding; in the authors' layout it has a higher rank."""

    def unfold(w):
        return np.asarray(w).reshape(w.shape[0] * w.shape[1], -1)

    ranks = {}
    for layout in ("kernel", "oihw"):
        for rank in (1, 2):
            net = Factorized(SMALL, SHAPE, rank, layout)
            params = net.model_params(net.init(KEY, X)["params"])
            ranks[layout, rank] = np.linalg.matrix_rank(unfold(params["conv2"]["kernel"]))
            assert np.linalg.matrix_rank(params["fc1"]["kernel"]) == rank
            assert np.linalg.matrix_rank(params["fc2"]["kernel"]) == rank
    assert (ranks["kernel", 1], ranks["kernel", 2]) == (1, 2)
    assert ranks["oihw", 1] > 1


def test_it_computes_what_the_network_computes_with_these_kernels():
    net = Factorized(SMALL, SHAPE)
    variables = net.init(KEY, X)
    plain = {"params": net.model_params(variables["params"])}
    chex.assert_trees_all_equal(net.apply(variables, X), SMALL.apply(plain, X))
    assert bool(jnp.any(net.apply(variables, X) != 0))
    np.testing.assert_array_equal(collect_mu(variables)[0], 0)
    bound = np.sqrt(6 / (9 + 1))
    u = variables["params"]["conv1"]["u"]
    assert np.abs(u).max() <= bound
    first, other = (variables["params"][name]["u"] for name in ("conv1", "conv2"))
    assert bool((first != other).any())


def test_pruning_and_what_is_left_to_send():
    tree = {"params": {"a": {"mu": jnp.array([[0.1, -0.3], [0.0, 0.2]]), "u": jnp.array([0.01])}}}
    cut = prune(tree, 0.15)
    np.testing.assert_array_equal(cut["params"]["a"]["mu"], np.float32([[0, -0.3], [0, 0.2]]))
    np.testing.assert_array_equal(cut["params"]["a"]["u"], np.float32([0.01]))
    assert {name: int(x) for name, x in bytes_used(cut).items()} == {"a": 4 * 3}


def test_hadamard_by_hand_and_its_rank():
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
    wanted = sides[0] * (sides[1] + 1)
    np.testing.assert_allclose(net.kernel(factors, shape), wanted, rtol=1e-4, atol=1e-6)
    dense = jax.tree.map(np.asarray, net.factors(KEY, (9, 17)))
    assert set(dense) == {"x1", "x2", "y1", "y2"}
    one, two = (dense[f"y{i}"] @ dense[f"x{i}"].T for i in (1, 2))
    np.testing.assert_allclose(net.kernel(dense, (9, 17)), one * (two + 1), rtol=1e-4, atol=1e-6)
    assert np.linalg.matrix_rank(one * two) == 9  # full, from two of rank 5


def test_gamma_goes_up_to_the_size_of_the_kernel():
    shape = (3, 3, 64, 64)
    sizes = [
        trees.size(Hadamard(SMALL, SHAPE, gamma).factors(KEY, shape)) for gamma in (0.0, 0.5, 1.0)
    ]
    assert sizes[0] < sizes[1] < sizes[2]
    np.testing.assert_allclose(sizes[2], np.prod(shape), rtol=0.05)
    # W1 starts with the variance of its fan-in.
    made = [Hadamard(SMALL, SHAPE).factors(key, shape) for key in jax.random.split(KEY, 20)]
    first = [np.einsum("fgrs,ir,os->fgio", m["t1"], m["y1"], m["x1"]) for m in made]
    np.testing.assert_allclose(np.var(first) * 9 * 64, 1, rtol=0.3)


def test_split_kernels_start_as_the_plain_network():
    """u vᵀ is the best approximation of rank one, and u and v have the same length."""
    net = SplitKernels(SMALL, SHAPE)
    made, plain = net.init(KEY, X), SMALL.init(KEY, X)
    chex.assert_trees_all_close(net.apply(made, X), SMALL.apply(plain, X), atol=1e-6)
    chex.assert_trees_all_close(net.model_params(made["params"]), plain["params"], atol=1e-7)
    for layer in net.factorized:
        own = jax.tree.map(np.asarray, made["params"][layer])
        scale = np.linalg.svd(own["u"] @ own["v"].T + own["mu"], compute_uv=False)
        np.testing.assert_allclose(np.sum(own["mu"] ** 2), np.sum(scale[1:] ** 2), rtol=1e-4)
        for side in "uv":
            np.testing.assert_allclose(np.sum(own[side] ** 2), scale[0], rtol=1e-4)
