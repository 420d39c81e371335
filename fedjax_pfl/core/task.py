"""What clients learn: losses and scores, given to an algorithm so that none names a loss."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

_CLOSED = -1e9  # a logit that no softmax sees, finite so that no gradient becomes NaN


class Task(NamedTuple):
    """Loss and score of each example; a higher score is better.

    loss, score: (outputs [B, C], y [B, ...], classes: bool [C] or None) -> [B]
    `classes` opens the outputs that this client uses, where alphabets differ in size.
    """

    loss: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]
    score: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]
    name: str  # of the score, as reports and metrics call it
    augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None  # (x, key) -> x, in training


def _open(outputs: jax.Array, classes: jax.Array | None) -> jax.Array:
    outputs = outputs.astype(jnp.float32)
    return outputs if classes is None else jnp.where(classes, outputs, _CLOSED)


def classification() -> Task:
    """Softmax cross-entropy and accuracy."""

    def loss(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(_open(outputs, classes), y)

    def score(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
        return (jnp.argmax(_open(outputs, classes), -1) == y).astype(jnp.float32)

    return Task(loss, score, "accuracy")


def regression() -> Task:
    """Half the squared error, summed over the targets; the score is its negative."""

    def loss(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
        del classes
        return 0.5 * jnp.sum(jnp.square(outputs.astype(jnp.float32) - y.astype(jnp.float32)), -1)

    return Task(loss, lambda outputs, y, classes: -loss(outputs, y, classes), "negative_loss")
