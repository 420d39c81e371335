"""Clustered-FL: splits clients with dissimilar updates into clusters, each with its own FedAvg.

Sattler et al., Clustered Federated Learning: Model-Agnostic Distributed Multi-Task Optimization
under Privacy Constraints, 2020. With Δ_k = w_k − w_c over the members of cluster c that
returned an update:

  split c in two by complete linkage on 1 − cos(Δ_j, Δ_k),
  if ‖mean_n Δ‖ < ε₁, max_k ‖Δ_k‖ > ε₂ and it has more than two members
  w_c ← Σ_k n_k w_k / Σ_k n_k, for each part over its own members, or for an unsplit c over all

Deviations: the authors' code also uses complete linkage; the paper minimises the largest cosine
between the parts, which single linkage does, and splits only if this cosine is below a bound. Means
are weighted by examples; the authors' are not, and their code splits no cluster in the first 20
rounds. There are at most `max_clusters` clusters. The part of the first member keeps the id of
the cluster and the other part gets the next free id, so ids stay valid after further splits. Absent
members keep the id of the cluster as well.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.initial_state import initial_variables
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Cohort, Federation, PyTree, State
from fedjax_pfl.core.diagnostics import Diagnostic, Picture, mean, of_array
from fedjax_pfl.core.errors import require_at_least


class Clusters(NamedTuple):
    """Server-side state: one global model for each cluster of clients.

    `State.rows` has the cluster of each client.
    """

    models: PyTree  # variables, leaves [max_clusters, ...]; only the first `used` exist
    used: jax.Array  # int32 [], number of clusters that exist


def bipartition(distance: jax.Array, members: jax.Array) -> jax.Array:
    """Splits the members of a cluster in two parts by complete linkage.

    Args:
      distance: Distances between all clients of a cohort, symmetric, [K, K].
      members: Bool [K], the clients to split; at least two.

    Returns:
      Bool [K], True for the members in the part that does not contain the first member.
    """
    ids = jnp.arange(members.shape[0])
    excluded = ~members[:, None] | ~members[None] | (ids[:, None] == ids[None])

    def merge(_: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Merges the two nearest parts in (distances [K, K], part id of each client [K])."""
        distance, part = carry
        i, j = jnp.unravel_index(jnp.argmin(distance), distance.shape)
        farther = jnp.maximum(distance[i], distance[j])
        distance = distance.at[i].set(farther).at[:, i].set(farther)
        distance = distance.at[j].set(jnp.inf).at[:, j].set(jnp.inf).at[i, i].set(jnp.inf)
        return distance, jnp.where(part == j, i, part)

    merges = jnp.maximum(jnp.sum(members) - 2, 0)
    _, part = jax.lax.fori_loop(0, merges, merge, (jnp.where(excluded, jnp.inf, distance), ids))
    return members & (part != part[jnp.argmax(members)])


def inner_products(deltas: PyTree) -> jax.Array:
    """Returns the inner products of K clients' updates, [K, K]. Leaves have shape [K, ...]."""
    flat = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(deltas)]
    return sum(jnp.matmul(leaf, leaf.T, precision="highest") for leaf in flat)  # type: ignore[return-value]


DIAGNOSTICS = {
    "clusters": Diagnostic(
        meaning="clusters that clients are in",
        value=of_array("cluster", lambda cluster: len(np.unique(cluster))),
        inactive=lambda value, observed: mean(value) == 1.0,
        warning="clients have not been split and there is {value:.0f} cluster, which is FedAvg; "
        "see clustered_fl.mean_below and clustered_fl.longest_above",
    ),
}
PICTURES = {"cluster": Picture("Clusters", "the cluster that each client is in")}


def clustered_fl(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    mean_below: float = 0.4,
    longest_above: float = 1.6,
    max_clusters: int = 8,
) -> Algorithm:
    """Creates Clustered-FL: clients with dissimilar updates are split into clusters.

    Each cluster runs its own FedAvg. The server stores `Clusters`; the rows are the cluster id of
    each client, int32 [N]. Clients store the same as FedAvg. A phase, a part of a run with one
    algorithm, starts from a global model, which becomes that of cluster 0, or from a state of
    Clustered-FL. A client that never takes part gets the model of cluster 0.

    Args:
      mean_below: ε₁, the norm of the mean update below which a cluster may split.
      longest_above: ε₂, the norm that the longest update must exceed for a split.
      max_clusters: Largest number of clusters; 1 is FedAvg.
    """
    require_at_least("clustered_fl.max_clusters", max_clusters, 1)
    base = fedavg(model, training, federation)

    def init(key: jax.Array, start: State | None = None) -> State:
        first = base.init(key, None)
        server = Clusters(trees.repeat(first.server, max_clusters), jnp.int32(1))
        rows = jnp.zeros(federation.clients, jnp.int32)
        if start is not None and trees.same_shapes((server, rows), (start.server, start.rows)):
            server, rows = start.server, start.rows
        elif start is not None:
            variables = initial_variables(model, federation, key, start)
            server = server._replace(models=trees.repeat(variables, max_clusters))
        return State(server, rows, first.clients)

    def send(state: State, ctx: ClientContext) -> PyTree:
        return trees.row(state.server.models, state.rows[ctx.i])

    def receive(state: State, cohort: Cohort) -> tuple[Clusters, jax.Array]:
        cluster = state.rows.at[cohort.ids].get(mode="fill", fill_value=-1)  # −1: absent
        deltas = jax.tree.map(jnp.subtract, cohort.uploads["params"], cohort.payloads["params"])
        gram = inner_products(deltas)
        length = jnp.sqrt(jnp.diagonal(gram))
        floor = jnp.maximum(length, 1e-12)
        distance = 1 - gram / floor[:, None] / floor[None]

        def mean_of(members: jax.Array, fallback: PyTree) -> PyTree:
            """Returns the mean upload of members, bool [K], or the fallback if there is none."""
            return cohort.mean(cohort.uploads, fallback, jnp.where(members, cohort.weights, 0.0))

        def update(c: jax.Array, carry: tuple[Clusters, jax.Array]) -> tuple[Clusters, jax.Array]:
            """Averages cluster c, and splits it if updates differ. Carry: (`Clusters`, rows)."""
            (models, used), rows = carry
            members = cluster == c
            old = trees.row(models, c)
            mean = mean_of(members, old)
            drift = jnp.sqrt(
                trees.squared_norm(jax.tree.map(jnp.subtract, mean["params"], old["params"]))
            )
            split = (
                (drift < mean_below)
                & (jnp.max(jnp.where(members, length, 0.0)) > longest_above)
                & (jnp.sum(members) > 2)
                & (used < max_clusters)
            )
            leaves_cluster = split & bipartition(distance, members)
            new_id = jnp.where(split, used, max_clusters)
            models = jax.tree.map(
                lambda old, first, other: old.at[c].set(first).at[new_id].set(other, mode="drop"),
                models,
                mean_of(members & ~leaves_cluster, old),
                mean_of(leaves_cluster, old),
            )
            leaving_ids = jnp.where(leaves_cluster, cohort.ids, federation.clients)
            rows = rows.at[leaving_ids].set(used, mode="drop")
            return Clusters(models, used + split.astype(jnp.int32)), rows

        return jax.lax.fori_loop(0, max_clusters, update, (state.server, state.rows))

    def personalize(state: State, client: PyTree, ctx: ClientContext) -> PyTree:
        return send(state, ctx)

    def observe(state: State) -> dict[str, jax.Array]:
        return {"cluster": state.rows}

    return base._replace(
        init=init, send=send, receive=receive, personalize=personalize, observe=observe
    )


CLUSTERED_FL = Method(
    clustered_fl,
    title="Clustered-FL",
    paper="Sattler et al. 2020",
    diagnostics=DIAGNOSTICS,
    pictures=PICTURES,
)
