"""Layers of several clients' models in a mixture, and how its weights should move."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def mix(theta: PyTree, weights: jax.Array, layer_of: PyTree) -> PyTree:
    """θ̄^l = Σ_j α^{l,j} θ_j^l: stacked parameters [N, ...], weights [L, N], a layer per leaf."""
    return jax.tree.map(
        lambda leaf, layer: jnp.tensordot(weights[layer], leaf, 1, precision="highest"),
        theta,
        layer_of,
    )


def scaled(delta: PyTree, layer_of: PyTree, layers: int) -> PyTree:
    """Δ^l / ‖Δ^l‖², zero where Δ^l is."""
    squares = jnp.zeros(layers)
    for leaf, layer in zip(jax.tree.leaves(delta), jax.tree.leaves(layer_of), strict=True):
        squares = squares.at[layer].add(jnp.sum(leaf**2))
    factor = jnp.where(squares > 0, 1 / jnp.where(squares > 0, squares, 1.0), 0.0)
    return jax.tree.map(lambda leaf, layer: leaf * factor[layer], delta, layer_of)


def gains(
    theta: PyTree, gradient: PyTree, layer_of: PyTree, layers: int, allowed: jax.Array
) -> jax.Array:
    """−⟨θ_j^l, g^l⟩ less its mean over the clients that are allowed: [L, N], zero for the others.

    To first order, by how much of a loss with the gradient g it pays to take layer l from client j.
    """
    found = jnp.zeros((layers, len(allowed)))
    leaves = zip(*map(jax.tree.leaves, (theta, gradient, layer_of)), strict=True)
    for all_of, g, layer in leaves:
        flat = all_of.reshape(len(allowed), -1)
        found = found.at[layer].add(-jnp.matmul(flat, g.reshape(-1), precision="highest"))
    share = allowed.astype(jnp.float32) / jnp.sum(allowed).astype(jnp.float32)
    mean = jnp.matmul(found, share, precision="highest")
    return jnp.where(allowed[None], found - mean[:, None], 0.0)


def moved(raw: Callable[[PyTree], jax.Array], psi: PyTree, wanted: jax.Array) -> PyTree:
    """ψ + Jᵀw ‖w‖² / ‖Jᵀw‖² with J = ∂raw/∂ψ: along w, to first order, raw moves by w itself."""
    _, back = jax.vjp(raw, psi)
    (direction,) = back(wanted)
    length = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(direction))
    factor = jnp.where(length > 0, jnp.sum(wanted**2) / jnp.where(length > 0, length, 1.0), 0.0)
    return jax.tree.map(lambda p, d: p + factor * d, psi, direction)
