"""Rows of clients.csv: scores, examples and communication of each client."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.task import Task
from fedjax_pfl.simulation.ledger import Ledger
from fedjax_pfl.simulation.records import Evaluation
from fedjax_pfl.simulation.summaries import per_client, to_finite

OBSERVED = "client_"  # an array [N] that a method observes under such a name becomes a column
_FACTS = ("client", "owner", "active", "group", "train_examples", "test_examples", "attacker")
_COUNTS = ("bytes_down", "bytes_up", "client_updates", "dropped", "rejected")


def is_own_column(name: str) -> bool:
    """Returns True if a column of this name has facts or scores of clients in every run."""
    return name in (*_FACTS, *_COUNTS) or name.startswith(("before_", "after_", "best_"))


def client_scores(
    scores: Evaluation,
    task: Task,
    evaluated: np.ndarray | None = None,
    more_columns: Mapping[str, np.ndarray] | None = None,
) -> tuple[dict[str, Any], ...]:
    """Returns one row per evaluated client, a dict of columns.

    Columns are test_examples, then before_NAME and after_NAME for each metric NAME and for `loss`:
    test scores before and after one more local training. A score that was not evaluated is None.
    The last columns are `more_columns`.

    Args:
      scores: Result of an evaluation, arrays [N].
      task: Defines the metrics.
      evaluated: Ids of the evaluated clients. Default: all.
      more_columns: Arrays [N] by name of the column.
    """
    added = dict(more_columns or {})
    if evaluated is not None:
        added = {name: column[evaluated] for name, column in added.items()}
        scores = jax.tree.map(lambda leaf: np.asarray(leaf)[evaluated], scores)
    examples = np.asarray(scores.before.examples)
    columns: dict[str, np.ndarray] = {}
    empty = np.full(len(examples), np.nan)
    for stage, part in (("before", scores.before), ("after", scores.after)):
        names = [metric.name for metric in task.metrics] + ["loss"]
        values = dict.fromkeys(names, empty) if part is None else per_client(part, task)
        columns |= {f"{stage}_{name}": column for name, column in values.items()}
    columns |= added
    return tuple(
        {"test_examples": int(count)}
        | {column: to_finite(values[i]) for column, values in columns.items()}
        for i, count in enumerate(examples)
    )


def add_best(
    rows: Sequence[Mapping[str, Any]],
    previous: Sequence[Mapping[str, Any]],
    is_best: bool,
    task: Task,
) -> tuple[dict[str, Any], ...]:
    """Returns the rows of `client_scores` with the metrics of the best evaluation.

    These are the columns best_before_NAME and best_after_NAME.

    Args:
      rows: Rows of `client_scores` of this evaluation.
      previous: Rows of the previous evaluation with its best metrics; empty if there is none.
      is_best: True if this evaluation is the best.
      task: Defines the metrics.
    """
    names = [f"{stage}_{metric.name}" for metric in task.metrics for stage in ("before", "after")]
    if is_best:
        best = [{f"best_{name}": row[name] for name in names} for row in rows]
    else:
        source = previous or [{}] * len(rows)
        best = [{f"best_{name}": row.get(f"best_{name}") for name in names} for row in source]
    return tuple({**row, **columns} for row, columns in zip(rows, best, strict=True))


def client_rows(
    federation: Federation,
    rows: Sequence[Mapping[str, Any]],
    ledger: Ledger,
    evaluated: np.ndarray | None = None,
) -> list[dict[str, Any]]:
    """Returns the rows of clients.csv, one per client.

    Args:
      federation: The clients.
      rows: Rows of `client_scores` or `add_best`. Clients that were not evaluated get None.
      ledger: Communication of each client.
      evaluated: Ids of the evaluated clients. Default: all.
    """
    if evaluated is not None and len(rows):
        by_client = dict(zip(evaluated.tolist(), rows, strict=True))
        blank = dict.fromkeys(rows[0])
        rows = [by_client.get(i, blank) for i in range(federation.clients)]
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
            "client_updates": ledger.client_updates[i],
            "dropped": ledger.dropped[i],
            "rejected": ledger.rejected[i],
        }
        for i, row in enumerate(rows)
    ]
