"""What clients learn: losses and metrics, given to an algorithm so that none names them.

A task is made by a factory, NAME(outputs, *, its own settings) -> Task; one of your own is too.
"""

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl.core import scores
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.scores import Metric


class Task(NamedTuple):
    """Loss of each example, and the metrics; a run's best round is best by the first of them.

    loss: (outputs [B, ...], y [B, ...], classes: bool [C] or None) -> [B]
    `classes` opens the outputs that this client uses, where alphabets differ in size.
    """

    loss: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]
    metrics: tuple[Metric, ...]
    has_classes: bool = False  # outputs are logits of classes, one of which an example has
    augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None  # (x, key) -> x, in training
    optional_metrics: tuple[Metric, ...] = ()  # what the setting `metrics` can name besides


def classification(outputs: int = 0) -> Task:
    """Softmax cross-entropy; accuracy.

    The setting `metrics` can name balanced_accuracy, macro_f1, perplexity and, of two classes,
    auroc too.
    """
    more = (scores.BALANCED_ACCURACY, scores.MACRO_F1, scores.PERPLEXITY)
    both = (scores.AUROC,) if outputs == 2 else ()
    others = (*more, *both)
    return Task(scores.cross_entropy, (scores.ACCURACY,), has_classes=True, optional_metrics=others)


def regression(outputs: int = 0) -> Task:
    """The squared error, mean over an example's targets, as loss and as metric; and its root.

    The setting `metrics` can name r2 too.
    """
    del outputs
    errors = (scores.SQUARED_ERROR, scores.RMSE)
    return Task(scores.squared_error, errors, optional_metrics=(scores.R2,))


def tokens(outputs: int = 0) -> Task:
    """Softmax cross-entropy of each position, mean over those of an example; accuracy, perplexity.

    y is [B, T] classes, -1 where there is none, and outputs are [B, T, C]. Metrics are over all
    positions of a client that have a label.
    """
    del outputs
    total = scores.of_positions(scores.cross_entropy)

    def loss(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
        found = total(outputs, y, classes)
        return found.total / jnp.maximum(found.positions, 1.0)

    return Task(loss, tuple(map(scores.by_position, (scores.ACCURACY, scores.PERPLEXITY))))


def multilabel(outputs: int = 0) -> Task:
    """Sigmoid cross-entropy, mean over an example's labels; the share of labels that are right.

    y is [B, L], true or false. The setting `metrics` can name macro_f1 and auroc, means over
    labels, too.
    """
    del outputs

    def loss(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
        logits = scores.opened(outputs, classes)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, y.astype(jnp.float32)), -1)

    others = (scores.LABEL_F1, scores.LABEL_AUROC)
    return Task(loss, (scores.LABEL_ACCURACY,), optional_metrics=others)


# By the names that a configuration uses.
TASKS: dict[str, Callable[..., Task]] = {
    "classification": classification,
    "regression": regression,
    "tokens": tokens,
    "multilabel": multilabel,
}
_LABELS = {
    "classification": "integer classes [examples]",
    "regression": "real targets [examples, targets]",
    "tokens": "integer classes of each position [examples, positions]",
    "multilabel": "true or false [examples, labels]",
}


def infer_task(y: Any) -> str:
    """The task that labels are for, by their type."""
    if y.dtype.kind == "f":
        return "regression"
    if y.dtype.kind == "b":
        return "multilabel"
    return "classification" if y.ndim == 1 else "tokens"


def check_labels(name: str, y: Any) -> None:
    """UsageError where labels are not those of one of our tasks."""
    if name in TASKS and infer_task(y) != name:
        raise UsageError(
            f"task {name} learns {_LABELS[name]}, and y is {y.dtype} {list(y.shape)}, for "
            f"task={infer_task(y)}"
        )


def check_task(name: str, task: Task, outputs: Any, y: Any) -> None:
    """UsageError where a loss or a metric does not keep its form.

    outputs, y: of n examples; their shapes will do.
    """
    n, metrics = outputs.shape[0], (*task.metrics, *task.optional_metrics)
    if not task.metrics:
        raise UsageError(f"{name} has no metric; the first one chooses a run's best round")
    for metric in metrics:
        if not re.fullmatch("[A-Za-z0-9_]+", metric.name) or metric.name == "loss":
            raise UsageError(
                f"{name} has a metric called {metric.name!r}; use letters, digits and _, and not "
                "loss, which is there already"
            )
    parts = {"loss": task.loss, **{metric.name: metric.update for metric in metrics}}
    for part, f in parts.items():
        try:
            made = jax.eval_shape(f, outputs, y, None)
        except Exception as error:  # it is somebody's own, and raises whatever it raises
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(
                f"{name}: {part} fails for outputs {list(outputs.shape)} and y {list(y.shape)}: "
                f"{line}"
            ) from error
        shapes = [leaf.shape for leaf in jax.tree.leaves(made)]
        right = shapes == [(n,)] if part == "loss" else all(s[:1] == (n,) for s in shapes)
        if not right:
            raise UsageError(
                f"{name}: {part} gives {[list(s) for s in shapes]} for {n} examples; it must give "
                f"a number{'' if part == 'loss' else ', or an array,'} for each"
            )


def select_metrics(task: Task, name: str, names: Sequence[str]) -> Task:
    """The task with these metrics, in their order; its own where none is named."""
    known = {metric.name: metric for metric in (*task.metrics, *task.optional_metrics)}
    for one in names:
        if one not in known:
            if one == scores.AUROC.name and name == "classification":
                raise UsageError("metrics: auroc is for two classes, or for task=multilabel")
            near = difflib.get_close_matches(str(one), known, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"metrics: task {name} has none called {one!r}; {hint}")
    chosen = tuple(known[one] for one in dict.fromkeys(names)) or task.metrics
    return task._replace(metrics=chosen)
