"""Features of a client's examples, and their statistics by class."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.core import batches, offload
from fedjax_pfl.core.algorithm import PyTree
from fedjax_pfl.core.examples import Batch, ClientData, take
from fedjax_pfl.networks import features

_BATCH = 128  # examples whose features are computed at a time


def class_mask(batch: Batch, classes: int) -> jax.Array:
    """Returns bool [B, C], True at the class of each example; padding has no class."""
    return (batch.y[:, None] == jnp.arange(classes)[None]) & batch.mask[:, None]


def class_counts(data: ClientData, classes: int) -> jax.Array:
    """Returns the number of a client's training examples of each class, float32 [classes].

    Counts the labels after the client's label map, on the client. `Federation.class_counts` counts
    stored labels of all clients and is unknown to the server of a deployment.
    """

    def batch_counts(batch: Batch) -> jax.Array:
        return jnp.sum(class_mask(batch, classes), 0).astype(jnp.float32)

    return batches.sum_batches(batch_counts, data, data.train)


def example_features(
    network: Any, variables: PyTree, data: ClientData
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the d features of each training example of a client, in evaluation mode.

    Args:
      network: The plain network.
      variables: Its variables.
      data: The client's examples.

    Returns:
      Features [n, d], zeros for padding, labels [n] and a mask, bool [n], False for padding; n is
      at least the number of examples of the client that has most.
    """
    rows, size = data.train
    batch_size = min(_BATCH, rows.shape[0])
    rows = jnp.pad(rows, (0, -rows.shape[0] % batch_size))
    is_example = jnp.arange(rows.shape[0]) < size

    def features_and_labels(batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        examples = take(data, *batch)
        return features.WithFeatures(network).apply(variables, examples.x)[1], examples.y

    chunks = rows.reshape(-1, batch_size), is_example.reshape(-1, batch_size)
    z, y = jax.lax.map(features_and_labels, chunks)
    z = z.reshape(-1, z.shape[-1])
    # The inputs of padding are zeros, where a network need not be finite.
    return jnp.where(is_example[:, None], z, jnp.zeros((), z.dtype)), y.reshape(-1), is_example


class ClassFeatures(NamedTuple):
    """Statistics of the d features z, the inputs of the head, of one client's training examples.

    They are at least float32, also for a network that computes in a narrower dtype.
    """

    counts: jax.Array  # [C], number of examples of each class
    means: jax.Array  # [C, d], mean of z over a class; 0 if it has no example
    mean_square: jax.Array  # [], mean of ‖z‖² over all examples


def class_features(
    network: Any, variables: PyTree, data: ClientData, classes: int
) -> ClassFeatures:
    """Computes statistics of the features of a client's training examples, in evaluation mode.

    Args:
      network: A network that returns (outputs, features); see `networks.features`.
      variables: Its variables.
      data: The client's examples.
      classes: Number of classes C.
    """

    def batch_sums(batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        # A narrow dtype, such as bfloat16, cannot count beyond 256.
        z = offload.widened(network.apply(variables, batch.x)[1])
        one_hot = class_mask(batch, classes).astype(z.dtype)
        sums = jnp.einsum("bc,bd->cd", one_hot, z, precision="highest")
        squares = jnp.sum(jnp.where(batch.mask, jnp.sum(jnp.square(z), -1), 0.0))
        return jnp.sum(one_hot, 0), sums, squares

    counts, sums, squares = batches.sum_batches(batch_sums, data, data.train)
    return ClassFeatures(
        counts=counts,
        means=sums / jnp.maximum(counts, 1.0)[:, None],
        mean_square=squares / jnp.maximum(jnp.sum(counts), 1.0),
    )
