"""Random keys: a function of (seed, stage, round, client) and of nothing else."""

from typing import Any

import jax

# Stages of `stage_key`; a number, once given, stays: it is part of what a seed means.
INIT, SAMPLE, DROP, SEND, TRAIN, PERSONAL = range(6)


def stage_key(key: jax.Array, stage: int, t: Any = 0, i: Any = 0) -> jax.Array:
    """The key of one stage, round and client."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, stage), t), i)
