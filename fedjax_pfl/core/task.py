"""What clients learn: losses and metrics, given to an algorithm so that none names them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

_CLOSED = -1e9  # a logit that no softmax sees, finite so that no gradient becomes NaN


class Metric(NamedTuple):
    """A number by which a model is judged on a client's examples.

    Its state is a sum over these examples, which begins at zero: `update` gives what each example
    of a batch adds, on the device, and `finish` makes the number of the sums, on the host. So a
    mean has a state of one number, and a curve's area a histogram.

    update: (outputs [B, C], y [B, ...], classes: bool [C] or None) -> a tree of [B, ...]
    finish: (state of [N, ...], examples [N]), in float64 -> [N]
    """

    name: str  # as files and reports call it: letters, digits and _
    update: Callable[[jax.Array, jax.Array, jax.Array | None], Any]
    finish: Callable[[Any, np.ndarray], np.ndarray]
    unit: str  # "%", of shares, which reports multiply by a hundred, or nothing
    higher_is_better: bool


class Task(NamedTuple):
    """Loss of each example, and the metrics; a run's best round is best by the first of them.

    loss: (outputs [B, C], y [B, ...], classes: bool [C] or None) -> [B]
    `classes` opens the outputs that this client uses, where alphabets differ in size.
    """

    loss: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]
    metrics: tuple[Metric, ...]
    has_classes: bool  # outputs are logits of classes
    augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None  # (x, key) -> x, in training


def _open(outputs: jax.Array, classes: jax.Array | None) -> jax.Array:
    outputs = outputs.astype(jnp.float32)
    return outputs if classes is None else jnp.where(classes, outputs, _CLOSED)


def _cross_entropy(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(_open(outputs, classes), y)


def _is_right(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
    return (jnp.argmax(_open(outputs, classes), -1) == y).astype(jnp.float32)


def _squared_error(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
    """Mean over the targets of an example."""
    del classes
    return jnp.mean(jnp.square(outputs.astype(jnp.float32) - y.astype(jnp.float32)), -1)


def _mean(total: np.ndarray, examples: np.ndarray) -> np.ndarray:
    return total / examples


def _root(total: np.ndarray, examples: np.ndarray) -> np.ndarray:
    return np.sqrt(total / examples)


ACCURACY = Metric("accuracy", _is_right, _mean, "%", higher_is_better=True)
SQUARED_ERROR = Metric("squared_error", _squared_error, _mean, "", higher_is_better=False)
# Of a client, in the targets' own unit; a mean over clients is not the root of their mean.
RMSE = Metric("rmse", _squared_error, _root, "", higher_is_better=False)
# By name, as a run directory has them.
METRICS = {metric.name: metric for metric in (ACCURACY, SQUARED_ERROR, RMSE)}


def classification() -> Task:
    """Softmax cross-entropy and accuracy."""
    return Task(_cross_entropy, (ACCURACY,), has_classes=True)


def regression() -> Task:
    """The squared error, mean over an example's targets, as loss and as metric; and its root."""
    return Task(_squared_error, (SQUARED_ERROR, RMSE), has_classes=False)
