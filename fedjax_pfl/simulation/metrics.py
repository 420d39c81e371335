"""Numbers of an evaluation, worked out on the host in float64 from sums over each client."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.local_training import Scores
from fedjax_pfl.core.scores import METRICS
from fedjax_pfl.core.task import Task
from fedjax_pfl.simulation.ledger import Ledger
from fedjax_pfl.simulation.records import Evaluation, Log


def _number(value: Any) -> float | None:
    """A float for JSON, where there is no NaN."""
    return float(value) if math.isfinite(value) else None


def per_client(scores: Scores, task: Task) -> dict[str, np.ndarray]:
    """Each client's metrics and `loss`; NaN where it has no examples, or where it is not finite.

    A client's evaluation is finite or it is not: a loss of NaN says that the model predicts
    nothing, whatever class an arg max then finds. Of one that is, a metric is NaN alone where the
    client's examples do not define it.
    """
    examples = np.asarray(scores.examples, np.float64)
    counted = np.where(examples > 0, examples, np.nan)
    found = {
        metric.name: metric.finish(
            jax.tree.map(lambda x: np.asarray(x, np.float64), scores.metrics[metric.name]), counted
        )
        for metric in task.metrics
    }
    found["loss"] = np.asarray(scores.loss) / counted
    finite = np.isfinite(found["loss"])
    return {
        name: np.where(finite & np.isfinite(values), values, np.nan)
        for name, values in found.items()
    }


def not_finite(scores: Scores, active: np.ndarray, task: Task) -> list[int]:
    """The active clients that have examples and no finite evaluation on them."""
    chosen = np.asarray(active) & (np.asarray(scores.examples) > 0)
    return np.flatnonzero(chosen & np.isnan(per_client(scores, task)["loss"])).tolist()


_SPREAD = ("mean", "weighted", "std", "variance", "worst10")


def summary(scores: Scores, active: np.ndarray, task: Task) -> dict[str, Any] | None:
    """Over active clients that have examples: mean, weighted by examples, spread, worst tenth.

    Args:
      scores: sums over each client's examples, [N].
    Returns:
      None where nobody has examples. `clients` says over how many the means are; the others have
      no examples, or are counted under `not_finite`. The worst tenth is the mean over the
      ceil(n/10) that are worst. A metric's numbers leave out clients whose examples do not define
      it.
    """
    chosen = np.asarray(active) & (np.asarray(scores.examples) > 0)
    if not chosen.any():
        return None
    each = per_client(scores, task)
    kept = chosen & np.isfinite(each["loss"])
    examples = np.asarray(scores.examples, np.float64)[kept]
    found: dict[str, Any] = {}
    for metric in task.metrics:
        there = np.isfinite(each[metric.name][kept])
        values, weights = each[metric.name][kept][there], examples[there]
        in_order = np.sort(values) if metric.higher_is_better else np.sort(values)[::-1]
        numbers: dict[str, float | None] = dict.fromkeys(_SPREAD)
        if len(values):
            numbers["mean"] = _number(values.mean())
            numbers["weighted"] = _number((values * weights).sum() / weights.sum())
            numbers["std"] = _number(values.std())
            numbers["variance"] = _number(values.var())
            numbers["worst10"] = _number(in_order[: math.ceil(len(values) / 10)].mean())
        found |= {f"{metric.name}_{word}": number for word, number in numbers.items()}
    found["loss"] = _number(each["loss"][kept].mean()) if kept.any() else None
    return found | {"clients": len(examples), "not_finite": int(chosen.sum()) - len(examples)}


def own(task: Task) -> dict[str, Any]:
    """What a report has to know of metrics that are not ours; nothing where all are."""
    said = {
        metric.name: {"unit": metric.unit, "higher_is_better": metric.higher_is_better}
        for metric in task.metrics
        if metric.name not in METRICS
    }
    return {"own_metrics": said} if said else {}


def mean_std(values: Sequence[float]) -> dict[str, Any]:
    """Mean and sample standard deviation over seeds; no deviation of one value."""
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"mean": float(np.mean(values)), "std": spread, "seeds": len(values)}


def client_scores(
    scores: Evaluation, task: Task, evaluated: np.ndarray | None = None
) -> tuple[dict[str, Any], ...]:
    """One row per client, or per client of those evaluated: metrics and loss, before and after."""
    if evaluated is not None:
        scores = jax.tree.map(lambda leaf: np.asarray(leaf)[evaluated], scores)
    columns: dict[str, np.ndarray] = {"test_examples": np.asarray(scores.before.examples)}
    empty = np.full(len(columns["test_examples"]), np.nan)
    for word, part in (("before", scores.before), ("after", scores.after)):
        names = [metric.name for metric in task.metrics] + ["loss"]
        each = dict.fromkeys(names, empty) if part is None else per_client(part, task)
        columns |= {f"{word}_{name}": values for name, values in each.items()}
    clients = range(len(columns["test_examples"]))
    return tuple(
        {
            column: int(values[i]) if column == "test_examples" else _number(values[i])
            for column, values in columns.items()
        }
        for i in clients
    )


def with_best(
    rows: Sequence[Mapping[str, Any]],
    earlier: Sequence[Mapping[str, Any]],
    better: bool,
    task: Task,
) -> tuple[dict[str, Any], ...]:
    """Rows that also have the metrics of the best evaluation: this one, or as earlier rows have."""
    words = [f"{word}_{metric.name}" for metric in task.metrics for word in ("before", "after")]
    if better:
        best = [{f"best_{word}": row[word] for word in words} for row in rows]
    else:
        known = earlier or [{}] * len(rows)
        best = [{f"best_{word}": row.get(f"best_{word}") for word in words} for row in known]
    return tuple({**row, **more} for row, more in zip(rows, best, strict=True))


def client_table(
    federation: Federation,
    rows: Sequence[Mapping[str, Any]],
    ledger: Ledger,
    evaluated: np.ndarray | None = None,
) -> list[dict[str, Any]]:
    """The rows of clients.csv; nothing in the columns of `rows` for those who have none.

    evaluated: whose the rows are, where they are not everybody's.
    """
    if evaluated is not None and len(rows):
        own = dict(zip(evaluated.tolist(), rows, strict=True))
        nothing = dict.fromkeys(rows[0])
        rows = [own.get(i, nothing) for i in range(federation.clients)]
    return [
        {
            "client": i,
            **({} if federation.owners is None else {"owner": federation.owners[i]}),
            "active": int(federation.active[i]),
            "group": int(federation.groups[i]),
            "train_examples": int(federation.counts[i]),
            **row,
            "bytes_down": ledger.client_down[i],
            "bytes_up": ledger.client_up[i],
            "visits": ledger.visits[i],
            "dropped": ledger.dropped[i],
            "rejected": ledger.rejected[i],
        }
        for i, row in enumerate(rows)
    ]


Pending = tuple[dict[str, float], int]


def gather(pending: Pending, logs: Sequence[Log], rounds: int) -> Pending:
    """Add the training metrics of one call's clients that arrived to sums and a count."""
    sums, count = dict(pending[0]), pending[1]
    for log in logs:
        arrived = log.arrived[:rounds]
        count += int(arrived.sum())
        for name, values in log.metrics.items():
            sums[name] = sums.get(name, 0.0) + float(values[:rounds][arrived].sum())
    return sums, count


def means(pending: Pending) -> dict[str, float | None]:
    """The mean training metrics since the last evaluation, over all visits."""
    sums, count = pending
    return {f"train_{name}": _number(x / count) if count else None for name, x in sums.items()}


def rejections(logs: Sequence[Log], first: int, rounds: int) -> Iterator[str]:
    """A line for every upload that was rejected."""
    for log in logs:
        for r, slot in np.argwhere(log.rejected[:rounds]):
            yield (
                f"round {first + r + 1}: the update of client {log.ids[r, slot]} was rejected, it "
                "is not finite or too large"
            )
