"""Factorized-FL: every kernel is a product of two vectors plus a sparse matrix.

Jeong and Hwang, Factorized-FL: Personalized Federated Learning with Parameter Factorization &
Similarity Matching, 2022. Every kernel, the classifier's included, is W = π(u vᵀ + μ), with μ = 0
at the start, (1) to (3). The server stores what each client k uploaded last. With v* of the layer
before the classifier it computes, for client k and all stored models i, from one snapshot:

  σ_i = cos(v*_k, v*_i), σ_k = 1                                                       (4)
  candidates: σ_i ≥ τ, and at least the `minimum` most similar
  ω_i = exp(ε σ_i) / Σ exp(ε σ_j) over the candidates
  u_k ← Σ_i ω_i u_i                     alpha, share="u"                               (5)
  (u_k, v_k, μ_k) ← Σ_i ω_i (u_i, v_i, μ_i)      beta, share="all"
  local training on f + λ ‖μ‖₁                                                         (6)

Equation (5) covers layers 1 to L−1: the classifier is never mixed and never uploaded. Alpha uploads
u and v* and downloads u. Beta also mixes biases and BatchNorm's scale and shift. BatchNorm's
statistics stay on the client. Entries of μ below λ are pruned for evaluation and not counted as
traffic.

Where the paper is silent: u and v start from Xavier's uniform distribution, and there are `minimum`
and the pruning, all as in the authors' code. The mixture uses the last upload of clients that were
not sampled. Where the paper is unclear: (5) prints Σ u_i and means a weighted sum. A score below τ
is dropped, as (4) defines the set; the text says set to zero. Random and worst peers are weighted
by ω as well.

Where the authors' code differs: its penalty has no gradient (penalty=False). It folds kernels as
[O, I, F, F] (layout="oihw"). It resets the classifier every round unless labels are permuted. It
starts a dense μ at random. Alpha also mixes BatchNorm's scale and shift. A client's mixture
replaces its model before the next client's mixture is computed.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.factorized_fl.diagnostics import PICTURES, diagnostics
from fedjax_pfl.algorithms.factorized_fl.factor_mixing import (
    Matching,
    Penalty,
    body_layers,
    factor_mixing,
    stacked_leaf,
)
from fedjax_pfl.algorithms.shared.matching import RULES, candidates, cosine, cosines
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, Federation, PyTree
from fedjax_pfl.core.errors import require, require_at_least, require_one_of
from fedjax_pfl.networks.factorized import LAYOUTS, Factorized
from fedjax_pfl.networks.pretrained import require_random_start
from fedjax_pfl.networks.zero_head import require_random_head


def factorized_fl(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    share: str = "all",
    tau: float = 0.0,
    scale: float = 1.0,
    minimum: int = 1,
    matching: str = "similar",
    peers: int = 3,
    sparsity: float = 5e-4,
    penalty: bool = True,
    pruned: str = "evaluation",
    rank: int = 1,
    layout: str = "kernel",
    bias: bool = True,
) -> Algorithm:
    """Creates Factorized-FL. The rows are the latest uploads, leaves of shape [N, ...].

    Args:
      share: Parameters that are mixed: all (beta), or u (alpha).
      tau: τ, the least similarity of a candidate.
      scale: ε. A larger value gives more weight to similar models.
      minimum: Least number of candidates, the client itself included.
      matching: similar; random or worst, as controls; or none, for the mean weighted by examples.
      peers: Number of other clients to mix if matching is random or worst.
      sparsity: λ, the weight of the penalty on μ. Smaller entries of μ are pruned.
      penalty: Whether λ ‖μ‖₁ has a gradient. It has none in the authors' code.
      pruned: When μ is pruned: for evaluation and the traffic count only (evaluation), or also
        before it is sent (travel).
      rank: Rank of u vᵀ.
      layout: How the kernel of a convolution becomes a matrix: kernel, mixed or oihw.
      bias: Whether there is a μ.
    """
    require_one_of("factorized_fl.share", share, ("all", "u"))
    require_one_of("factorized_fl.matching", matching, RULES)
    require_one_of("factorized_fl.pruned", pruned, ("travel", "evaluation"))
    require_one_of("factorized_fl.layout", layout, LAYOUTS)
    require_at_least("factorized_fl.sparsity", sparsity, 0)
    require_at_least("factorized_fl.rank", rank, 1)
    members, control = federation.least_contributors, matching in ("random", "worst")
    choices = f"it counts the client itself, choose 1 to {members}"
    require(1 <= minimum <= members, f"factorized_fl.minimum is {minimum}; {choices}")
    valid_peers = not control or 1 <= peers < max(members, 2)
    require(valid_peers, f"factorized_fl.peers is {peers}; choose 1 to {members - 1}")
    require_random_start("factorized_fl", model)
    require_random_head("factorized_fl", model)
    shape, dtype = federation.input_shape, federation.input_dtype
    net = Factorized(model, shape, rank, layout, bias, input_dtype=dtype)
    body = body_layers(net)
    last, counts = body[-1], jnp.asarray(federation.counts, jnp.float32)

    def is_mixed(layer: str, leaf: str) -> bool:
        return layer != net.head if share == "all" else layer in body and leaf == "u"

    def weights(rows: PyTree, i: Any, key: jax.Array) -> jax.Array:
        """Returns ω of client i, [N]. A held-out client is in no other mixture."""
        allowed = federation.contributors(i).at[i].set(True)
        if matching == "none":
            return jnp.where(allowed, counts, 0.0) / jnp.sum(jnp.where(allowed, counts, 0.0))
        sigma = cosine(stacked_leaf(rows, last, "v"), i)
        selected = candidates(sigma, minimum, sigma >= tau, allowed, i)
        if control:
            order = -sigma if matching == "worst" else jax.random.uniform(key, sigma.shape)
            selected = candidates(order, peers + 1, jnp.zeros_like(allowed), allowed, i)
        return jax.nn.softmax(jnp.where(selected, scale * sigma, -jnp.inf))

    def observe(rows: PyTree) -> dict[str, jax.Array]:
        recorded = {leaf: cosines(stacked_leaf(rows, last, leaf)) for leaf in ("u", "v")}
        if matching != "random":  # random peers differ from round to round
            clients, key = jnp.arange(federation.clients), jax.random.key(0)
            recorded["weights"] = jax.vmap(weights, (None, 0, None))(rows, clients, key)
        return recorded

    rules = Matching(
        compared=last,
        weights=weights,
        first=lambda rows: rows,
        updated=lambda rows, cohort: cohort.uploads,
        observe=observe,
    )
    gradient = sparsity if penalty else 0.0
    regulariser = Penalty(gradient=gradient, least=sparsity, pruned_travel=pruned == "travel")
    return factor_mixing(net, training, federation, rules, regulariser, is_mixed)


FACTORIZED_FL = Method(
    factorized_fl,
    title="Factorized-FL",
    paper="Jeong and Hwang 2022",
    diagnostics=diagnostics("factorized_fl"),
    pictures=PICTURES,
)
