"""Pytree mathematics: the layers of a model, sizes, weighted means, norms."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core import offload

PyTree = Any
_COLLECTIONS = ("params", "batch_stats")


def _word(entry: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def layer_name(path: tuple[Any, ...]) -> str:
    """The layer that a leaf belongs to: its path without the collection and the leaf's own name.

    Weight and bias of a module are one layer; so are the scale, bias and statistics of a BatchNorm.
    """
    words = [_word(entry) for entry in path]
    if words and words[0] in _COLLECTIONS:
        words = words[1:]
    return "/".join(words[:-1] or words) or "payload"


def layers(tree: PyTree) -> dict[str, list[Any]]:
    """The leaves of a tree, grouped by layer, in the order in which the tree holds them."""
    grouped: dict[str, list[Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        grouped.setdefault(layer_name(path), []).append(leaf)
    return grouped


def divide(variables: PyTree, chosen: Callable[[str, str], bool]) -> tuple[PyTree, PyTree]:
    """A model's variables, nested dicts, cut in two: leaves that are `chosen`, and the others.

    `chosen` is given a leaf's layer and its own name. Every leaf keeps its path; a dict that
    nothing is left of is left out.
    """
    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
        *way, last = (_word(entry) for entry in path)
        place = parts[0] if chosen(layer_name(path), last) else parts[1]
        for word in way:
            place = place.setdefault(word, {})
        place[last] = leaf
    return parts


def split(variables: PyTree, chosen: Collection[str]) -> tuple[PyTree, PyTree]:
    """As `divide`, by the names of layers."""
    return divide(variables, lambda layer, leaf: layer in chosen)


def join(one: PyTree, other: PyTree) -> PyTree:
    """The inverse of `divide`."""
    joined = dict(one)
    for name, tree in other.items():
        if name in joined and not (isinstance(joined[name], dict) and isinstance(tree, dict)):
            raise ValueError(f"{name} is in both parts")
        joined[name] = join(joined[name], tree) if name in joined else tree
    return joined


def same_shapes(one: PyTree, other: PyTree) -> bool:
    """Whether two trees have leaves of the same shapes and dtypes under the same paths."""

    def form(tree: PyTree) -> list[Any]:
        return [(p, x.shape, x.dtype) for p, x in jax.tree_util.tree_leaves_with_path(tree)]

    return form(one) == form(other)


def leaf_bytes(leaf: Any) -> int:
    """Bytes of one array, from its shape and dtype alone."""
    return int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize


def bytes_per_layer(tree: PyTree) -> dict[str, int]:
    """Bytes in each layer, as Python integers."""
    return {name: sum(map(leaf_bytes, leaves)) for name, leaves in layers(tree).items()}


def size(tree: PyTree) -> int:
    """How many numbers a tree holds."""
    return sum(int(np.prod(leaf.shape, dtype=np.int64)) for leaf in jax.tree.leaves(tree))


def repeat(tree: PyTree, n: int) -> PyTree:
    """n copies of a tree, stacked on a new axis 0."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (n, *jnp.shape(leaf))), tree)


def row(tree: PyTree, i: Any) -> PyTree:
    """Row i of every leaf."""
    return offload.take_rows(tree, i)


def put(tree: PyTree, ids: jax.Array, values: PyTree) -> PyTree:
    """Write stacked `values` into rows `ids`; an id out of range is dropped."""

    def write(whole: Any, new: jax.Array) -> Any:
        if offload.is_offloaded(whole):
            return whole.put(ids, new)
        return whole.at[ids].set(new, mode="drop")

    return jax.tree.map(write, tree, values, is_leaf=offload.is_offloaded)


def where(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Choose whole rows: `condition` is [K] or a scalar, the leaves are [K, ...] or alike."""

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        spread = condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim))
        return jnp.where(spread, a, b)

    return jax.tree.map(choose, new, old)


def weighted_mean(tree: PyTree, weights: jax.Array) -> PyTree:
    """Σ_k w_k x_k / Σ_k w_k over axis 0 of every leaf; `weights` is [K] and not all zero."""
    share = weights / jnp.sum(weights)

    def mean(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"there is no mean of {leaf.dtype}")
        return jnp.tensordot(share.astype(leaf.dtype), leaf, 1, precision="highest")

    return jax.tree.map(mean, tree)


def squared_norm(tree: PyTree) -> jax.Array:
    """Σ x² over every floating-point leaf."""
    squares = [
        jnp.sum(jnp.square(leaf.astype(jnp.float32)))
        for leaf in jax.tree.leaves(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    return jnp.sum(jnp.stack(squares)) if squares else jnp.zeros((), jnp.float32)


def all_finite(tree: PyTree) -> jax.Array:
    """Whether every number of every floating-point leaf is finite."""
    checks = [
        jnp.all(jnp.isfinite(leaf))
        for leaf in jax.tree.leaves(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    return jnp.all(jnp.stack(checks)) if checks else jnp.ones((), bool)


def matching_download(payload: PyTree, upload: PyTree) -> PyTree:
    """For each leaf of an upload what came down under the same path, or zeros where nothing did."""
    sent = dict(jax.tree_util.tree_leaves_with_path(payload))

    def same(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        other = sent.get(path)
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        if other is None or other.shape != leaf.shape or not floating:
            return jnp.zeros_like(leaf)
        return other

    return jax.tree_util.tree_map_with_path(same, upload)


def change(payload: PyTree, upload: PyTree) -> PyTree:
    """An upload minus what came down; leaves that are not floating-point stay as they are."""

    def minus(new: jax.Array, old: jax.Array) -> jax.Array:
        return new - old if jnp.issubdtype(new.dtype, jnp.floating) else new

    return jax.tree.map(minus, upload, matching_download(payload, upload))


def map_layers(f: Callable[..., Any], tree: PyTree, *others: PyTree) -> PyTree:
    """f(layer name, leaf, leaves of the others) for every leaf."""

    def named(path: tuple[Any, ...], *leaves: Any) -> Any:
        return f(layer_name(path), *leaves)

    return jax.tree_util.tree_map_with_path(named, tree, *others)
