"""Batches of a client's examples, in random order or in stored order."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core.examples import Batch, ClientData, Split, take_repeating

PyTree = Any
_ALWAYS_PADDED = 1024


def random_order(key: jax.Array, longest: int, count: jax.Array) -> jax.Array:
    """Returns a random permutation of 0..count-1, then count..longest-1 in order: int32 [longest].

    The permutation does not depend on `longest`.
    """
    return jnp.argsort(_random_ranks(key, longest, count))


def _random_ranks(key: jax.Array, longest: int, count: jax.Array) -> jax.Array:
    """Returns random sort keys [longest]; those from index `count` on are the highest."""
    return jnp.where(jnp.arange(longest) < count, jax.random.uniform(key, (longest,)), 2.0)


def sample_positions(
    key: jax.Array, longest: int, count: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """Samples `size` of the numbers 0..count-1 without replacement.

    They are the start of `random_order`. Returns int32 positions [size] and a bool mask [size],
    False for padding if count < size.
    """
    _, first = jax.lax.top_k(-_random_ranks(key, longest, count), min(size, longest))
    return jnp.pad(first, (0, max(size - longest, 0))), jnp.arange(size) < count


def padded_size(batch_size: int, longest: int) -> int:
    """Returns the rows that a batch is padded to: min(batch_size, max(longest, 1024)).

    A batch never has more examples than the largest client, `longest`. Batches of up to 1,024
    examples are not reduced: random numbers of the batch's shape then do not depend on how many
    examples other clients have.
    """
    return min(batch_size, max(longest, _ALWAYS_PADDED))


def local_steps(training: Any, examples: Any, size: int) -> Any:
    """Returns the number of gradient steps of one local training.

    `training` is a `local_training.Training`; `examples` are numbers of examples, of any shape.
    `size` is the batch size, or another one that gives the same number of steps.
    """
    if training.steps is not None:
        # A NumPy integer if `examples` is one: a loop of so many steps has derivatives.
        return training.steps * (examples > 0).astype(np.int32)
    per_epoch = -(-examples // size)
    if training.drop_last:
        per_epoch = jnp.minimum(per_epoch, jnp.maximum(examples // size, 1))
    return training.epochs * per_epoch


def sample_batch(data: ClientData, split: Split, size: int, key: jax.Array) -> Batch:
    """Samples `size` examples of a split without replacement, padded to `padded_size` rows.

    A split with fewer examples gives all of them.
    """
    longest = split.rows.shape[0]
    positions, mask = sample_positions(key, longest, split.size, padded_size(size, longest))
    return take_repeating(data, split.rows[positions], mask)


def sum_batches(
    f: Callable[[Batch], PyTree], data: ClientData, split: Split, batch_size: int = 128
) -> PyTree:
    """Computes the sum of f(batch), a tree of arrays, over consecutive batches of a split.

    The last batch is padded; `f` must ignore padding, where `batch.mask` is False.
    """
    longest = split.rows.shape[0]
    size = min(batch_size, longest)
    padded_rows = jnp.pad(split.rows, (0, -longest % size))

    def batch(s: Any) -> Batch:
        rows = jax.lax.dynamic_slice(padded_rows, (s * size,), (size,))
        return take_repeating(data, rows, s * size + jnp.arange(size) < split.size)

    def step(s: jax.Array, sums: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, sums, f(batch(s)))

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(f, batch(0)))
    return jax.lax.fori_loop(0, -(-split.size // size), step, zeros)
