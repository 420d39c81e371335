"""Layer-wise weighted means of models."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.pfedla.layer_weights import NORMALISE
from fedjax_pfl.core import offload, trees
from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.errors import MAX_LAYERS, require, require_at_least, require_one_of

PyTree = Any


class LayerRows(NamedTuple):
    """The row of alpha that belongs to each layer of a model."""

    row: dict[str, int]  # layer name -> row, 0 to L - 1
    of_leaf: PyTree  # row of each parameter array, in the structure of the parameters
    number: int  # number of rows L
    from_input: tuple[int, ...]  # the rows in the order of the layers, from input to output


def layer_rows(params: PyTree, order: Sequence[str], whole_model: bool) -> LayerRows:
    """Numbers the layers of a model.

    Args:
      params: Parameters, or their shapes.
      order: Layer names from input to output; if empty, the order of the parameter tree.
      whole_model: Give all layers the same row, so that L is 1.
    """
    row = {name: 0 if whole_model else j for j, name in enumerate(trees.layers(params))}
    of_leaf = trees.map_layers(lambda name, _: row[name], params)
    from_input = dict.fromkeys(row[name] for name in order or row if name in row)
    return LayerRows(
        row=row, of_leaf=of_leaf, number=max(row.values()) + 1, from_input=tuple(from_input)
    )


def largest(values: jax.Array, k: int, layers: LayerRows) -> jax.Array:
    """Marks the k layers with the largest of `values` [L]. Returns a bool array of shape [L].

    Of equal values, those of layers nearer to the input come first.
    """
    places = jnp.asarray(layers.from_input)
    rank = jnp.argsort(jnp.argsort(-values[places], stable=True))
    return jnp.zeros(layers.number, bool).at[places].set(rank < k)


def mix(theta: PyTree, weights: jax.Array, layers: LayerRows) -> PyTree:
    """Computes one model: sum_j weights[l, j] theta_j^l for every layer l.

    Args:
      theta: Parameters of N models, leaves of shape [N, ...].
      weights: Array of shape [L, N].
      layers: Row of each layer.
    """
    return offload.weighted_sum(theta, jax.tree.map(lambda row: weights[row], layers.of_leaf))


def weight_slopes(theta: PyTree, delta: PyTree, layers: LayerRows) -> jax.Array:
    """Computes (∂θ̄/∂α)ᵀ Δ of `mix`: ⟨θ_j^l, Δ^l⟩ for layer l and model j. Returns [L, N].

    Args:
      theta: Parameters of N models, leaves of shape [N, ...].
      delta: Change of one model, in the structure of its parameters.
      layers: Row of each layer.
    """
    sums: dict[int, jax.Array] = {}
    products = offload.dot_products(theta, delta)
    pairs = zip(jax.tree.leaves(layers.of_leaf), jax.tree.leaves(products), strict=True)
    for row, product in pairs:
        sums[row] = sums[row] + product if row in sums else product
    return jnp.stack([sums[row] for row in range(layers.number)])


def check_layer_mixing(
    federation: Federation,
    layers: int,
    k: int,
    granularity: str,
    normalise: str,
    rate: float,
    sizes: dict[str, int],
) -> None:
    """Raises UsageError for settings that pFedLA cannot use.

    `layers` is the number of rows of alpha; `sizes` has embedding, hidden and depth of the
    hypernetwork. k, granularity, normalise and rate are those of `pfedla`.
    """
    require(federation.clients >= 2, "pfedla mixes models of clients; clients must be at least 2")
    require(
        not federation.groups.any(), "pfedla mixes models of one network; use it without groups"
    )
    require_one_of("pfedla.granularity", granularity, ("layer", "model"))
    require_one_of("pfedla.normalise", normalise, NORMALISE)
    require(0 <= k <= layers, f"pfedla.k is {k}; choose 0 to {layers} of the {layers} layers")
    require_at_least("pfedla.rate", rate, 0)
    require_at_least("pfedla.embedding", sizes["embedding"], 1)
    require_at_least("pfedla.hidden", sizes["hidden"], 1)
    depth = sizes["depth"]
    require(0 <= depth <= MAX_LAYERS, f"pfedla.depth is {depth}; choose 0 to {MAX_LAYERS}")
