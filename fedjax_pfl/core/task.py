"""Tasks: the loss and the metrics that clients learn with. Algorithms name no task.

A task is made by a factory (outputs, *, **settings) -> Task; users can pass their own factory.
"""

import keyword
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl.core import metrics
from fedjax_pfl.core.errors import UsageError, first_line, nearest
from fedjax_pfl.core.metrics import Metric


class Task(NamedTuple):
    """Loss and metrics. The first metric selects the best round of a run.

    loss: (outputs [B, ...], y [B, ...], classes: bool [C] or None) -> [B]. `classes` are the
      outputs that the client uses; None: all.
    """

    loss: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]
    metrics: tuple[Metric, ...]  # measures that are reported for every evaluation
    has_classes: bool = False  # outputs are logits, and an example has one class
    augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None  # (x, key) -> x
    optional_metrics: tuple[Metric, ...] = ()  # metrics that the setting `metrics` can also select


def classification(outputs: int = 0) -> Task:
    """Softmax cross-entropy and accuracy.

    Optional metrics: balanced_accuracy, macro_f1, perplexity, and auroc if `outputs`, the number of
    classes, is 2. Outputs are logits [B, C], labels int [B].
    """
    optional = [metrics.BALANCED_ACCURACY, metrics.MACRO_F1, metrics.PERPLEXITY]
    if outputs == 2:
        optional.append(metrics.AUROC)
    return Task(
        loss=metrics.cross_entropy,
        metrics=(metrics.ACCURACY,),
        has_classes=True,
        optional_metrics=tuple(optional),
    )


def regression(outputs: int = 0) -> Task:
    """Mean squared error over the targets of an example, and its root as second metric.

    Outputs and labels are [B, targets]. Optional metric: r2. `outputs` has no effect.
    """
    del outputs
    reported = (metrics.SQUARED_ERROR, metrics.RMSE)
    return Task(metrics.squared_error, reported, optional_metrics=(metrics.R2,))


def tokens(outputs: int = 0) -> Task:
    """Softmax cross-entropy of every position; accuracy and perplexity.

    Outputs are [B, T, C]. Labels are classes [B, T], or -1 for positions without a label. The loss
    is a mean over the positions of an example, metrics are means over all positions of a client.
    `outputs` has no effect.
    """
    del outputs
    position_sum = metrics.sum_over_positions(metrics.cross_entropy)

    def loss(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
        losses = position_sum(outputs, y, classes)
        return losses.total / jnp.maximum(losses.positions, 1.0)

    return Task(loss, tuple(map(metrics.per_position, (metrics.ACCURACY, metrics.PERPLEXITY))))


def multilabel(outputs: int = 0) -> Task:
    """Mean sigmoid cross-entropy over the labels of an example; fraction of correct labels.

    Outputs are logits [B, L], labels bool [B, L]. Optional metrics: macro_f1 and auroc, means over
    labels. `outputs` has no effect; all tasks accept it.
    """
    del outputs

    def loss(outputs: jax.Array, y: jax.Array, classes: jax.Array | None) -> jax.Array:
        logits = metrics.mask_logits(outputs, classes)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, y.astype(jnp.float32)), -1)

    optional = (metrics.LABEL_F1, metrics.LABEL_AUROC)
    return Task(loss, (metrics.LABEL_ACCURACY,), optional_metrics=optional)


TASKS: dict[str, Callable[..., Task]] = {  # by the name that a configuration uses
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
    """Returns the key of `TASKS` for labels [examples, ...]: floats are regression targets.

    Bools are for multilabel, integers for classification if [examples], else for tokens.
    """
    if y.dtype.kind == "f":
        return "regression"
    if y.dtype.kind == "b":
        return "multilabel"
    return "classification" if y.ndim == 1 else "tokens"


def check_labels(name: str, y: Any) -> None:
    """Raises UsageError if the dtype or axes of labels `y` do not suit the built-in task `name`.

    Names of other tasks pass.
    """
    if name in TASKS and infer_task(y) != name:
        raise UsageError(
            f"task {name} learns {_LABELS[name]}, and y is {y.dtype} {list(y.shape)}; use "
            f"task={infer_task(y)}"
        )


def check_metric_names(name: str, task: Task) -> None:
    """Raises UsageError unless the task `name` has metrics, with different names that are allowed.

    A name becomes a column of tables and a field of the scores that `evaluate` returns.
    """
    if not task.metrics:
        raise UsageError(f"{name} has no metric; the first one selects a run's best round")
    names = [metric.name for metric in (*task.metrics, *task.optional_metrics)]
    for metric_name in names:
        is_name = re.fullmatch("[A-Za-z][A-Za-z0-9_]*", metric_name)
        if not is_name or keyword.iskeyword(metric_name) or metric_name in ("loss", "examples"):
            raise UsageError(
                f"{name} has a metric called {metric_name!r}; use a letter and then letters, "
                "digits and _; loss, examples and Python's keywords are reserved"
            )
    used = names[: len(task.metrics)]  # an optional metric that is chosen is in both lists
    if repeated := [metric_name for metric_name in used if used.count(metric_name) > 1]:
        raise UsageError(f"{name} has two metrics called {repeated[0]!r}; rename one")


def check_task(name: str, task: Task, outputs: Any, y: Any) -> None:
    """Raises UsageError if the loss or a metric fails or returns other shapes than required.

    Of `outputs` and `y`, for the same examples, only shapes and dtypes are used.
    """
    check_metric_names(name, task)
    n, all_metrics = outputs.shape[0], (*task.metrics, *task.optional_metrics)
    functions = {"loss": task.loss, **{metric.name: metric.update for metric in all_metrics}}
    for part, f in functions.items():
        try:
            result = jax.eval_shape(f, outputs, y, None)
        except Exception as error:  # a user's function may raise anything
            raise UsageError(
                f"{name}: {part} fails for outputs {list(outputs.shape)} and y {list(y.shape)}: "
                f"{first_line(error)}"
            ) from error
        shapes = [leaf.shape for leaf in jax.tree.leaves(result)]
        valid = shapes == [(n,)] if part == "loss" else all(s[:1] == (n,) for s in shapes)
        if not valid:
            raise UsageError(
                f"{name}: {part} gives {[list(s) for s in shapes]} for {n} examples; it must give "
                f"a number{'' if part == 'loss' else ', or an array,'} for each"
            )
    for metric in all_metrics:
        _check_finish(f"{name}: finish of {metric.name}", metric, outputs, y)


def _check_finish(label: str, metric: Metric, outputs: Any, y: Any) -> None:
    """Raises UsageError, starting with `label`, unless `finish` gives a number for each client.

    `outputs` and `y` are as for `check_task`.
    """
    sums = jax.tree.map(
        lambda leaf: np.ones((2, *leaf.shape[1:])), jax.eval_shape(metric.update, outputs, y, None)
    )
    try:
        shape = np.shape(metric.finish(sums, np.ones(2)))
    except Exception as error:  # a user's function may raise anything
        raise UsageError(f"{label} fails for 2 clients: {first_line(error)}") from error
    if shape != (2,):
        raise UsageError(
            f"{label} gives {list(shape)} for 2 clients; it must give a number for each, from sums "
            "with one row for each client"
        )


def select_metrics(task: Task, name: str, metric_names: Sequence[str]) -> Task:
    """Returns the task with the named metrics in this order, or unchanged if there are no names.

    Raises UsageError for a name that is neither a metric nor an optional metric of the task.
    """
    available = {metric.name: metric for metric in (*task.metrics, *task.optional_metrics)}
    for metric_name in metric_names:
        if metric_name not in available:
            if metric_name == metrics.AUROC.name and name == "classification":
                raise UsageError("metrics: auroc is for two classes, or for task=multilabel")
            match = nearest(metric_name, available)
            hint = f"did you mean {match}?" if match else f"there are {', '.join(available)}"
            raise UsageError(f"metrics: task {name} has none called {metric_name!r}; {hint}")
    selected = tuple(available[metric_name] for metric_name in dict.fromkeys(metric_names))
    return task._replace(metrics=selected or task.metrics)
