"""The hypernetwork: its output, size and spectral normalisation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.algorithms.pfedhn import hypernet
from fedjax_pfl.algorithms.pfedhn.hypernet import Hypernetwork
from fedjax_pfl.core import trees
from fedjax_pfl.networks import LeNet
from tests import tiny

KEY = jax.random.key(2)


def shapes(model, *shape):
    return jax.eval_shape(model.init, KEY, jnp.zeros((1, *shape)))["params"]


def test_size_on_cifar10():
    """The hypernetwork has four linear layers and a head for each of ten arrays."""
    target, e = shapes(LeNet(), 32, 32, 3), 1 + 50 // 4
    phi = jax.eval_shape(Hypernetwork(target).init, KEY, jnp.zeros(e))["params"]
    assert trees.size(phi) == (e + 1) * 100 + 3 * 101 * 100 + 101 * 121_182
    assert len(phi) == 4 + 10


@pytest.mark.parametrize("width", [0, 3])
def test_the_output_has_the_structure_of_two_targets(width):
    """A linear hypernetwork has only W."""
    targets = shapes(tiny.Net(), 5), shapes(tiny.Net(hidden=2), 5)
    network = Hypernetwork(targets, width=width, depth=1)
    variables = network.init(KEY, jnp.zeros(4))
    generated = network.apply(variables, jnp.ones(4))
    assert type(generated[0]) is dict
    assert jax.tree.structure(generated) == jax.tree.structure(targets)
    assert trees.same_shapes(generated, targets)
    hidden = 0 if width == 0 else 5 * 3 + 4 * 3
    assert trees.size(variables) == hidden + 4 * trees.size(targets)


def test_the_output_equals_numpy():
    """Only the layers between the first and the last linear layer have a ReLU."""
    target = {"b": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
    network = Hypernetwork(target, width=4, depth=2)
    v = jnp.array([-2.0, 1.0, 0.5])
    variables = jax.tree.map(lambda leaf: leaf - 0.4, network.init(KEY, v))
    phi = variables["params"]
    x = np.asarray(v)
    for i in (1, 2, 3):
        x = x @ phi[f"layer{i}"]["kernel"] + phi[f"layer{i}"]["bias"]
        x = np.maximum(x, 0) if i < 3 else x
    assert (x < 0).any()
    expected = (x @ phi["head_b"]["kernel"] + phi["head_b"]["bias"]).reshape(2, 3)
    np.testing.assert_allclose(network.apply(variables, v)["b"], expected, rtol=1e-5, atol=1e-6)


def test_layers_are_initialised_as_in_pytorch():
    """U(±1/√fan_in), biases too: the largest of many values is just below the bound."""
    target = {"b": jax.ShapeDtypeStruct((50, 40), jnp.float32)}
    phi = jax.jit(Hypernetwork(target).init)(KEY, jnp.zeros(25))["params"]
    for name, fan_in in (("layer1", 25), ("layer2", 100), ("head_b", 100)):
        for leaf in phi[name].values():
            largest = float(jnp.abs(leaf).max()) * fan_in**0.5
            assert 0.9 < largest <= 1


def test_spectral_normalisation_by_the_singular_value_decomposition():
    """After many iterations the largest singular value of each normalised weight is 1."""
    target = {"b": jax.ShapeDtypeStruct((6,), jnp.float32)}
    network = Hypernetwork(target, width=5, depth=1, spectral_norm=True)
    generated = network.init(KEY, jnp.zeros(3))
    phi, spectral = generated["params"], generated["spectral"]
    assert set(spectral) == {"layer1", "layer2", "head_b"}
    spectral = hypernet.advance(phi, spectral, 200)
    for name, vectors in spectral.items():
        kernel = np.asarray(phi[name]["kernel"])
        used = kernel / np.linalg.norm(np.asarray(vectors["vector"]) @ kernel)
        np.testing.assert_allclose(np.linalg.svd(used)[1][0], 1, atol=1e-4)
    # Ten times the weights with the same biases give the same output.

    def scaled(scale):
        return jax.tree_util.tree_map_with_path(
            lambda p, x: scale * x if p[-1].key == "kernel" else x, phi
        )

    first, second = (
        network.apply({"params": scaled(s), "spectral": spectral}, jnp.ones(3)) for s in (1, 10)
    )
    chex.assert_trees_all_close(first, second, rtol=1e-5)
    x = np.ones(3)
    for i, name in enumerate(("layer1", "layer2", "head_b")):
        x = np.maximum(x, 0) if i == 1 else x
        kernel = np.asarray(phi[name]["kernel"])
        x = x @ kernel / np.linalg.svd(kernel)[1][0] + phi[name]["bias"]
    np.testing.assert_allclose(first["b"], x, rtol=1e-4, atol=1e-5)


def test_the_gradient_includes_the_norm():
    """With v at the singular vector, the gradient of σ is v uᵀ."""
    target = {"b": jax.ShapeDtypeStruct((4,), jnp.float32)}
    network = Hypernetwork(target, width=0, spectral_norm=True)
    generated = network.init(KEY, jnp.zeros(3))
    phi = generated["params"]
    spectral = hypernet.advance(phi, generated["spectral"], 200)
    weigh = jnp.arange(1.0, 5.0)

    def loss(phi):
        return jnp.vdot(
            weigh, network.apply({"params": phi, "spectral": spectral}, jnp.ones(3))["b"]
        )

    got = jax.grad(loss)(phi)["head_b"]["kernel"]
    kernel = np.asarray(phi["head_b"]["kernel"], np.float64)
    left, sigma, right = np.linalg.svd(kernel)
    unnormalised = np.outer(np.ones(3), weigh) / sigma[0]
    along = np.outer(left[:, 0], right[0])
    expected = unnormalised - along * np.sum(unnormalised * kernel) / sigma[0]
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


def test_spread_by_hand():
    """Models (2, 0), (4, 0), (0, 3) and (6, 1) have the mean (3, 1), with norm √10."""
    models = jnp.array([[2.0, 0.0], [4.0, 0.0], [0.0, 3.0], [6.0, 1.0]])
    got = hypernet.spread(lambda v: {"w": v[0], "b": v[1]}, models)
    expected = np.array([2.0, 2.0, 13.0, 9.0]) ** 0.5 / 10**0.5
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    dead = hypernet.spread(lambda v: {"w": jnp.ones(3) + 0 * v[0]}, models)
    np.testing.assert_allclose(dead, 0, atol=1e-6)
    first_two = hypernet.spread(  # of mean (3, 0)
        lambda v: {"w": v[0], "b": v[1]}, models, jnp.array([True, True, False, False])
    )
    np.testing.assert_allclose(first_two[:2], [1 / 3, 1 / 3], rtol=1e-6)
