"""Several clients' models mixed layer by layer, and how the weights of the layers should move."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl.core import far, trees
from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.errors import MOST_LAYERS, at_least, need, one_of
from fedjax_pfl.networks.layer_weights import NORMALISE

STEPS = ("held_out", "scaled", "plain")
PyTree = Any


class Layers(NamedTuple):
    """The layers of a model as the L rows of its weights."""

    row: dict[str, int]  # of each layer, by its name
    of_leaf: PyTree  # in the place of each parameter, the row of its layer
    number: int  # L
    from_input: tuple[int, ...]  # the rows, from the model's input to its output


def rows_of(params: PyTree, order: Sequence[str], whole: bool) -> Layers:
    """One row for each layer, or one for the whole model; `order` has layers from the input on.

    Where no order is given it is that of the parameter tree.
    """
    row = {name: 0 if whole else j for j, name in enumerate(trees.layers(params))}
    of_leaf = trees.map_layers(lambda name, _: row[name], params)
    from_input = dict.fromkeys(row[name] for name in order or row if name in row)
    return Layers(row, of_leaf, max(row.values()) + 1, tuple(from_input))


def largest(values: jax.Array, k: int, layers: Layers) -> jax.Array:
    """bool [L]: the k layers with the largest values; of equal ones those nearer to the input."""
    places = jnp.asarray(layers.from_input)
    rank = jnp.argsort(jnp.argsort(-values[places], stable=True))
    return jnp.zeros(layers.number, bool).at[places].set(rank < k)


def mix(theta: PyTree, weights: jax.Array, layers: Layers) -> PyTree:
    """θ̄^l = Σ_j α^{l,j} θ_j^l: stacked parameters [N, ...], weights [L, N]."""
    return far.mixed(theta, jax.tree.map(lambda row: weights[row], layers.of_leaf))


def scaled(delta: PyTree, layers: Layers) -> PyTree:
    """Δ^l / ‖Δ^l‖², zero where Δ^l is."""
    squares = jnp.zeros(layers.number)
    for leaf, row in zip(*map(jax.tree.leaves, (delta, layers.of_leaf)), strict=True):
        squares = squares.at[row].add(jnp.sum(leaf**2))
    factor = jnp.where(squares > 0, 1 / jnp.where(squares > 0, squares, 1.0), 0.0)
    return jax.tree.map(lambda leaf, row: leaf * factor[row], delta, layers.of_leaf)


def gains(theta: PyTree, gradient: PyTree, layers: Layers, allowed: jax.Array) -> jax.Array:
    """−⟨θ_j^l, g^l⟩ less its mean over the clients that are allowed: [L, N], zero for the others.

    To first order, by how much of a loss with the gradient g it pays to take layer l from client j.
    """

    def along(stored: PyTree) -> jax.Array:
        found = [jnp.zeros(())] * layers.number
        leaves = zip(*map(jax.tree.leaves, (stored, gradient, layers.of_leaf)), strict=True)
        for leaf, g, row in leaves:
            found[row] -= jnp.vdot(leaf, g, precision="highest")
        return jnp.stack(found)

    found = far.each(along, theta).T
    share = allowed.astype(jnp.float32) / jnp.sum(allowed).astype(jnp.float32)
    mean = jnp.matmul(found, share, precision="highest")
    return jnp.where(allowed[None], found - mean[:, None], 0.0)


def moved(raw: Callable[[PyTree], jax.Array], psi: PyTree, wanted: jax.Array) -> PyTree:
    """ψ + Jᵀw ‖w‖² / ‖Jᵀw‖² with J = ∂raw/∂ψ: along w, to first order, raw moves by w itself."""
    _, back = jax.vjp(raw, psi)
    (direction,) = back(wanted)
    length = optax.tree.norm(direction, squared=True)
    factor = jnp.where(length > 0, jnp.sum(wanted**2) / jnp.where(length > 0, length, 1.0), 0.0)
    return optax.tree.add_scale(psi, factor, direction)


def check(
    federation: Federation,
    layers: int,
    k: int,
    refresh: int,
    granularity: str,
    normalise: str,
    step: str,
    folds: int,
    rate: float,
    sizes: dict[str, int],
) -> None:
    """UsageError where pFedLA cannot have these settings; `sizes` are of its hypernetworks."""
    need(federation.clients >= 2, "pfedla mixes models of clients; clients must be at least 2")
    need(not federation.groups.any(), "pfedla mixes models of one network; use it without groups")
    one_of("pfedla.granularity", granularity, ("layer", "model"))
    one_of("pfedla.normalise", normalise, NORMALISE)
    one_of("pfedla.step", step, STEPS)
    need(step != "held_out" or normalise == "softmax", "step=held_out needs normalise=softmax")
    need(0 <= k <= layers, f"pfedla.k is {k}; choose 0 to {layers} of the {layers} layers")
    at_least("pfedla.refresh", refresh, 0)
    at_least("pfedla.folds", folds, 2)
    at_least("pfedla.rate", rate, 0)
    at_least("pfedla.embedding", sizes["embedding"], 1)
    at_least("pfedla.hidden", sizes["hidden"], 1)
    depth = sizes["depth"]
    need(0 <= depth <= MOST_LAYERS, f"pfedla.depth is {depth}; choose 0 to {MOST_LAYERS}")
