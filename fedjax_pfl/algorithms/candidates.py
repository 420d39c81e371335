"""For many clients: whose models each of them mixes, and who takes whose place."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.algorithms.matching import cosines
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Cohort, Federation, PyTree
from fedjax_pfl.core.errors import need

_NOT_MET = -2.0  # less than any cosine


class Candidates(NamedTuple):
    """Of each client M, in places that keep their weights; rows of the server."""

    ids: jax.Array  # int32 [N, M], the client itself among them
    likeness: jax.Array  # [N, M]: cosine of their changes in the last round that both were in


Known = Candidates | tuple[()]  # nothing where each client mixes the models of all


class Near(NamedTuple):
    """What one client mixes: of M clients, or of all."""

    theta: PyTree  # their models, [M, ...]
    own: jax.Array  # int32: its place among them
    allowed: jax.Array  # bool [M]: who may weigh something


def check(n: int, m: int | None) -> None:
    """UsageError where there cannot be so many candidates."""
    fits = m is None or 2 <= m <= n
    need(fits, f"pfedla.candidates is {m}; choose 2 to {n}, the client itself included")


def near(known: Known, theta: PyTree, i: Any, federation: Federation) -> Near:
    """Novel clients weigh nothing for others, and something for themselves."""
    active = jnp.asarray(federation.active)
    if not isinstance(known, Candidates):
        return Near(theta, i, active | (jnp.arange(len(active)) == i))
    ids = known.ids[i]
    return Near(trees.row(theta, ids), jnp.argmax(ids == i), active[ids] | (ids == i))


def first(federation: Federation, most: int | None, key: jax.Array) -> Known:
    """Each client's own and others at random, by id: each is a candidate of as many, if active.

    Those that are not active come in where there are too few others.
    """
    if most is None:
        return ()
    n, taking_part = federation.clients, np.flatnonzero(federation.active)
    a = len(taking_part)
    others = jnp.asarray(np.flatnonzero(~federation.active), jnp.int32)
    order = jnp.concatenate(
        [jax.random.permutation(key, jnp.asarray(taking_part, jnp.int32)), others]
    )
    k = jnp.arange(most)[None]
    place = jnp.zeros(n, jnp.int32).at[order].set(jnp.arange(n, dtype=jnp.int32))[:, None]
    # An active client is followed by the next ones of a circle, and then by those outside of it.
    inside = jnp.where(k < a, (place + k) % a, k)
    # One outside is followed by those in the circle, and then by the others outside.
    outside = jnp.where(k <= a, (place + k) % a, k - 1 + (k - 1 >= place).astype(k.dtype))
    outside = jnp.where(k == 0, place, outside)
    return Candidates(
        jnp.sort(order[jnp.where(place < a, inside, outside)], axis=1),
        jnp.full((n, most), _NOT_MET),
    )


def after(known: Known, cohort: Cohort, federation: Federation) -> Known:
    """Those of a cohort after its round, [K, M].

    Of a client's candidates and of all that took part in the round, it keeps those whose changes
    are most like its own, by what was last seen of them. Who comes in takes the place, and the
    weights, of one who goes.
    """
    if not isinstance(known, Candidates):
        return ()
    candidates, active = known, jnp.asarray(federation.active)
    moved = cohort.present(trees.change(cohort.payloads["params"], cohort.uploads["params"]))
    flat = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(moved)]
    like = cosines(jnp.concatenate(flat, 1))
    may_come = cohort.arrived & active.at[cohort.ids].get(mode="fill", fill_value=False)

    def one(i: jax.Array, cosine: jax.Array) -> Candidates:
        ids, likeness = trees.row(candidates, i)
        met = (ids[:, None] == cohort.ids[None]) & cohort.arrived[None]
        likeness = jnp.where(met.any(1), jnp.max(jnp.where(met, cosine, -jnp.inf), 1), likeness)
        new = jnp.where(may_come & ~met.any(0) & (cohort.ids != i), cosine, -jnp.inf)
        staying = jnp.where(ids == i, jnp.inf, likeness)
        m = ids.shape[0]
        _, best = jax.lax.top_k(jnp.concatenate([staying, new]), m)  # of two alike the older
        goes = jnp.ones(m, bool).at[best].set(False, mode="drop")
        by_likeness = jnp.argsort(-new, stable=True)
        comes = by_likeness[jnp.cumsum(goes) - 1]
        return Candidates(
            jnp.where(goes, cohort.ids[comes], ids), jnp.where(goes, new[comes], likeness)
        )

    return jax.vmap(one)(cohort.ids, like)


def observed(known: Known) -> dict[str, jax.Array]:
    """Whose the places of α are."""
    return {"candidates": known.ids} if isinstance(known, Candidates) else {}
