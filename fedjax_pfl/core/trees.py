"""Functions on pytrees: layers of a model, sizes, weighted means and norms."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core import offload

PyTree = Any
_COLLECTIONS = ("params", "batch_stats")


def _path_key(entry: Any) -> str:
    """Returns an entry of a JAX path as a string: a dict key, field name or index."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def layer_name(path: tuple[Any, ...]) -> str:
    """Returns the layer of a leaf, such as "Conv_0": its path without collection and leaf name.

    The weight and bias of a module are one layer, as are the scale, bias and statistics of a
    BatchNorm.
    """
    keys = [_path_key(entry) for entry in path]
    if keys and keys[0] in _COLLECTIONS:
        keys = keys[1:]
    return "/".join(keys[:-1] or keys) or "payload"


def layers(tree: PyTree) -> dict[str, list[Any]]:
    """Returns lists of the leaves of each layer, by `layer_name`, in the order of the tree."""
    grouped: dict[str, list[Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        grouped.setdefault(layer_name(path), []).append(leaf)
    return grouped


def divide(variables: PyTree, predicate: Callable[[str, str], bool]) -> tuple[PyTree, PyTree]:
    """Divides a model's variables into two trees of nested dicts.

    Args:
      variables: Nested dicts.
      predicate: (layer name, leaf name such as "kernel") -> whether the leaf is in the first tree.

    Returns:
      The leaves for which the predicate is true, and the others. Leaves keep their paths; empty
      dicts are dropped.
    """
    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
        *parents, leaf_name = (_path_key(entry) for entry in path)
        node = parts[0] if predicate(layer_name(path), leaf_name) else parts[1]
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf_name] = leaf
    return parts


def split(variables: PyTree, layer_names: Collection[str]) -> tuple[PyTree, PyTree]:
    """Divides a model's variables into the named layers and the others; see `divide`."""
    return divide(variables, lambda layer, leaf: layer in layer_names)


def join(first: PyTree, second: PyTree) -> PyTree:
    """Merges two trees of nested dicts; the inverse of `divide`.

    Raises ValueError if a leaf is in both.
    """
    joined = dict(first)
    for name, tree in second.items():
        if name in joined and not (isinstance(joined[name], dict) and isinstance(tree, dict)):
            raise ValueError(f"{name} is in both trees")
        joined[name] = join(joined[name], tree) if name in joined else tree
    return joined


def same_shapes(first: PyTree, second: PyTree) -> bool:
    """Returns True if two trees have the same paths with leaves of the same shapes and dtypes."""

    def shapes(tree: PyTree) -> list[Any]:
        return [(p, x.shape, x.dtype) for p, x in jax.tree_util.tree_leaves_with_path(tree)]

    return shapes(first) == shapes(second)


def leaf_bytes(leaf: Any) -> int:
    """Returns the bytes of an array, from its shape and dtype."""
    return int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize


def bytes_per_layer(tree: PyTree) -> dict[str, int]:
    """Returns the bytes of each layer, by `layer_name`, as Python integers."""
    return {name: sum(map(leaf_bytes, leaves)) for name, leaves in layers(tree).items()}


def size(tree: PyTree) -> int:
    """Returns the number of elements of all leaves."""
    return sum(int(np.prod(leaf.shape, dtype=np.int64)) for leaf in jax.tree.leaves(tree))


def repeat(tree: PyTree, n: int) -> PyTree:
    """Returns `n` copies of a tree, stacked on a new axis 0."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (n, *jnp.shape(leaf))), tree)


def row(tree: PyTree, i: Any) -> PyTree:
    """Returns entry `i` on axis 0 of every leaf; leaves may be `Offloaded`."""
    return offload.take_rows(tree, i)


def put(tree: PyTree, ids: jax.Array, values: PyTree) -> PyTree:
    """Returns `tree`, leaves [N, ...], with `values`, [K, ...], in rows `ids`, int [K].

    Ids out of range are skipped. Leaves may be `Offloaded`.
    """

    def write(leaf: Any, rows: jax.Array) -> Any:
        if offload.is_offloaded(leaf):
            return leaf.put(ids, rows)
        return leaf.at[ids].set(rows, mode="drop")

    return jax.tree.map(write, tree, values, is_leaf=offload.is_offloaded)


def where(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Selects rows of `new` where the condition is true, else of `old`.

    The condition is bool [K] for leaves of shape [K, ...], or a scalar for leaves of any shape.
    """

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        rows = condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim))
        return jnp.where(rows, a, b)

    return jax.tree.map(choose, new, old)


def zero_unless(condition: jax.Array, tree: PyTree) -> PyTree:
    """Returns the tree with zeros where the condition is false; it has the shapes of `where`."""
    return where(condition, tree, jax.tree.map(jnp.zeros_like, tree))


def weighted_mean(tree: PyTree, weights: jax.Array) -> PyTree:
    """Computes Σ_k w_k x_k / Σ_k w_k over axis 0 of every leaf x [K, ...], in the leaf's dtype.

    The weights have shape [K] and must not all be zero.
    """
    shares = weights / jnp.sum(weights)

    for leaf in jax.tree.leaves(tree):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"no mean of {leaf.dtype}; leaves must be floating-point")
    return combine(shares, tree)


def combine(weights: jax.Array, tree: PyTree) -> PyTree:
    """Computes Σ_k w_k x_k over axis 0 of every leaf x [K, ...], in the leaf's dtype.

    The weights have shape [K], or [M, K] for M sums with leaves [M, ...].
    """

    # Weights rounded to a narrow dtype would not sum to 1, and models would grow or shrink.
    def of_leaf(leaf: jax.Array) -> jax.Array:
        total = jnp.tensordot(weights, offload.widened(leaf), 1, precision="highest")
        return total.astype(leaf.dtype)

    return jax.tree.map(of_leaf, tree)


def add_change(base: PyTree, start: PyTree, end: PyTree) -> PyTree:
    """Computes base + (end − start), exactly `end` where base and start are equal."""
    return jax.tree.map(lambda b, s, e: e + (b - s), base, start, end)


def with_dtypes(tree: PyTree, like: PyTree) -> PyTree:
    """Returns the tree with the dtypes of the tree `like`, which has the same structure."""
    return jax.tree.map(lambda leaf, model: leaf.astype(model.dtype), tree, like)


def at_least_float32(tree: PyTree) -> PyTree:
    """Returns the tree with narrower leaves, such as bfloat16, as float32."""
    return jax.tree.map(offload.widened, tree)


def _floating_leaves(tree: PyTree) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def squared_norm(tree: PyTree) -> jax.Array:
    """Computes Σ x² over all entries of all floating-point leaves, a float32 scalar."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in _floating_leaves(tree)]
    return jnp.sum(jnp.stack(squares)) if squares else jnp.zeros((), jnp.float32)


def all_finite(tree: PyTree) -> jax.Array:
    """Returns a scalar: True if all floating-point leaves are finite."""
    checks = [jnp.all(jnp.isfinite(x)) for x in _floating_leaves(tree)]
    return jnp.all(jnp.stack(checks)) if checks else jnp.ones((), bool)


def matching_download(payload: PyTree, upload: PyTree) -> PyTree:
    """Returns, for each leaf of `upload`, the leaf of `payload` with the same path and shape.

    It has the dtype of the upload. A leaf is zero if there is none, or if it is not floating-point.
    """
    downloaded = dict(jax.tree_util.tree_leaves_with_path(payload))

    def match(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        value = downloaded.get(path)
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        if value is None or value.shape != leaf.shape or not floating:
            return jnp.zeros_like(leaf)
        return value.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(match, upload)


def change(payload: PyTree, upload: PyTree) -> PyTree:
    """Returns the upload minus the downloaded values, see `matching_download`.

    Leaves that are not floating-point are as uploaded.
    """

    def minus(new: jax.Array, old: jax.Array) -> jax.Array:
        return new - old if jnp.issubdtype(new.dtype, jnp.floating) else new

    return jax.tree.map(minus, upload, matching_download(payload, upload))


def map_layers(f: Callable[..., Any], tree: PyTree, *trees: PyTree) -> PyTree:
    """Returns a tree of f(layer name, leaf, *leaves of `trees`).

    All trees have the same structure.
    """

    def with_name(path: tuple[Any, ...], *leaves: Any) -> Any:
        return f(layer_name(path), *leaves)

    return jax.tree_util.tree_map_with_path(with_name, tree, *trees)
