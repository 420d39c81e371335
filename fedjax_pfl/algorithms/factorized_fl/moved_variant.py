"""Factorized-FL (moved): clients are compared by how training moves v.

It differs from `factorized_fl` (Jeong and Hwang, 2022) in four ways.

  Start: u vᵀ is the best rank-one approximation of the plain network's kernel and μ the remainder,
  so the network starts as the plain one.
  Similarity: σ_i = cos(d_k, d_i) with d_k = Σ_t (v*_k trained − v*_k served), the total change of
  v* by local training, and σ_k = max_{i≠k} σ_i.
  Head: it keeps its plain kernel and is mixed with the rest.
  Penalty: none. Entries of μ below `sparsity` are pruned for evaluation and not counted.
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
from fedjax_pfl.algorithms.factorized_fl.method import FACTORIZED_FL
from fedjax_pfl.algorithms.shared.matching import candidates, cosine, cosines
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, Cohort, Federation, PyTree
from fedjax_pfl.core.errors import require, require_at_least, require_one_of
from fedjax_pfl.networks.factorized import SplitKernels


def factorized_fl_moved(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    share: str = "all",
    tau: float = 0.0,
    scale: float = 1.0,
    minimum: int = 1,
    sparsity: float = 5e-4,
) -> Algorithm:
    """Creates Factorized-FL (moved): similarity is the cosine of the total changes of v*.

    The rows are the latest uploads and `moved`, the total changes [N, D].

    Args:
      share: Parameters that are mixed besides the head: all (beta), or u (alpha).
      tau: τ, the least similarity of a candidate.
      scale: ε. A larger value gives more weight to similar models.
      minimum: Least number of candidates, the client itself included.
      sparsity: Smaller entries of μ are pruned.
    """
    require_one_of("factorized_fl_moved.share", share, ("all", "u"))
    require_at_least("factorized_fl_moved.sparsity", sparsity, 0)
    members = federation.least_contributors
    choices = f"it counts the client itself, choose 1 to {members}"
    require(1 <= minimum <= members, f"factorized_fl_moved.minimum is {minimum}; {choices}")
    net = SplitKernels(model, federation.input_shape, input_dtype=federation.input_dtype)
    last = body_layers(net)[-1]

    def is_mixed(layer: str, leaf: str) -> bool:
        return share == "all" or leaf == "u" or layer == net.head

    def weights(rows: PyTree, i: Any, key: jax.Array) -> jax.Array:
        """Returns ω of client i, [N]. A held-out client is in no other mixture."""
        sigma, contributors = cosine(rows["moved"], i), federation.contributors(i)
        best = jnp.max(jnp.where(contributors.at[i].set(False), sigma, -jnp.inf))
        sigma = sigma.at[i].set(jnp.where(jnp.isfinite(best), best, 1.0))  # 1 without peers
        selected = candidates(sigma, minimum, sigma >= tau, contributors.at[i].set(True), i)
        return jax.nn.softmax(jnp.where(selected, scale * sigma, -jnp.inf))

    def first(rows: PyTree) -> PyTree:
        return {**rows, "moved": jnp.zeros_like(stacked_leaf(rows, last, "v"))}

    def updated(rows: PyTree, cohort: Cohort) -> PyTree:
        trained, served = (stacked_leaf(m, last, "v") for m in (cohort.uploads, cohort.payloads))
        before = rows["moved"].at[cohort.ids].get(mode="fill", fill_value=0.0)
        return {**cohort.uploads, "moved": before + (trained - served)}

    def observe(rows: PyTree) -> dict[str, jax.Array]:
        clients, key = jnp.arange(federation.clients), jax.random.key(0)
        recorded = {leaf: cosines(stacked_leaf(rows, last, leaf)) for leaf in ("u", "v")}
        recorded["moved"] = cosines(rows["moved"])
        recorded["weights"] = jax.vmap(weights, (None, 0, None))(rows, clients, key)
        return recorded

    matching = Matching(
        compared=last, weights=weights, first=first, updated=updated, observe=observe
    )
    penalty = Penalty(gradient=0.0, least=sparsity)
    return factor_mixing(net, training, federation, matching, penalty, is_mixed)


FACTORIZED_FL_MOVED = Method(
    factorized_fl_moved,
    title="Factorized-FL (moved)",
    paper="Jeong and Hwang 2022",
    variant_of=FACTORIZED_FL,
    diagnostics=diagnostics("factorized_fl_moved"),
    pictures=PICTURES,
)
