"""Factorized-FL: kernels in factors, of which similar clients mix some.

Jeong and Hwang, Factorized-FL: Personalized Federated Learning with Parameter Factorization &
Similarity Matching, 2022. Every kernel but the head's is W = π(u vᵀ + μ), (1) to (3). With v* that
of the last layer before the head, for client k and all stored models i, from one snapshot:

  σ_i = cos(v*_k, v*_i), σ_k = 1          compare="v"                 (4)
  candidates: σ_i ≥ τ, and in any case the `minimum` most similar
  ω_i = exp(ε σ_i) / Σ exp(ε σ_j) over the candidates only             (5)
  u_k ← Σ_i ω_i u_i                     alpha, share="u"
  (u_k, v_k, μ_k) ← Σ_i ω_i (u_i, v_i, μ_i)      beta, share="all"
  local training on f + λ ‖μ‖₁                                         (6)

Entries of μ under λ are pruned for evaluation, and where μ travels they are not billed, in either
direction. The head is mixed with the rest; BatchNorm's statistics, and in alpha all but u and the
head, stay with the client. Of v* alpha uploads the one that the server needs, and gets none back.

What is changed so that the mechanism acts, each with the setting that restores the paper's form:

  u vᵀ starts as the best of its rank of the plain network's kernel and μ as the rest, in place of
  u and v from Xavier's distribution and μ = 0                                  (start="factors")
  σ is of d_k = Σ_t (v*_k trained − v*_k served), what training at client k has moved v* by, and
  σ_k = max_{i≠k} σ_i; v* itself hardly leaves its common start at a small rate and all of it at a
  large one, so that one τ and ε would not do for both                             (compare="v")
  the L1 term has a λ of its own, 0 where nothing is said: at the λ that prunes its gradient eats
  up μ within a run                                                                (penalty=λ)

Deviations: (5) has a plain sum in place of Σ ω_i u_i, and leaves open whether a score under τ is 0
or left out; here it is left out. The head is mixed too, as in the authors' code, where the L1 term
has no gradient. What is not billed does not travel, so that entries that move less than λ in a
round start over; pruned="evaluation" bills as published, and they travel. Clients that were not
sampled are mixed as they last uploaded; random and worst peers are weighed by ω as well.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.algorithms import common
from fedjax_pfl.algorithms.matching import RULES, Signatures, candidates
from fedjax_pfl.algorithms.pruning import bytes_used, prune, share_pruned, with_l1
from fedjax_pfl.algorithms.split_model import Client
from fedjax_pfl.core import far, local_training, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    Cohort,
    Federation,
    PyTree,
    State,
    Traffic,
    Trained,
    Visit,
)
from fedjax_pfl.core.errors import at_least, need, one_of
from fedjax_pfl.core.task import Task
from fedjax_pfl.networks.factorized import LAYOUTS, STARTS, Factorized


def factorized_fl(
    model: Any,
    task: Task,
    training: local_training.Training,
    federation: Federation,
    *,
    share: str = "all",
    tau: float = 0.0,
    scale: float = 1.0,
    minimum: int = 1,
    matching: str = "similar",
    peers: int = 3,
    compare: str = "moved",
    penalty: float = 0.0,
    sparsity: float = 5e-4,
    pruned: str = "travel",
    rank: int = 1,
    layout: str = "kernel",
    bias: bool = True,
    start: str = "plain",
) -> Algorithm:
    """Rows: what was uploaded, [N, ...]. Clients: `Client`.

    Args:
      share: what is mixed beside the head: all (beta), or u (alpha).
      tau: τ, the least similarity of a candidate.
      scale: ε; the larger, the more a similar model weighs.
      minimum: the least number of candidates, the client itself included.
      matching: similar; random or worst, as controls; or none, for the mean weighted by examples.
      peers: how many others are mixed in where matching is random or worst.
      compare: what cosines are of: how training has moved v* (moved), or v* itself (v).
      penalty: λ, of the gradient of the penalty on μ.
      sparsity: entries of μ that are smaller are pruned; λ in the paper as well.
      pruned: when that is: travel, before they travel; or evaluation, and they travel unbilled.
      rank: of u vᵀ, which with μ makes a kernel.
      layout: how a convolution's kernel becomes a matrix: kernel, mixed or oihw.
      bias: whether there is a μ.
      start: from the plain network's kernels (plain), or u and v drawn and μ zero (factors).
    """
    one_of("factorized_fl.share", share, ("all", "u"))
    one_of("factorized_fl.matching", matching, RULES)
    one_of("factorized_fl.compare", compare, ("moved", "v"))
    one_of("factorized_fl.pruned", pruned, ("travel", "evaluation"))
    one_of("factorized_fl.layout", layout, LAYOUTS)
    one_of("factorized_fl.start", start, STARTS)
    at_least("factorized_fl.penalty", penalty, 0)
    at_least("factorized_fl.sparsity", sparsity, 0)
    at_least("factorized_fl.rank", rank, 1)
    members, control = int(np.sum(federation.active)), matching in ("random", "worst")
    choices = f"it counts the client itself, choose 1 to {members}"
    need(1 <= minimum <= members, f"factorized_fl.minimum is {minimum}; {choices}")
    fits = not control or 1 <= peers < max(members, 2)
    need(fits, f"factorized_fl.peers is {peers}; choose 1 to {members - 1}")
    shape, dtype = federation.input_shape, federation.input_dtype
    net = Factorized(model, shape, rank, layout, bias, start, input_dtype=dtype)
    need(net.factorized, "factorized_fl leaves the last layer whole, and this network has no other")
    n, last, active = federation.clients, net.factorized[-1], jnp.asarray(federation.active)
    counts = jnp.asarray(federation.counts, jnp.float32)
    signatures = Signatures(last, compare == "moved" and matching != "none")

    def is_star(layer: str, leaf: str) -> bool:
        return (layer, leaf) == (last, "v")

    def is_mixed(layer: str, leaf: str) -> bool:
        return share == "all" or leaf == "u" or layer == net.head

    def travels(layer: str, leaf: str) -> bool:
        return is_mixed(layer, leaf) or is_star(layer, leaf)

    def sent(params: PyTree) -> PyTree:
        return prune(params, sparsity) if pruned == "travel" else params

    def weights(rows: PyTree, i: Any, key: jax.Array) -> jax.Array:
        """ω of client i: [N]; a novel client weighs something for itself only."""
        allowed = active.at[i].set(True)
        if matching == "none":
            return jnp.where(allowed, counts, 0.0) / jnp.sum(jnp.where(allowed, counts, 0.0))
        sigma = signatures.likeness(rows, i, active.at[i].set(False))
        chosen = candidates(sigma, minimum, sigma >= tau, allowed, i)
        if control:
            order = -sigma if matching == "worst" else jax.random.uniform(key, sigma.shape)
            chosen = candidates(order, peers + 1, jnp.zeros_like(allowed), allowed, i)
        return jax.nn.softmax(jnp.where(chosen, scale * sigma, -jnp.inf))

    def init(key: jax.Array, start: State | None = None) -> State:
        params, rest = local_training.split_variables(common.initial(net, federation, key, None))
        uploaded, own = trees.divide({"params": params}, travels)
        rows = signatures.first(trees.repeat(uploaded, n))
        momentum = common.kept(training, params, federation)
        stays = Client(trees.repeat({**own, **rest}, n), momentum)
        if start is None:
            return State((), rows, stays)
        kept = start.clients.own if isinstance(start.clients, Client) else None
        same = trees.alike((start.rows, kept), (rows, stays.own))
        need(same, "factorized_fl starts from its own factors, of the same settings; put it first")
        return State((), start.rows, Client(kept, momentum))

    def send(state: State, visit: Visit) -> PyTree:
        omega = weights(state.rows, visit.i, visit.key)
        stored = {"params": state.rows["params"]}
        mixed = far.mixed(stored, omega)
        if share == "all":
            return {"params": sent(mixed["params"])}
        own = trees.divide(trees.row(stored, visit.i), is_star)[0]
        return trees.join(trees.divide(mixed, is_mixed)[0], own)

    def train(payload: PyTree, client: Client, visit: Visit) -> Trained:
        params, rest = local_training.split_variables(trees.join(payload, client.own))
        gradient = with_l1(local_training.gradient(net, task, visit.data), penalty)
        params, rest, momentum, metrics = local_training.fit(
            training, gradient, params, rest, client.momentum, visit
        )
        trained = {"params": prune(params, sparsity), **rest}
        upload, _ = trees.divide({"params": sent(params)}, travels)
        own = {**trees.divide({"params": params}, travels)[1], **rest}
        return Trained(upload, trained, Client(own, momentum), metrics)

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        return state.server, cohort.put(state.rows, signatures.after(state.rows, cohort))

    def personal(state: State, client: Client, visit: Visit) -> PyTree:
        variables = trees.join(send(state, visit), client.own)
        return {**variables, "params": prune(variables["params"], sparsity)}

    def traffic(payload: PyTree, upload: PyTree) -> Traffic:
        """What alpha gets back of v* is its own last upload, and free."""
        down = trees.divide(payload, is_mixed)[0]
        return Traffic(*(bytes_used(prune(tree, sparsity)) for tree in (down, upload)))

    def observe(state: State) -> dict[str, jax.Array]:
        found = signatures.observed(state.rows)
        if matching != "random":  # each round draws its own
            every, key = jnp.arange(n), jax.random.key(0)
            found["weights"] = jax.vmap(weights, (None, 0, None))(state.rows, every, key)
        if bias:
            found["zeros_in_mu"] = share_pruned((state.rows["params"], state.clients.own), sparsity)
        return found

    parts = (init, send, train, receive, personal, net.apply, traffic, observe)
    return Algorithm(*parts, far=("params",))
