"""The bias μ of factorised kernels: its L1 penalty, what of it is pruned, and what is billed."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.core import far, trees
from fedjax_pfl.core.algorithm import PyTree
from fedjax_pfl.core.examples import Batch
from fedjax_pfl.core.local_training import Gradient


def with_l1(plain: Gradient, penalty: Any) -> Gradient:
    """The gradient of loss + λ ‖μ‖₁; the loss that it reports is without the second."""

    def add(g: jax.Array, mu: jax.Array) -> jax.Array:
        return g + penalty * jnp.sign(mu)

    def gradient(params: PyTree, rest: PyTree, batch: Batch, key: jax.Array) -> Any:
        result, grads = plain(params, rest, batch, key)
        return result, _on_mu(add, grads, params)

    return gradient


def _on_mu(f: Any, tree: PyTree, *others: PyTree) -> PyTree:
    """f on every μ and what belongs to it in the other trees; the rest of `tree` stays."""

    def one(path: tuple[Any, ...], leaf: Any, *more: Any) -> Any:
        return f(leaf, *more) if path[-1] == jax.tree_util.DictKey("mu") else leaf

    return jax.tree_util.tree_map_with_path(one, tree, *others)


def collect_mu(tree: PyTree) -> list[jax.Array]:
    """Every μ in a tree."""
    found: list[jax.Array] = []
    _on_mu(found.append, tree)
    return found


def prune(tree: PyTree, least: float) -> PyTree:
    """Entries of every μ that are smaller become zero."""
    return _on_mu(lambda mu: jnp.where(jnp.abs(mu) < least, 0.0, mu), tree)


def bytes_used(tree: PyTree) -> dict[str, Any]:
    """Bytes per layer: of μ only what is not zero, of everything else all."""
    nothing = jax.tree.map(lambda leaf: 0, tree)
    unused = _on_mu(lambda _, mu: mu.dtype.itemsize * jnp.sum(mu == 0), nothing, tree)
    less = {name: sum(amounts) for name, amounts in trees.layers(unused).items()}
    return {name: amount - less[name] for name, amount in trees.bytes_per_layer(tree).items()}


def share_pruned(parts: Sequence[PyTree], least: Any) -> jax.Array:
    """[N]: the share of each client's entries of μ that are smaller, in all the stacked trees."""

    def counted(one: PyTree) -> jax.Array:
        every = collect_mu(one)
        small = [jnp.sum(jnp.abs(mu) < least, dtype=jnp.int32) for mu in every]
        return jnp.stack([sum(small, jnp.int32(0)), jnp.int32(sum(mu.size for mu in every))])

    counts = [far.each(counted, part) for part in parts if jax.tree.leaves(part)]
    small, entries = jnp.moveaxis(jnp.stack(counts).sum(0), 1, 0)
    return small / entries
