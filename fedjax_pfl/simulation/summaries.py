"""Metrics of an evaluation, computed on the host in float64 from the sums of each client."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_pfl.core import trees
from fedjax_pfl.core.local_training import Scores
from fedjax_pfl.core.metrics import METRICS, Metric
from fedjax_pfl.core.task import Task
from fedjax_pfl.simulation.records import Evaluation, Log


def to_finite(value: Any) -> float | None:
    """Returns a float for JSON, or None if the value is not finite."""
    return float(value) if math.isfinite(value) else None


def per_client(scores: Scores, task: Task) -> dict[str, np.ndarray]:
    """Computes the metrics and the mean loss of each client.

    A loss that is not finite makes all metrics of its client NaN: the arg max of NaN logits is a
    class, but no prediction. Otherwise only metrics that the examples do not define are NaN. A
    metric that overflows, such as the perplexity of a large loss, is infinite.

    Args:
      scores: Sums over the examples of each client, [N].
      task: Defines the metrics.

    Returns:
      Arrays [N] by metric name and "loss"; NaN for clients without examples.
    """
    examples = np.asarray(scores.examples, np.float64)
    counts = np.where(examples > 0, examples, np.nan)
    columns = {
        metric.name: metric.finish(
            jax.tree.map(lambda x: np.asarray(x, np.float64), scores.metrics[metric.name]), counts
        )
        for metric in task.metrics
    }
    columns["loss"] = np.asarray(scores.loss) / counts
    finite = np.isfinite(columns["loss"])
    return {name: np.where(finite, values, np.nan) for name, values in columns.items()}


def _has_scores(scores: Scores, active: np.ndarray) -> np.ndarray:
    """Returns bool [N]: active clients that have examples."""
    return np.asarray(active) & (np.asarray(scores.examples) > 0)


def not_finite(scores: Scores, active: np.ndarray, task: Task) -> list[int]:
    """Returns the ids of active clients that have examples and a loss that is not finite."""
    losses = per_client(scores, task)["loss"]
    return np.flatnonzero(_has_scores(scores, active) & np.isnan(losses)).tolist()


_STATISTICS = ("mean", "weighted", "std", "variance", "worst10")


def summary(scores: Scores, active: np.ndarray, task: Task) -> dict[str, Any] | None:
    """Summarises each metric over the active clients that have examples and a finite loss.

    Args:
      scores: Sums over the examples of each client, [N].
      active: bool [N].
      task: Defines the metrics.

    Returns:
      None if no active client has examples. Otherwise, for each metric NAME: NAME_mean,
      NAME_weighted (by examples), NAME_std, NAME_variance and NAME_worst10, the mean of the
      ceil(n/10) worst clients. Clients whose examples do not define a metric are left out of it.
      Statistics that are not finite, because the metric of a client overflows, are None. Also
      `loss`, and the numbers `clients` (in the summary) and `not_finite` (left out).
    """
    scored = _has_scores(scores, active)
    if not scored.any():
        return None
    columns = per_client(scores, task)
    included = scored & np.isfinite(columns["loss"])
    examples = np.asarray(scores.examples, np.float64)[included]
    line: dict[str, Any] = {}
    for metric in task.metrics:
        defined = ~np.isnan(columns[metric.name][included])
        values, weights = columns[metric.name][included][defined], examples[defined]
        worst_first = np.sort(values) if metric.higher_is_better else np.sort(values)[::-1]
        statistics: dict[str, float | None] = dict.fromkeys(_STATISTICS)
        if len(values):
            with np.errstate(over="ignore", invalid="ignore"):  # sums may overflow; ∞ - ∞ is NaN
                statistics["mean"] = to_finite(values.mean())
                statistics["weighted"] = to_finite((values * weights).sum() / weights.sum())
                statistics["std"] = to_finite(values.std())
                statistics["variance"] = to_finite(values.var())
                statistics["worst10"] = to_finite(worst_first[: math.ceil(len(values) / 10)].mean())
        line |= {f"{metric.name}_{name}": number for name, number in statistics.items()}
    line["loss"] = to_finite(columns["loss"][included].mean()) if included.any() else None
    return line | {"clients": len(examples), "not_finite": int(scored.sum()) - len(examples)}


def attack_columns(
    is_attacker: np.ndarray, triggered: Evaluation | None, task: Task
) -> dict[str, np.ndarray]:
    """Returns columns of clients.csv on attackers, arrays [N] by name; {} without attackers.

    Args:
      is_attacker: bool [N].
      triggered: Result of an evaluation on examples with the trigger and the label of a backdoor.
      task: Defines the metrics.
    """
    columns = {"attacker": is_attacker.astype(float)} if is_attacker.any() else {}
    for stage in ("before", "after"):
        scores = getattr(triggered, stage, None)
        if scores is not None:
            columns[f"{stage}_attack_success"] = per_client(scores, task)["accuracy"]
    return columns


def attack_summary(
    is_attacker: np.ndarray, triggered: Evaluation | None, honest: np.ndarray, task: Task
) -> dict[str, Any]:
    """Returns `attackers`, their number, and `attack_success` by stage; {} without attackers.

    The success of a backdoor is the mean over the honest clients, bool [N]. The other arguments are
    as for `attack_columns`.
    """
    columns = attack_columns(is_attacker, triggered, task)
    if not columns:
        return {}
    success = {}
    for name, values in columns.items():
        if name.endswith("_attack_success"):
            tested = values[honest & np.isfinite(values)]
            success[name.partition("_")[0]] = to_finite(tested.mean()) if len(tested) else None
    return {"attackers": int(is_attacker.sum())} | ({"attack_success": success} if success else {})


def confusion(scores: Evaluation, active: np.ndarray) -> dict[str, Any]:
    """Returns the content of confusion.json, or {} if no matrices were counted.

    Args:
      scores: Result of an evaluation, arrays [N].
      active: bool [N]. Other clients, and clients whose loss is not finite, are left out.

    Returns:
      "classes", the number of classes C, and the sum of the clients' matrices [C, C] as "before"
      and, if it was evaluated, "after" local training.
    """
    content: dict[str, Any] = {}
    for stage, part in (("before", scores.before), ("after", scores.after)):
        if part is not None and part.confusion is not None:
            included = _has_scores(part, active) & np.isfinite(np.asarray(part.loss))
            matrix = np.asarray(part.confusion)[included].sum(0, dtype=np.float64).astype(np.int64)
            content |= {"classes": len(matrix), stage: matrix.tolist()}
    return content


def user_metrics(task: Task) -> dict[str, Any]:
    """Returns {"custom_metrics": facts of each metric by name}, or {} if none is user-defined.

    The facts, which a report needs, are `unit` and `higher_is_better`. A metric with the name of a
    built-in one counts if its facts differ.
    """

    def facts(metric: Metric) -> dict[str, Any]:
        return {"unit": metric.unit, "higher_is_better": metric.higher_is_better}

    custom = {
        metric.name: facts(metric)
        for metric in task.metrics
        if metric.name not in METRICS or facts(metric) != facts(METRICS[metric.name])
    }
    return {"custom_metrics": custom} if custom else {}


def mean_std(values: Sequence[float]) -> dict[str, Any]:
    """Summarises values of runs that differ in the seed.

    Returns `mean`, sample deviation `std` (None for one value) and the number of values `seeds`.
    """
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"mean": float(np.mean(values)), "std": std, "seeds": len(values)}


def gather(
    pending: Mapping[str, tuple[float, int]],
    logs: Sequence[Log],
    rounds: int,
    is_attacker: np.ndarray,
) -> dict[str, tuple[float, int]]:
    """Returns the sum of each training metric, and the number of updates in it.

    Updates that the server did not use are left out.

    Rounds are added in order and in 64 bits, so the sums do not depend on how calls divide them.

    Args:
      pending: Sums before these rounds.
      logs: One log per architecture group, arrays [rounds or more, K].
      rounds: Number of rounds to add.
      is_attacker: bool [N]; updates of attackers do not count.
    """
    sums = {name: (total, count) for name, (total, count) in pending.items()}
    for r in range(rounds):
        for log in trees.row(tuple(logs), r):
            arrived = log.arrived & ~is_attacker[np.where(log.arrived, log.ids, 0)]
            for name, values in log.metrics.items():
                total, count = sums.get(name, (0.0, 0))
                total += float(values[arrived].sum(dtype=np.float64))
                sums[name] = total, count + int(arrived.sum())
    return sums


def means(pending: Mapping[str, tuple[float, int]]) -> dict[str, float | None]:
    """Returns the training metrics since the last evaluation, averaged over honest updates.

    They are named train_NAME; None if there are no updates. Where architecture groups report
    different metrics, the updates are those of the groups that report it.
    """
    return {
        f"train_{name}": to_finite(total / count) if count else None
        for name, (total, count) in pending.items()
    }


def rejections(logs: Sequence[Log], first: int, rounds: int) -> Iterator[str]:
    """Yields a message for every rejected update.

    Args:
      logs: One log per architecture group, arrays [rounds or more, K].
      first: Index of the first round in the logs, from 0. Messages count rounds from 1.
      rounds: Number of rounds to report.
    """
    for log in logs:
        for r, slot in np.argwhere(log.rejected[:rounds]):
            yield (
                f"round {first + r + 1}: the update of client {log.ids[r, slot]} was rejected "
                "because it is not finite or too large"
            )
