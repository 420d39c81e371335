"""Prototypes: the mean features of each class, which the server averages over clients.

A tree of prototypes is {"prototypes": float32 [C, d], "seen": bool [C], the classes that have one}.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.shared.class_features import ClassFeatures
from fedjax_pfl.core.algorithm import PyTree
from fedjax_pfl.core.task import Task


def no_prototypes(classes: int, d: int) -> PyTree:
    """Returns the server's prototypes before the first round."""
    return {"prototypes": jnp.zeros((classes, d)), "seen": jnp.zeros(classes, bool)}


def means_or_prototypes(statistics: ClassFeatures, prototypes: PyTree) -> jax.Array:
    """Returns the class means that a client uploads, [C, d], float32.

    For a class without examples it is the downloaded prototype, so compression and the limit of an
    update see no change there. `average_prototypes` gives it the weight 0.

    Args:
      statistics: Those of the client's examples.
      prototypes: A tree with the downloaded `prototypes` [C, d].
    """
    has_examples = statistics.counts[:, None] > 0
    return jnp.where(has_examples, statistics.means, prototypes["prototypes"])


def average_prototypes(old: PyTree, uploads: PyTree) -> PyTree:
    """Averages clients' prototypes, the mean features of each class, weighted by their examples.

    Returns {"prototypes": float32 [C, d], "seen": bool [C], the classes that have one}. A class
    without an example in any upload keeps its old prototype.

    Args:
      old: The server's prototypes, a tree like the result.
      uploads: Stacked uploads with `prototypes` [K, C, d] and `counts` [K, C], of examples; they
        are 0 for absent clients.
    """
    client_counts = uploads["counts"].astype(jnp.float32)
    counts = jnp.sum(client_counts, 0)
    sums = jnp.sum(client_counts[..., None] * uploads["prototypes"], 0)
    mean = sums / jnp.maximum(counts, 1.0)[:, None]
    new = jnp.where(counts[:, None] > 0, mean, old["prototypes"])
    return {"prototypes": new, "seen": old["seen"] | (counts > 0)}


def with_prototype_penalty(task: Task, prototypes: PyTree, penalty: Any) -> Task:
    """Adds to an example's loss the distance of its features to the prototype of its class.

    The distance is λ times the mean square over features; 0 if the class has no prototype.

    Args:
      task: Task of the plain network.
      prototypes: A tree with `prototypes` [C, d] and `seen`, bool [C], the classes that have one.
      penalty: λ, a scalar.

    Returns:
      The task with a loss for a network that returns (outputs, features [B, d]).
    """

    def loss(outputs: Any, y: jax.Array, classes: Any) -> jax.Array:
        logits, z = outputs
        distance = jnp.mean(jnp.square(z - prototypes["prototypes"][y]), -1)
        distance = jnp.where(prototypes["seen"][y], distance, 0.0)
        return task.loss(logits, y, classes) + penalty * distance

    return task._replace(loss=loss)
