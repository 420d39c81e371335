"""FedCAC: a client shares its critical parameters only with clients that have similar ones.

Wu et al., Bold but Cautious: Unlocking the Potential of Personalized Federated Learning through
Cautiously Aggressive Collaboration, 2023. θ̄_i are the downloaded parameters of client i and θ_i
the trained ones. M_i marks the share τ of each array's entries that has the largest Ω_i:

  θ_i ← SGD on f_i, from θ̄_i;   Ω_i = |(θ_i − θ̄_i) θ_i|
  O_ij = 1 − ‖M_i − M_j‖₁/(2n), with n entries in M_i:  the overlap of two clients
  C_i = {j ≠ i: O_ij ≥ mean O + (t/β) (max O − mean O)} ∪ {i}, in round t = 1, 2, ...
  θ ← Σ_j n_j θ_j / Σ_j n_j;   u_i ← mean_{j ∈ C_i} θ_j;   θ̄_i ← M_i u_i + (1 − M_i) θ

Deviations: means and maxima are over the clients that returned an update. Other clients keep M_i
and u_i, and get the new θ. The server computes M_i from θ̄_i and θ_i, so no mask is sent. Of equal
Ω the first entries are critical; the authors' code takes all that equal the smallest one, but none
with Ω = 0. BatchNorm statistics belong to θ.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Cohort, Federation, PyTree, State
from fedjax_pfl.core.errors import require, require_above


class Rows(NamedTuple):
    """Server-side state for each client, stacked over clients."""

    customized: PyTree  # u_i, like the parameters
    critical: PyTree  # M_i, bool, like the parameters; False before the client's first round


def critical_entries(old: jax.Array, new: jax.Array, share: Any) -> jax.Array:
    """Returns the mask of the entries of an array with the largest |(new − old) · new|.

    Args:
      old: Values before local training.
      new: Values after it.
      share: τ. The mask is True for ⌊share · size⌋ entries; of equal values, for the first.
    """
    sensitivity = jnp.abs((new - old) * new).ravel()
    order = jnp.argsort(-sensitivity, stable=True)
    count = jnp.floor(jnp.float32(share) * order.size).astype(jnp.int32)
    is_critical = jnp.arange(order.size) < count
    return jnp.zeros(order.size, bool).at[order].set(is_critical).reshape(new.shape)


def collaborators(critical: PyTree, arrived: jax.Array, progress: jax.Array) -> jax.Array:
    """Returns bool [K, K]: whether client i averages its critical parameters with client j.

    The threshold is exact for equal overlaps: (max − O_ij) ≤ (1 − t/β) (max − mean), in entries.

    Args:
      critical: M_i of each client, leaves [K, ...]; all have the same number of entries.
      arrived: Bool [K], the clients that returned an update.
      progress: t/β.
    """
    flat = [
        leaf.reshape(leaf.shape[0], -1).astype(jnp.float32) for leaf in jax.tree.leaves(critical)
    ]
    counts = [jnp.matmul(m, m.T, precision="highest").astype(jnp.int32) for m in flat]
    common = jnp.sum(jnp.stack(counts), 0)  # n O_ij
    diagonal = jnp.eye(len(arrived), dtype=bool)
    pairs = arrived[:, None] & arrived[None] & ~diagonal
    gap = jnp.where(pairs, jnp.max(jnp.where(pairs, common, 0)) - common, 0).astype(jnp.float32)
    mean_gap = jnp.sum(gap) / jnp.maximum(jnp.sum(pairs.astype(jnp.float32)), 1.0)
    return diagonal | (pairs & (gap <= (1 - progress) * mean_gap))


def fedcac(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    critical_share: float = 0.5,
    alone_after: int = 100,
    first_round: int = 0,
) -> Algorithm:
    """Creates FedCAC: critical parameters are averaged over clients with similar ones.

    The server stores the global variables, and `Rows` for each client. Clients store the same as
    FedAvg, and download and upload one model. A phase, a part of a run with one algorithm, starts
    from a global model or a state of FedCAC.

    Args:
      critical_share: τ, the share of the entries of each array that are critical; 0 is FedAvg.
      alone_after: β, the last round in which clients collaborate: the pairs of largest overlap.
        Pairs of equal overlap, such as the only pair, collaborate in every round.
      first_round: First round of the phase; `run` passes it.
    """
    require(
        (critical_share >= 0) & (critical_share <= 1),
        f"fedcac.critical_share is {critical_share}; it is a share, 0 to 1",
    )
    require_above("fedcac.alone_after", alone_after, 0)
    base = fedavg(model, training, federation)

    def init(key: jax.Array, start: State | None = None) -> State:
        state = base.init(key, start)
        params = state.server["params"]
        masks = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, bool), params)
        rows = trees.repeat(Rows(params, masks), federation.clients)
        if start is not None and trees.same_shapes(rows, start.rows):
            rows = start.rows
        return state._replace(rows=rows)

    def send(state: State, ctx: ClientContext) -> PyTree:
        customized, critical = (trees.row(part, ctx.i) for part in state.rows)
        params = jax.tree.map(jnp.where, critical, customized, state.server["params"])
        return {**state.server, "params": params}

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, Rows]:
        new = cohort.present(cohort.uploads["params"])
        old = cohort.present(cohort.payloads["params"])
        critical = jax.tree.map(
            jax.vmap(lambda old, new: critical_entries(old, new, critical_share)), old, new
        )
        progress = (jnp.float32(cohort.t) - first_round + 1) / alone_after
        weights = collaborators(critical, cohort.arrived, progress).astype(jnp.float32)
        weights = weights / jnp.sum(weights, 1, keepdims=True)
        customized = trees.combine(weights, new)
        rows = Rows(
            cohort.put(state.rows.customized, customized),
            cohort.put(state.rows.critical, critical),
        )
        return cohort.mean(cohort.uploads, state.server), rows

    def personalize(state: State, client: PyTree, ctx: ClientContext) -> PyTree:
        return send(state, ctx)

    return base._replace(
        init=init,
        send=send,
        receive=receive,
        personalize=personalize,
        offload=("customized", "critical"),
    )


FEDCAC = Method(fedcac, title="FedCAC", paper="Wu et al. 2023")
