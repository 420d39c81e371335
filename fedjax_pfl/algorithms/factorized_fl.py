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

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.algorithms import common
from fedjax_pfl.algorithms.matching import candidates, cosine
from fedjax_pfl.core import local_training, trees
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
from fedjax_pfl.core.errors import UsageError, need
from fedjax_pfl.core.examples import Batch, ClientData
from fedjax_pfl.core.task import Task
from fedjax_pfl.networks.factorized import (
    LAYOUTS,
    STARTS,
    Factorized,
    bytes_used,
    collect_mu,
    on_mu,
    prune,
)

COMPARED = ("moved", "v")
MATCHING = ("similar", "random", "worst", "none")


class Client(NamedTuple):
    """What stays with a client."""

    own: PyTree
    momentum: PyTree


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
    others = peers if matching in ("random", "worst") else 1
    _check(federation, minimum, others, sparsity=(sparsity, 0), penalty=(penalty, 0),
           rank=(rank, 1))  # fmt: skip
    for name, value, words in (
        ("share", share, ("all", "u")), ("pruned", pruned, ("travel", "evaluation")),
        ("matching", matching, MATCHING), ("layout", layout, LAYOUTS),
        ("compare", compare, COMPARED), ("start", start, STARTS),
    ):  # fmt: skip
        if value not in words:
            raise UsageError(f"factorized_fl.{name} is {value!r}; choose {', '.join(words)}")
    shape, dtype = federation.input_shape, federation.input_dtype
    net = Factorized(model, shape, rank, layout, bias, start, input_dtype=dtype)
    if not net.factorized:
        raise UsageError("factorized_fl leaves the last layer whole, and this network has no other")
    n, last, active = federation.clients, net.factorized[-1], jnp.asarray(federation.active)
    counts = jnp.asarray(federation.counts, jnp.float32)
    sent = partial(prune, least=sparsity) if pruned == "travel" else lambda params: params

    following = compare == "moved" and matching != "none"

    def is_star(layer: str, leaf: str) -> bool:
        return (layer, leaf) == (last, "v")

    def is_mixed(layer: str, leaf: str) -> bool:
        return share == "all" or leaf == "u" or layer == net.head

    def travels(layer: str, leaf: str) -> bool:
        return is_mixed(layer, leaf) or is_star(layer, leaf)

    def signature(tree: PyTree, leaf: str = "v") -> jax.Array:
        """[K, D] of K models, by default their v*."""
        layer = reduce(lambda part, word: part[word], last.split("/"), tree["params"])
        return layer[leaf].reshape(layer[leaf].shape[0], -1)

    def likeness(rows: PyTree, i: Any) -> jax.Array:
        """σ [N]; by what has moved, client i is as like itself as its best peer is."""
        if not following:
            return cosine(signature(rows), i)
        sigma = cosine(rows["moved"], i)
        best = jnp.max(jnp.where(active.at[i].set(False), sigma, -jnp.inf))
        return sigma.at[i].set(jnp.where(jnp.isfinite(best), best, 1.0))

    def weights(rows: PyTree, i: Any, key: jax.Array) -> jax.Array:
        """ω of client i: [N]; a novel client weighs something for itself only."""
        allowed = active.at[i].set(True)
        if matching == "none":
            return jnp.where(allowed, counts, 0.0) / jnp.sum(jnp.where(allowed, counts, 0.0))
        sigma = likeness(rows, i)
        if matching == "similar":
            chosen = candidates(sigma, minimum, sigma >= tau, allowed, i)
        else:
            order = -sigma if matching == "worst" else jax.random.uniform(key, sigma.shape)
            chosen = candidates(order, peers + 1, jnp.zeros_like(allowed), allowed, i)
        return jax.nn.softmax(jnp.where(chosen, scale * sigma, -jnp.inf))

    def init(key: jax.Array, start: State | None = None) -> State:
        params, rest = local_training.split_variables(common.initial(net, federation, key, None))
        uploaded, own = trees.divide({"params": params}, travels)
        momentum = common.kept(training, params, federation)
        home = Client(trees.repeat({**own, **rest}, n), momentum)
        rows = trees.repeat(uploaded, n)
        if following:
            rows["moved"] = jnp.zeros_like(signature(rows))
        fresh = State((), rows, home)
        if start is None:
            return fresh
        if not isinstance(start.clients, Client) or not trees.alike(
            (start.rows, start.clients.own), (fresh.rows, fresh.clients.own)
        ):
            raise UsageError(
                "factorized_fl starts from factors of the same settings, and the earlier phase has "
                "none; put it first"
            )
        return State((), start.rows, Client(start.clients.own, momentum))

    def send(state: State, visit: Visit) -> PyTree:
        omega = weights(state.rows, visit.i, visit.key)
        stored = {"params": state.rows["params"]}
        mixed = jax.tree.map(lambda x: jnp.tensordot(omega, x, 1, precision="highest"), stored)
        if share == "all":
            return {"params": sent(mixed["params"])}
        own = trees.divide(trees.row(stored, visit.i), is_star)[0]
        return trees.join(trees.divide(mixed, is_mixed)[0], own)

    def with_l1(data: ClientData) -> local_training.Gradient:
        """The gradient of loss + λ ‖μ‖₁; the loss that it reports is without the second."""
        plain = local_training.gradient(net, task, data)

        def gradient(params: PyTree, rest: PyTree, batch: Batch, key: jax.Array) -> Any:
            result, grads = plain(params, rest, batch, key)
            return result, on_mu(lambda g, mu: g + penalty * jnp.sign(mu), grads, params)

        return gradient

    def train(payload: PyTree, client: Client, visit: Visit) -> Trained:
        params, rest = local_training.split_variables(trees.join(payload, client.own))
        params, rest, momentum, metrics = local_training.fit(
            training, with_l1(visit.data), params, rest, client.momentum, visit
        )
        trained = {"params": prune(params, sparsity), **rest}
        upload, _ = trees.divide({"params": sent(params)}, travels)
        own = {**trees.divide({"params": params}, travels)[1], **rest}
        return Trained(upload, trained, Client(own, momentum), metrics)

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        rows = dict(cohort.uploads)
        if following:
            step = signature(cohort.uploads) - signature(cohort.payloads)
            before = state.rows["moved"].at[cohort.ids].get(mode="fill", fill_value=0.0)
            rows["moved"] = before + step
        return state.server, cohort.put(state.rows, rows)

    def personal(state: State, client: Client, visit: Visit) -> PyTree:
        variables = trees.join(send(state, visit), client.own)
        return {**variables, "params": prune(variables["params"], sparsity)}

    def traffic(payload: PyTree, upload: PyTree) -> Traffic:
        """What alpha gets back of v* is its own last upload, and free."""
        down = trees.divide(payload, is_mixed)[0]
        return Traffic(*(bytes_used(prune(tree, sparsity)) for tree in (down, upload)))

    def observe(state: State) -> dict[str, jax.Array]:
        every, found, key = jnp.arange(n), {}, jax.random.key(0)
        for leaf in ("u", "v"):
            found[leaf] = jax.vmap(partial(cosine, signature(state.rows, leaf)))(every)
        if following:
            found["moved"] = jax.vmap(partial(cosine, state.rows["moved"]))(every)
        if matching != "random":  # each round draws its own
            found["weights"] = jax.vmap(weights, (None, 0, None))(state.rows, every, key)
        if bias:
            mu = [
                leaf.reshape(n, -1)
                for leaf in collect_mu((state.rows["params"], state.clients.own))
            ]
            found["zeros_in_mu"] = jnp.mean(jnp.abs(jnp.concatenate(mu, 1)) < sparsity, 1)
        return found

    return Algorithm(init, send, train, receive, personal, net.apply, traffic, observe)


def _check(federation: Federation, minimum: int, peers: int, **least: Any) -> None:
    active = int(np.sum(federation.active))
    need(
        1 <= minimum <= active,
        f"factorized_fl.minimum is {minimum}; it counts the client itself, choose 1 to {active}",
    )
    most = max(active, 2) - 1
    need(1 <= peers <= most, f"factorized_fl.peers is {peers}; choose 1 to {active - 1}")
    for name, (value, bound) in least.items():
        need(value >= bound, f"factorized_fl.{name} is {value}; it must be at least {bound}")
