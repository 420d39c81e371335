"""The sparse matrix μ of factorised kernels: its L1 penalty, pruning and traffic."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.core import offload, trees
from fedjax_pfl.core.algorithm import PyTree
from fedjax_pfl.core.examples import Batch
from fedjax_pfl.core.local_training import Gradient


def with_l1(loss_gradient: Gradient, penalty: Any) -> Gradient:
    """Returns `loss_gradient` with penalty · sign(μ), the gradient of an L1 penalty, added.

    It has the signature of `loss_gradient`. The loss that it reports is without the penalty.
    """

    def add(g: jax.Array, mu: jax.Array) -> jax.Array:
        return g + penalty * jnp.sign(mu)

    def gradient(params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> Any:
        aux, grads = loss_gradient(params, model_state, batch, key)
        return aux, _on_mu(add, grads, params)

    return gradient


def _on_mu(f: Any, tree: PyTree, *more_trees: PyTree) -> PyTree:
    """Returns `tree` with f(leaf, its counterparts in `more_trees`) for every leaf named `mu`.

    Other leaves stay unchanged.
    """

    def apply(path: tuple[Any, ...], leaf: Any, *counterparts: Any) -> Any:
        return f(leaf, *counterparts) if path[-1] == jax.tree_util.DictKey("mu") else leaf

    return jax.tree_util.tree_map_with_path(apply, tree, *more_trees)


def collect_mu(tree: PyTree) -> list[jax.Array]:
    """Returns the leaves named `mu` of a tree."""
    matrices: list[jax.Array] = []
    _on_mu(matrices.append, tree)
    return matrices


def prune(tree: PyTree, least: float) -> PyTree:
    """Sets entries of every μ whose magnitude is below `least` to zero."""
    return _on_mu(lambda mu: jnp.where(jnp.abs(mu) < least, 0.0, mu), tree)


def bytes_used(tree: PyTree) -> dict[str, Any]:
    """Returns one model's bytes by layer name, counting only the nonzero entries of μ."""
    zeros = jax.tree.map(lambda leaf: 0, tree)
    unused = _on_mu(lambda _, mu: mu.dtype.itemsize * jnp.sum(mu == 0), zeros, tree)
    saved = {name: sum(amounts) for name, amounts in trees.layers(unused).items()}
    return {name: amount - saved[name] for name, amount in trees.bytes_per_layer(tree).items()}


def share_pruned(parts: Sequence[PyTree], least: Any) -> jax.Array:
    """Returns the fraction of each client's entries of μ with a magnitude below `least`, [N].

    Args:
      parts: Trees with all clients' leaves, [N, ...], that together hold every μ.
      least: Threshold.
    """

    def counted(tree: PyTree) -> jax.Array:
        matrices = collect_mu(tree)
        small = [jnp.sum(jnp.abs(mu) < least, dtype=jnp.int32) for mu in matrices]
        return jnp.stack([sum(small, jnp.int32(0)), jnp.int32(sum(mu.size for mu in matrices))])

    counts = [offload.map_clients(counted, part) for part in parts if jax.tree.leaves(part)]
    small, entries = jnp.moveaxis(jnp.stack(counts).sum(0), 1, 0)
    return small / entries
