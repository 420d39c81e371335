"""The numbers by which models are judged: each a sum over examples, so that batches may be padded.

What a number needs of a batch is summed on the device, what it comes to is worked out on the host.
A number that a client's examples do not define, such as the area under a curve where they are all
of one class, is NaN for that client, and means leave it out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

_CLOSED = -1e9  # a logit that no softmax sees, finite so that no gradient becomes NaN
BINS = 512  # of the scores behind an area under the curve


class Metric(NamedTuple):
    """A number by which a model is judged on a client's examples.

    Its state is a sum over these examples, which begins at zero: `update` gives what each example
    of a batch adds, on the device, and `finish` makes the number of the sums, on the host. So a
    mean has a state of one number, and a curve's area a histogram.

    update: (outputs [B, ...], y [B, ...], classes: bool [C] or None) -> a tree of [B, ...]
    finish: (state of [N, ...], examples [N]), in float64 -> [N]
    """

    name: str  # as files and reports call it: letters, digits and _
    update: Callable[[jax.Array, jax.Array, jax.Array | None], Any]
    finish: Callable[[Any, np.ndarray], np.ndarray]
    unit: str  # "%", of shares, which reports multiply by a hundred, or nothing
    higher_is_better: bool


def opened(outputs: jax.Array, classes: jax.Array | None) -> jax.Array:
    """Logits in float32, those of closed classes far below the others."""
    outputs = outputs.astype(jnp.float32)
    return outputs if classes is None else jnp.where(classes, outputs, _CLOSED)


def cross_entropy(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
    """−log softmax(outputs)[y] of each example, or of each position."""
    return optax.softmax_cross_entropy_with_integer_labels(opened(outputs, classes), y)


def squared_error(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
    """Mean over the targets of an example."""
    del classes
    return jnp.mean(jnp.square(outputs.astype(jnp.float32) - y.astype(jnp.float32)), -1)


def _is_right(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
    return (jnp.argmax(opened(outputs, classes), -1) == y).astype(jnp.float32)


def _mean(total: np.ndarray, examples: np.ndarray) -> np.ndarray:
    return total / examples


def _root(total: np.ndarray, examples: np.ndarray) -> np.ndarray:
    return np.sqrt(total / examples)


def _power(total: np.ndarray, examples: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.exp(total / examples)


ACCURACY = Metric("accuracy", _is_right, _mean, "%", higher_is_better=True)
SQUARED_ERROR = Metric("squared_error", squared_error, _mean, "", higher_is_better=False)
# Of a client, in the targets' own unit; a mean over clients is not the root of their mean.
RMSE = Metric("rmse", squared_error, _root, "", higher_is_better=False)
PERPLEXITY = Metric("perplexity", cross_entropy, _power, "", higher_is_better=False)


class Confusion(NamedTuple):
    """Of each class, or label: how many there are, are found, and are both."""

    there: jax.Array  # [..., C]
    found: jax.Array
    both: jax.Array


def _confusion(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> Confusion:
    logits = opened(outputs, classes)
    there = jax.nn.one_hot(y, logits.shape[-1])
    found = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1])
    return Confusion(there, found, there * found)


def _label_confusion(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> Confusion:
    there, found = (part.astype(jnp.float32) for part in (y, opened(outputs, classes) > 0))
    return Confusion(there, found, there * found)


def _recall(state: Confusion, examples: np.ndarray) -> np.ndarray:
    """The mean over the classes that occur."""
    del examples
    return _mean_where(state.there > 0, state.both, state.there)


def _f1(state: Confusion, examples: np.ndarray) -> np.ndarray:
    """The mean over the classes that occur or are found."""
    del examples
    each = state.there + state.found
    return _mean_where(each > 0, 2 * state.both, each)


def _mean_where(there: Any, upper: Any, lower: Any) -> np.ndarray:
    """The mean of quotients over the last axis, of those that are there; NaN where none is."""
    shares = np.where(there, upper, 0.0) / np.where(there, lower, 1.0)
    count = there.sum(-1)
    return shares.sum(-1) / np.where(count > 0, count, np.nan)


BALANCED_ACCURACY = Metric("balanced_accuracy", _confusion, _recall, "%", higher_is_better=True)
MACRO_F1 = Metric("macro_f1", _confusion, _f1, "%", higher_is_better=True)


def _histogram(score: jax.Array, y: jax.Array) -> jax.Array:
    """[..., 2, BINS]: the bin of a score among the examples that are not so, and that are.

    Bins are as wide in s/(1 + |s|), between -1 and 1: two scores (1 + |s|)²/256 apart are in
    different ones wherever they lie, and any in one bin count as equal.
    """
    score = jnp.clip(score, -1e6, 1e6)  # ∞ / ∞ has no place
    place = jnp.floor((score / (1 + jnp.abs(score)) + 1) * (BINS / 2)).astype(jnp.int32)
    bins = jax.nn.one_hot(jnp.clip(place, 0, BINS - 1), BINS)
    return jax.nn.one_hot(y.astype(jnp.int32), 2)[..., None] * bins[..., None, :]


def _two_classes(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
    del classes
    return _histogram((outputs[..., 1] - outputs[..., 0]).astype(jnp.float32), y)


def _each_label(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
    del classes
    return _histogram(outputs.astype(jnp.float32), y)


def _area(state: np.ndarray, examples: np.ndarray) -> np.ndarray:
    """Of all pairs of one that is so and one that is not: the share that is in order, ties half."""
    del examples
    negative, positive = state[..., 0, :], state[..., 1, :]
    below = np.cumsum(negative, -1) - negative
    ordered = np.sum(positive * (below + negative / 2), -1)
    pairs = positive.sum(-1) * negative.sum(-1)
    return ordered / np.where(pairs > 0, pairs, np.nan)


def _mean_area(state: np.ndarray, examples: np.ndarray) -> np.ndarray:
    """Over the labels that some examples have and others have not."""
    each = _area(state, examples)
    return _mean_where(np.isfinite(each), each, np.ones_like(each))


AUROC = Metric("auroc", _two_classes, _area, "%", higher_is_better=True)


class Moments(NamedTuple):
    """Sums over examples of each target."""

    error: jax.Array  # (ŷ − y)²
    y: jax.Array
    square: jax.Array  # y²


def _moments(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> Moments:
    del classes
    y = y.astype(jnp.float32)
    return Moments(jnp.square(outputs.astype(jnp.float32) - y), y, jnp.square(y))


def _explained(state: Moments, examples: np.ndarray) -> np.ndarray:
    """R², the mean over targets that are not all the same.

    Sums are float32: targets whose mean is a thousand times their deviation leave one digit of it.
    """
    spread = state.square - state.y**2 / np.asarray(examples)[..., None]
    there = spread > 1e-6 * np.abs(state.square)
    return _mean_where(there, spread - state.error, spread)


R2 = Metric("r2", _moments, _explained, "", higher_is_better=True)


class Found(NamedTuple):
    """A sum over the positions that have a label, and how many these are."""

    total: jax.Array
    positions: jax.Array


def of_positions(
    each: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array],
) -> Callable[[jax.Array, jax.Array, jax.Array | None], Found]:
    """(outputs [B, T, C], y [B, T], classes) -> the sum over T where y is no padding, -1."""

    def update(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> Found:
        there = y >= 0
        values = jnp.where(there, each(outputs, jnp.maximum(y, 0), classes), 0.0)
        return Found(jnp.sum(values, -1), jnp.sum(there, -1).astype(jnp.float32))

    return update


def by_position(metric: Metric) -> Metric:
    """A metric that is a mean over examples, as one over positions that have a label."""

    def finish(state: Found, examples: np.ndarray) -> np.ndarray:
        del examples
        positions = np.asarray(state.positions)
        return metric.finish(np.asarray(state.total), np.where(positions > 0, positions, np.nan))

    return metric._replace(update=of_positions(metric.update), finish=finish)


def _right_labels(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
    return jnp.mean(((opened(outputs, classes) > 0) == y).astype(jnp.float32), -1)


LABEL_ACCURACY = ACCURACY._replace(update=_right_labels)
LABEL_F1 = MACRO_F1._replace(update=_label_confusion)
LABEL_AUROC = AUROC._replace(update=_each_label, finish=_mean_area)
# By name, as a run directory has them.
METRICS = {
    metric.name: metric
    for metric in (
        ACCURACY,
        BALANCED_ACCURACY,
        MACRO_F1,
        AUROC,
        PERPLEXITY,
        SQUARED_ERROR,
        RMSE,
        R2,
    )
}
