"""Layers, sizes and arithmetic of pytrees, compared with hand-computed numbers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import trees
from tests import tiny


class Pair(NamedTuple):
    model: object
    mask: object


def array(*values, dtype=np.float32):
    return jnp.asarray(np.array(values, dtype))


def tiny_shapes():
    return jax.eval_shape(
        tiny.Net().init, jax.random.key(0), jax.ShapeDtypeStruct((1, tiny.FEATURES), jnp.float32)
    )


def test_layers_are_modules():
    """Weight and bias are one layer, as are a BatchNorm's scale, bias, mean and variance."""
    grouped = trees.layers(tiny_shapes())
    shapes = {name: sorted(leaf.shape for leaf in leaves) for name, leaves in grouped.items()}
    assert shapes == {"fc1": [(5, 8)], "norm1": [(8,)] * 4, "fc2": [(3,), (8, 3)]}


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"params": {"block": {"conv": {"kernel": 0, "bias": 0}}}}, ["block/conv"]),
        ({"batch_stats": {"block": {"norm": {"mean": 0}}}}, ["block/norm"]),
        ({"block": {"params": {"kernel": 0}}}, ["block/params"]),
        ({"params": 0}, ["payload"]),
        (0, ["payload"]),
        ([0, 0], ["0", "1"]),
        (Pair({"fc": {"kernel": 0}}, 0), ["model/fc", "mask"]),
        ((), []),
    ],
)
def test_layer_names(tree, names):
    assert list(trees.layers(tree)) == names


def test_sizes_and_bytes():
    shapes = tiny_shapes()
    assert trees.size(shapes) == 5 * 8 + 4 * 8 + 8 * 3 + 3
    assert trees.bytes_per_layer(shapes) == {"norm1": 128, "fc1": 160, "fc2": 108}
    kinds = (jnp.int8, jnp.bool_, jnp.bfloat16, jnp.int32)
    mixed = {str(i): jax.ShapeDtypeStruct((2, 3), kind) for i, kind in enumerate(kinds)}
    assert trees.bytes_per_layer(mixed) == {"0": 6, "1": 6, "2": 12, "3": 24}
    assert (trees.size(mixed), trees.size(()), trees.bytes_per_layer(())) == (24, 0, {})
    assert trees.size(jax.ShapeDtypeStruct((), jnp.float32)) == 1
    huge = jax.ShapeDtypeStruct((2**16, 2**16), jnp.float32)
    assert (trees.size(huge), trees.leaf_bytes(huge)) == (2**32, 2**34)


def test_weighted_mean():
    """(1·1 + 3·3) / 4 = 2.5; weight 0 leaves an entry out."""
    tree = {"a": array([1, 2], [3, 4], [70, 80]), "b": array(8, 0, 9)}
    mean = trees.weighted_mean(tree, array(1, 3, 0))
    np.testing.assert_array_equal(mean["a"], [2.5, 3.5])
    np.testing.assert_array_equal(mean["b"], 2.0)
    half = trees.weighted_mean(array(1, 2).astype(jnp.bfloat16), array(5, 5))
    assert (half.dtype, float(half)) == (jnp.bfloat16, 1.5)
    with pytest.raises(TypeError, match="no mean of int32"):
        trees.weighted_mean(array(1, 2, dtype=np.int32), array(1, 1))


def test_rows():
    tree = {"a": array([1, 2], [3, 4], [5, 6]), "b": array(7, 8, 9, dtype=np.int32)}
    assert jax.tree.map(np.ndarray.tolist, jax.device_get(trees.row(tree, 1))) == {
        "a": [3, 4],
        "b": 8,
    }
    new = {"a": array([-1, -2], [-3, -4]), "b": array(-5, -6, dtype=np.int32)}
    written = jax.device_get(
        trees.put(tree, array(2, 3, dtype=np.int32), new)
    )  # row 3 does not exist
    np.testing.assert_array_equal(written["a"], [[1, 2], [3, 4], [-1, -2]])
    np.testing.assert_array_equal(written["b"], [7, 8, -5])
    copies = trees.repeat({"a": array(1, 2), "b": jnp.zeros(())}, 3)
    np.testing.assert_array_equal(copies["a"], [[1, 2]] * 3)
    assert copies["b"].shape == (3,)


def test_where():
    new = {"a": array([1, 2], [3, 4]), "b": array(5, 6)}
    old = jax.tree.map(lambda leaf: -jnp.ones_like(leaf), new)
    selected = trees.where(jnp.asarray([False, True]), new, old)
    np.testing.assert_array_equal(selected["a"], [[-1, -1], [3, 4]])
    np.testing.assert_array_equal(selected["b"], [-1, 6])
    np.testing.assert_array_equal(trees.where(jnp.asarray(True), new, old)["a"], new["a"])
    np.testing.assert_array_equal(trees.where(jnp.asarray(False), new, old)["b"], old["b"])


def test_squared_norm():
    tree = {"a": array([1, 2], [3, 0]), "b": array(4), "count": array(100, dtype=np.int32)}
    assert float(trees.squared_norm(tree)) == 1 + 4 + 9 + 16
    assert float(trees.squared_norm(())) == 0.0
    assert float(trees.squared_norm(jnp.full((512,), 1, jnp.bfloat16))) == 512.0


@pytest.mark.parametrize(
    ("values", "finite"), [((1, 2), True), ((1, np.inf), False), ((np.nan, 1), False)]
)
def test_all_finite(values, finite):
    tree = {"a": array(0.0), "b": array(*values), "mask": array(True, dtype=bool)}
    assert bool(trees.all_finite(tree)) is finite
    assert bool(trees.all_finite({"mask": tree["mask"]}))


def test_change_is_relative_to_the_download():
    """Leaves with another path, shape or a dtype that is not floating-point are unchanged."""
    payload = {"w": array(1, 2), "v": array(5), "count": array(7, dtype=np.int32), "peers": ()}
    upload = {"w": array(4, 1), "v": array(8, 9), "count": array(9, dtype=np.int32), "u": array(3)}
    down = trees.matching_download(payload, upload)
    expected = {"w": [1, 2], "v": [0, 0], "count": [0], "u": [0]}
    assert {name: leaf.tolist() for name, leaf in down.items()} == expected
    changes = trees.change(payload, upload)
    expected = {"w": [3, -1], "v": [8, 9], "count": [9], "u": [3]}
    assert {name: leaf.tolist() for name, leaf in changes.items()} == expected
    assert all(changes[name].dtype == leaf.dtype for name, leaf in upload.items())
    assert trees.change(payload, ()) == ()


def test_the_matching_download_of_a_narrow_upload_is_narrow():
    upload = {"w": jnp.ones(2, jnp.bfloat16)}
    down = trees.matching_download({"w": array(1, 2)}, upload)
    assert (down["w"].dtype, down["w"].tolist()) == (jnp.bfloat16, [1, 2])


def test_split_and_join():
    nested = {
        "params": {"a": {"w": 1, "b": 2}, "block": {"a": {"w": 3}, "c": {"w": 4}}},
        "batch_stats": {"block": {"c": {"mean": 5}}},
    }
    selected, remaining = trees.split(nested, {"a", "block/c"})
    assert selected == {
        "params": {"a": {"w": 1, "b": 2}, "block": {"c": {"w": 4}}},
        "batch_stats": {"block": {"c": {"mean": 5}}},
    }
    assert remaining == {"params": {"block": {"a": {"w": 3}}}}
    assert trees.join(selected, remaining) == trees.join(remaining, selected) == nested
    assert trees.split(nested, ()) == ({}, nested)


def test_overlapping_parts_cannot_be_joined():
    with pytest.raises(ValueError, match="both"):
        trees.join({"params": {"a": {"w": np.ones(2)}}}, {"params": {"a": {"w": np.ones(2)}}})


def test_same_shapes():
    tree, shape = {"w": np.ones((2, 3), np.float32)}, jax.ShapeDtypeStruct((2, 3), np.float32)
    assert trees.same_shapes(tree, {"w": shape})
    assert not trees.same_shapes(tree, {"v": shape})
    assert not trees.same_shapes(tree, {"w": None})
    assert not trees.same_shapes(tree, {"w": jax.ShapeDtypeStruct((2, 4), np.float32)})
    assert not trees.same_shapes(tree, {"w": jax.ShapeDtypeStruct((2, 3), np.int32)})
