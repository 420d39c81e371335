"""Random keys as a function of (seed, stage, round, client)."""

from typing import Any

import jax

# Stages of a round. Numbers must not change: results of a seed depend on them.
INIT, SAMPLE, DROP, SEND, TRAIN, PERSONAL, RECEIVE, SPEED = range(8)


def stage_key(key: jax.Array, stage: int, t: Any = 0, i: Any = 0) -> jax.Array:
    """Returns a random key for one use of randomness, in round `t` for client `i`.

    `key` is the run's, made from its seed; `stage` is the use, such as INIT or TRAIN.
    """
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, stage), t), i)
