"""Clipping and noise of uploads, for the levels of privacy that `settings.py` here registers."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import ClientResult, PyTree
from fedjax_pfl.transforms.wrapping import is_variance


def not_covered_reason(leaves: Sequence[Any]) -> str:
    """Returns why noise does not cover an upload with these leaves, or "" if it does."""
    if not leaves:
        return "the method uploads nothing"
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
        return "uploads have integers or masks, which noise does not cover"
    return ""


def float32_change(payload: PyTree, upload: PyTree) -> PyTree:
    """Returns the upload minus the download in float32, see `trees.change`.

    bfloat16 would round clipped changes, and their sum, to more than the norm allows.
    """

    def widen(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return trees.change(jax.tree.map(widen, payload), jax.tree.map(widen, upload))


def clip(change: PyTree, clip_norm: Any) -> tuple[PyTree, jax.Array]:
    """Returns a change scaled down to an L2 norm over the whole tree, and its norm before."""
    norm = jnp.sqrt(trees.squared_norm(change))
    factor = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
    return jax.tree.map(lambda leaf: factor.astype(leaf.dtype) * leaf, change), norm


def add_noise(tree: PyTree, deviation: Any, key: jax.Array) -> PyTree:
    """Returns a tree plus independent Gaussian noise of a standard deviation on every number."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    noised = [
        leaf + (deviation * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, noised)


def add_change(old: PyTree, change: PyTree) -> PyTree:
    """Returns old + change in the dtypes of `old`; variances of BatchNorm stay at 0 or above.

    The change is in float32, and is rounded only now.
    """

    def add(path: tuple[Any, ...], old: jax.Array, change: jax.Array) -> jax.Array:
        new = (old.astype(jnp.float32) + change).astype(old.dtype)
        return jnp.maximum(new, 0.0) if is_variance(path) else new

    return jax.tree_util.tree_map_with_path(add, old, change)


def accepted(
    payload: PyTree, old_client: PyTree, result: ClientResult, largest_norm: float = math.inf
) -> ClientResult:
    """Returns a result that the simulation accepts: one that is not finite has no effect instead.

    A rejected update would show that the client's data made training diverge. The client then
    uploads its download unchanged and keeps its state. The same holds if the change of the upload
    has a larger norm than `largest_norm`.
    """
    squared_norm = trees.squared_norm(trees.change(payload, result.upload))
    is_finite = trees.all_finite((result.upload, result.variables, result.client))
    is_finite &= jnp.isfinite(squared_norm) & (squared_norm <= largest_norm**2)
    unchanged = trees.matching_download(payload, result.upload)
    return result._replace(
        upload=trees.where(is_finite, result.upload, unchanged),
        variables=jax.tree.map(jnp.nan_to_num, result.variables),
        client=trees.where(is_finite, result.client, old_client),
    )
