"""pFedLA with many clients: a table of the clients whose models each client mixes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.algorithms.shared.matching import cosines
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Cohort, Federation, PyTree
from fedjax_pfl.core.errors import require

_NEVER_COMPARED = -2.0  # less than any cosine


class CandidateTable(NamedTuple):
    """For each client, the M clients whose models it mixes. The server stores it.

    Each column has its own mixing weight, which stays when another client takes over the column.
    """

    client_ids: jax.Array  # int32 [N, M]; includes the client itself
    similarity: jax.Array  # [N, M]; cosine of both updates in their last common round; else -2


class MixingInputs(NamedTuple):
    """The stored models that one client mixes."""

    models: PyTree  # parameters of N models, or of M candidates: [N or M, ...]
    own_column: jax.Array  # int32; index of the client's own model on axis 0
    allowed: jax.Array  # bool [N or M]; models that may get a nonzero weight


def check(clients: int, candidates: int | None) -> None:
    """Raises UsageError unless `candidates` is None (mix all models) or from 2 to `clients`."""
    require(
        candidates is None or 2 <= candidates <= clients,
        f"pfedla.candidates is {candidates}; choose 2 to {clients}, the client itself included",
    )


def select_models(
    table: CandidateTable | tuple[()], models: PyTree, client_id: Any, federation: Federation
) -> MixingInputs:
    """Returns the models that a client mixes and a mask of those that may get a nonzero weight.

    Held-out clients never contribute to other clients' models.

    Args:
      table: Candidates of all clients, or () if every client mixes all models.
      models: Stored parameters of all clients, leaves of shape [N, ...].
      client_id: The client to build a model for.
      federation: Tells which clients take part in training.
    """
    contributors = federation.contributors(client_id)
    if not isinstance(table, CandidateTable):
        is_own = jnp.arange(federation.clients) == client_id
        return MixingInputs(models, client_id, contributors | is_own)
    ids = table.client_ids[client_id]
    is_own = ids == client_id
    return MixingInputs(trees.row(models, ids), jnp.argmax(is_own), contributors[ids] | is_own)


def initial_table(
    federation: Federation, candidates: int | None, key: jax.Array
) -> CandidateTable | tuple[()]:
    """Samples the first candidates: each client's own id and others at random, sorted by id.

    Every active client is a candidate of the same number of clients. Held-out clients fill a row
    only if there are too few active ones. `candidates` is M; None means that every client mixes all
    models, and returns ().
    """
    if candidates is None:
        return ()
    n, active_ids = federation.clients, np.flatnonzero(federation.active)
    a = len(active_ids)
    held_out_ids = jnp.asarray(np.flatnonzero(~federation.active), jnp.int32)
    order = jnp.concatenate(
        [jax.random.permutation(key, jnp.asarray(active_ids, jnp.int32)), held_out_ids]
    )
    slot = jnp.arange(candidates)[None]
    place = jnp.zeros(n, jnp.int32).at[order].set(jnp.arange(n, dtype=jnp.int32))[:, None]
    # An active client takes the clients behind it on the circle of active clients, then held-out
    # ones. A held-out client takes itself, then the circle, then the other held-out clients.
    of_active = jnp.where(slot < a, (place + slot) % a, slot)
    other_held_out = slot - 1 + (slot - 1 >= place).astype(slot.dtype)
    of_held_out = jnp.where(slot <= a, (place + slot) % a, other_held_out)
    of_held_out = jnp.where(slot == 0, place, of_held_out)
    return CandidateTable(
        client_ids=jnp.sort(order[jnp.where(place < a, of_active, of_held_out)], axis=1),
        similarity=jnp.full((n, candidates), _NEVER_COMPARED),
    )


def updated_rows(
    table: CandidateTable | tuple[()], cohort: Cohort, federation: Federation
) -> CandidateTable | tuple[()]:
    """Updates the candidates of the sampled clients. Returns their rows, [K, M], or () for ().

    Among its candidates and all active clients of the round, a client keeps those whose updates
    are most similar to its own, by the latest comparison. A new candidate takes over the slot, and
    the weights, of the candidate that it replaces.
    """
    if not isinstance(table, CandidateTable):
        return ()
    active = jnp.asarray(federation.active)
    updates = cohort.present(trees.change(cohort.payloads["params"], cohort.uploads["params"]))
    flat = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(updates)]
    all_cosines = cosines(jnp.concatenate(flat, 1))
    eligible = cohort.arrived & active.at[cohort.ids].get(mode="fill", fill_value=False)

    def updated_row(i: jax.Array, cosine: jax.Array) -> CandidateTable:
        """Returns the row of client i, from its cosines [K] with the cohort."""
        ids, similarity = trees.row(table, i)
        is_sampled = (ids[:, None] == cohort.ids[None]) & cohort.arrived[None]
        compared = jnp.max(jnp.where(is_sampled, cosine, -jnp.inf), 1)
        similarity = jnp.where(is_sampled.any(1), compared, similarity)
        newcomers = jnp.where(eligible & ~is_sampled.any(0) & (cohort.ids != i), cosine, -jnp.inf)
        current = jnp.where(ids == i, jnp.inf, similarity)
        m = ids.shape[0]
        _, best = jax.lax.top_k(jnp.concatenate([current, newcomers]), m)  # a tie keeps the old one
        replaced = jnp.ones(m, bool).at[best].set(False, mode="drop")
        by_similarity = jnp.argsort(-newcomers, stable=True)
        replacement = by_similarity[jnp.cumsum(replaced) - 1]
        return CandidateTable(
            client_ids=jnp.where(replaced, cohort.ids[replacement], ids),
            similarity=jnp.where(replaced, newcomers[replacement], similarity),
        )

    return jax.vmap(updated_row)(cohort.ids, all_cosines)


def diagnostics(table: CandidateTable | tuple[()]) -> dict[str, jax.Array]:
    """Returns `candidates`, the client id behind each column of alpha, [N, M]; {} for ()."""
    return {"candidates": table.client_ids} if isinstance(table, CandidateTable) else {}
