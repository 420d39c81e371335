"""Metrics. Each is a sum over examples, so batches can be padded.

Sums are computed on the device, and metrics from the sums on the host in float64. A metric that is
undefined for a client is NaN, such as the area under a curve if all examples have one class. Means
over clients leave out NaN.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

_UNUSED_LOGIT = -1e9  # probability 0; finite, so that no gradient becomes NaN
BINS = 512  # histogram bins of the scores, for the area under a curve
Update = Callable[[jax.Array, jax.Array, jax.Array | None], Any]


class Metric(NamedTuple):
    """A measure of a model on a client's examples.

    The state of a metric is a sum over examples: a number for a mean, a histogram for an area.
    `classes` are the outputs that the client uses; None: all.

    update: (outputs [B, ...], y [B, ...], classes: bool [C] or None) -> tree of [B, ...], the terms
      that the examples of a batch add to the state.
    finish: (state [N, ...], examples [N]) -> [N], the values of N clients, in float64.
    """

    name: str  # in files and reports: letters, digits and _
    update: Update
    finish: Callable[[Any, np.ndarray], np.ndarray]
    unit: str  # "%" for fractions, which reports multiply by 100, else ""
    higher_is_better: bool


def mask_logits(outputs: jax.Array, classes: jax.Array | None) -> jax.Array:
    """Returns logits in float32, [..., C], −1e9 for classes that the client does not use.

    `classes`: bool [C], True for those that the client uses; None: all.
    """
    outputs = outputs.astype(jnp.float32)
    return outputs if classes is None else jnp.where(classes, outputs, _UNUSED_LOGIT)


def cross_entropy(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
    """Computes −log softmax(outputs)[y] of logits [..., C] and classes y [...]; returns [...].

    `classes`: bool [C], those that the client uses; None: all.
    """
    return optax.softmax_cross_entropy_with_integer_labels(mask_logits(outputs, classes), y)


def squared_error(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
    """Computes the mean squared error of each example over its targets: [B, targets] -> [B].

    `classes` has no effect.
    """
    del classes
    return jnp.mean(jnp.square(outputs.astype(jnp.float32) - y.astype(jnp.float32)), -1)


def _is_correct(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
    return (jnp.argmax(mask_logits(outputs, classes), -1) == y).astype(jnp.float32)


def _mean(total: np.ndarray, examples: np.ndarray) -> np.ndarray:
    return total / examples


def _root(total: np.ndarray, examples: np.ndarray) -> np.ndarray:
    return np.sqrt(total / examples)


def _exponential(total: np.ndarray, examples: np.ndarray) -> np.ndarray:
    """Computes exp(total / examples), ∞ if it overflows."""
    with np.errstate(over="ignore"):
        return np.exp(total / examples)


ACCURACY = Metric(
    name="accuracy", update=_is_correct, finish=_mean, unit="%", higher_is_better=True
)
SQUARED_ERROR = Metric(
    name="squared_error", update=squared_error, finish=_mean, unit="", higher_is_better=False
)
# Per client. The mean over clients is not the root of the mean squared error.
RMSE = Metric(name="rmse", update=squared_error, finish=_root, unit="", higher_is_better=False)
PERPLEXITY = Metric(
    name="perplexity", update=cross_entropy, finish=_exponential, unit="", higher_is_better=False
)


class Confusion(NamedTuple):
    """Counts for every class or label: of one example (0 or 1), or sums over examples."""

    actual: jax.Array  # [..., C]: examples of the class
    predicted: jax.Array  # [..., C]: predictions of the class
    correct: jax.Array  # [..., C]: correct predictions of the class


def _confusion(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> Confusion:
    """Counts the class and the predicted class of each example, as 0 or 1: [B, C] each.

    The prediction is the largest of `outputs` [B, C] among `classes`; `y` [B] are class numbers.
    """
    logits = mask_logits(outputs, classes)
    actual = jax.nn.one_hot(y, logits.shape[-1])
    predicted = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1])
    return Confusion(actual, predicted, actual * predicted)


def confusion_matrix(
    outputs: jax.Array, y: jax.Array, classes: jax.Array | None, mask: jax.Array
) -> jax.Array:
    """Counts the examples of a batch by class (row) and predicted class (column): float32 [C, C].

    `outputs` are logits [B, C], `y` classes [B]. `classes`: bool [C], those that the client uses;
    None: all. `mask`, bool [B], is True for the examples to count.
    """
    logits = mask_logits(outputs, classes)
    actual = jax.nn.one_hot(y, logits.shape[-1]) * mask[:, None].astype(jnp.float32)
    return actual.T @ jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1])


def _label_confusion(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> Confusion:
    """Counts the true and the predicted labels of each example, as 0 or 1: [B, L] each.

    Labels with `outputs` [B, L] above 0 are predicted; `y` is bool [B, L].
    """
    actual = y.astype(jnp.float32)
    predicted = (mask_logits(outputs, classes) > 0).astype(jnp.float32)
    return Confusion(actual, predicted, actual * predicted)


def _recall(state: Confusion, examples: np.ndarray) -> np.ndarray:
    """Computes the mean recall over the classes that occur, [...]; ignores `examples`."""
    del examples
    return _mean_ratio(state.actual > 0, state.correct, state.actual)


def _f1(state: Confusion, examples: np.ndarray) -> np.ndarray:
    """Computes the mean F1 over classes that occur or are predicted, [...]; ignores `examples`."""
    del examples
    total = state.actual + state.predicted
    return _mean_ratio(total > 0, 2 * state.correct, total)


def _mean_ratio(mask: Any, numerator: Any, denominator: Any) -> np.ndarray:
    """Computes the mean of numerator / denominator over the last axis, where the mask is true.

    The result is NaN where the mask is never true.
    """
    ratios = np.where(mask, numerator, 0.0) / np.where(mask, denominator, 1.0)
    count = mask.sum(-1)
    return ratios.sum(-1) / np.where(count > 0, count, np.nan)


BALANCED_ACCURACY = Metric(
    name="balanced_accuracy", update=_confusion, finish=_recall, unit="%", higher_is_better=True
)
MACRO_F1 = Metric(name="macro_f1", update=_confusion, finish=_f1, unit="%", higher_is_better=True)


def _histogram(score: jax.Array, y: jax.Array) -> jax.Array:
    """Returns one-hot bins of scores, [..., 2, BINS]: [..., y, bin of the score] is 1.

    `score` and `y`, [...], are logits and 0 or 1 (negative or positive).

    Bins have equal width in s/(1 + |s|), which is between -1 and 1. Scores in one bin count as
    equal; scores (1 + |s|)²/256 apart are in different bins.
    """
    score = jnp.clip(score, -1e6, 1e6)  # ∞ / ∞ would be NaN
    position = jnp.floor((score / (1 + jnp.abs(score)) + 1) * (BINS / 2)).astype(jnp.int32)
    bins = jax.nn.one_hot(jnp.clip(position, 0, BINS - 1), BINS)
    return jax.nn.one_hot(y.astype(jnp.int32), 2)[..., None] * bins[..., None, :]


def _binary_histogram(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
    """Returns the bin of logit 1 − logit 0 of each example: [B, 2, BINS]."""
    del classes
    return _histogram((outputs[..., 1] - outputs[..., 0]).astype(jnp.float32), y)


def _label_histogram(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
    """Returns the bin of each logit: [B, L, 2, BINS]."""
    del classes
    return _histogram(outputs.astype(jnp.float32), y)


def _area(state: np.ndarray, examples: np.ndarray) -> np.ndarray:
    """Computes areas under ROC curves, [...], from histograms [..., 2, BINS]; NaN without pairs.

    An area is the fraction of (negative, positive) pairs of examples of which the positive one has
    the higher score; ties count half. `examples` has no effect.
    """
    del examples
    negative, positive = state[..., 0, :], state[..., 1, :]
    below = np.cumsum(negative, -1) - negative
    ordered = np.sum(positive * (below + negative / 2), -1)
    pairs = positive.sum(-1) * negative.sum(-1)
    return ordered / np.where(pairs > 0, pairs, np.nan)


def _mean_area(state: np.ndarray, examples: np.ndarray) -> np.ndarray:
    """Computes the mean of `_area` over labels that have positive and negative examples.

    `state` is [..., L, 2, BINS]. `examples` has no effect.
    """
    areas = _area(state, examples)
    return _mean_ratio(np.isfinite(areas), areas, np.ones_like(areas))


AUROC = Metric(
    name="auroc", update=_binary_histogram, finish=_area, unit="%", higher_is_better=True
)


class Moments(NamedTuple):
    """Sums over examples from which R² is computed, each [..., targets]."""

    error: jax.Array  # (output − y)²
    y: jax.Array  # targets
    square: jax.Array  # y²


def _moments(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> Moments:
    """Computes the terms, [B, targets] each, that examples add to the sums of R².

    `outputs` and `y` are [B, targets]; `classes` has no effect.
    """
    del classes
    y = y.astype(jnp.float32)
    return Moments(jnp.square(outputs.astype(jnp.float32) - y), y, jnp.square(y))


def _r2(state: Moments, examples: np.ndarray) -> np.ndarray:
    """Computes the mean R² over the targets that are not constant: [N] for N clients.

    Sums are float32, and rounding gives constant targets a variation of up to 1e-5 of their squares
    in 200 batches. So a target whose mean is above 300 times its standard deviation counts as
    constant.
    """
    variation = state.square - state.y**2 / np.asarray(examples)[..., None]
    varies = variation > 1e-5 * np.abs(state.square)
    return _mean_ratio(varies, variation - state.error, variation)


R2 = Metric(name="r2", update=_moments, finish=_r2, unit="", higher_is_better=True)


class PositionSum(NamedTuple):
    """Sum over the positions that have a label, and their number."""

    total: jax.Array  # [...]: sum of a value over positions
    positions: jax.Array  # [...]: number of labelled positions, float32


def sum_over_positions(update: Update) -> Callable[..., PositionSum]:
    """Returns a function (outputs [B, T, C], y [B, T], classes) -> sums of shape [B].

    Args:
      update: (outputs, y, classes) -> [B, T], a value for every position. Positions with label -1
        are left out of the sums.
    """

    def update_positions(
        outputs: jax.Array, y: jax.Array, classes: jax.Array | None
    ) -> PositionSum:
        labelled = y >= 0
        values = jnp.where(labelled, update(outputs, jnp.maximum(y, 0), classes), 0.0)
        return PositionSum(jnp.sum(values, -1), jnp.sum(labelled, -1).astype(jnp.float32))

    return update_positions


def per_position(metric: Metric) -> Metric:
    """Converts a mean over examples to a mean over the labelled positions of sequences.

    Outputs are then [B, T, C] and labels [B, T], with -1 at a position without a label.
    """

    def finish(state: PositionSum, examples: np.ndarray) -> np.ndarray:
        del examples
        positions = np.asarray(state.positions)
        return metric.finish(np.asarray(state.total), np.where(positions > 0, positions, np.nan))

    return metric._replace(update=sum_over_positions(metric.update), finish=finish)


def _correct_labels(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
    return jnp.mean(((mask_logits(outputs, classes) > 0) == y).astype(jnp.float32), -1)


LABEL_ACCURACY = ACCURACY._replace(update=_correct_labels)
LABEL_F1 = MACRO_F1._replace(update=_label_confusion)
LABEL_AUROC = AUROC._replace(update=_label_histogram, finish=_mean_area)
METRICS = {  # by the name that a run directory uses
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
