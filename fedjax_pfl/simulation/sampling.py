"""Sampling of the clients of a round, at random or in turn.

random   In each round K of the N active clients, without replacement.
cyclic   The active clients in an order that is drawn once. Round t takes positions t K to
         t K + K - 1, modulo N. A client at position p takes part in the rounds ⌊(p + m N) / K⌋ for
         m = 0, 1, ...; two of them are at least ⌊N / K⌋ apart, as ⌊a + N / K⌋ ≥ ⌊a⌋ + ⌊N / K⌋. In
         T rounds it takes part at most ⌈T K / N⌉ times.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core.randomness import SAMPLE, stage_key
from fedjax_pfl.simulation.records import RoundSpec, Slots

SAMPLINGS = ("random", "cyclic")


def _sample(spec: RoundSpec, key: jax.Array, t: Any) -> jax.Array:
    """Returns the sorted ids of the cohort of round `t`, int32 [spec.cohort]."""
    candidates = np.flatnonzero(spec.federation.active).astype(np.int32)
    if spec.cohort == len(candidates):
        return jnp.asarray(candidates)
    if spec.sampling == "cyclic":
        return jnp.sort(_in_turn(candidates, spec.cohort, key, t))
    priorities = jax.random.uniform(stage_key(key, SAMPLE, t), (len(candidates),))
    # Of equal priorities the first one is taken, as by a stable sort.
    _, lowest = jax.lax.top_k(-priorities, spec.cohort)
    return jnp.sort(jnp.asarray(candidates)[lowest])


def sample_slots(spec: RoundSpec, key: jax.Array, t: Any) -> tuple[Slots, ...]:
    """Returns the slots of each group in round `t`."""
    ids = _sample(spec, key, t)
    return tuple(_slots_of_group(spec, g, ids) for g in range(len(spec.members)))


def _slots_of_group(spec: RoundSpec, g: int, ids: jax.Array) -> Slots:
    """Returns the clients of group `g` in a cohort with these ids, in a fixed number of slots."""
    is_member = spec.membership[g][spec.federation.active]
    if is_member.all():
        return Slots(ids, jnp.ones(spec.cohort, bool))
    in_group = jnp.asarray(spec.membership[g])[ids]
    # At least one slot, also if no active client is in the group: arrays need a length.
    count = max(1, min(spec.cohort, int(np.sum(is_member))))
    order = jnp.argsort(~in_group, stable=True)[:count]
    return Slots(ids[order], in_group[order])


def _in_turn(candidates: np.ndarray, cohort: int, key: jax.Array, t: Any) -> jax.Array:
    """Returns the clients of round `t` in cyclic order, int32 [cohort]."""
    count = len(candidates)
    # The positions repeat after this many rounds. A table, because t * cohort may exceed 32 bits.
    period = count // math.gcd(count, cohort)
    starts = (np.arange(period, dtype=np.int64) * cohort % count).astype(np.int32)
    order = jax.random.permutation(stage_key(key, SAMPLE), candidates)
    return order[(jnp.asarray(starts)[t % period] + np.arange(cohort, dtype=np.int32)) % count]
