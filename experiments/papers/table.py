"""Published tables: their cells, the settings of each cell, and the measures of a run."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from fedjax_pfl.report import run_reader
from fedjax_pfl.report.numbers import number

PAPERS = Path(__file__).parent
Measure = Callable[[Any], float]  # takes a run that was read, or a runner's result
Published = float | Sequence[float] | None  # a mean, a mean and its deviation, or no number


class Quick(NamedTuple):
    """The scale that takes minutes on two cores."""

    columns: tuple[str, ...]  # columns that are run by default
    rounds: int  # rounds on digits
    light: Mapping[str, int] = {}  # rounds by dataset, for datasets small enough to be used
    shrink: Callable[[ConfigDict], None] = lambda config: None  # changes on those datasets


class Table(NamedTuple):
    """A table of a paper. Columns differ in data, rows in the method."""

    about: str  # the paper and the meaning of its numbers
    measured: str  # the meaning of our numbers and of the second measure
    cells: Mapping[str, Mapping[str, Published]]  # by row and column
    dataset: Callable[[str], str]  # dataset of a column
    # Settings of (row, column, dataset, rounds); rounds None means the published number. On another
    # dataset than the column's they are those of a small federation.
    settings: Callable[[str, str, str, int | None], ConfigDict]
    measures: Callable[[str], tuple[Measure, Measure | None]]  # our number and a second, by column
    second: str  # name of the second measure
    quick: Quick
    impossible: Callable[[ConfigDict], str] = lambda config: ""  # why a cell cannot be run, or ""
    variants: Sequence[str] = ()  # rows that no paper has: variants of this library

    @property
    def reported(self) -> str:
        """Returns "before" or "after": whether `measured` is scored before local training."""
        return "after" if self.second == "before" else "before"

    @property
    def columns(self) -> list[str]:
        """All columns, in the order of the paper."""
        return list(dict.fromkeys(column for row in self.cells.values() for column in row))

    @property
    def rows(self) -> list[str]:
        """The paper's methods, then variants of this library."""
        return [*self.cells, *self.variants]

    def published(self, row: str, column: str) -> Published:
        """Returns the paper's number, or None if it has none."""
        return self.cells.get(row, {}).get(column)


class Cell(NamedTuple):
    """A cell of a table."""

    row: str
    column: str
    published: Published


def cells_of(table: Table) -> list[Cell]:
    """Returns all cells of a table, column by column."""
    return [
        Cell(row, column, table.published(row, column))
        for column in table.columns
        for row in table.rows
    ]


def published(paper: str) -> dict[str, Any]:
    """Returns the published numbers of a paper."""
    return json.loads((PAPERS / paper / "published.json").read_text())


def mean_of(published: float | Sequence[float]) -> float:
    """Returns the published number without its deviation."""
    return float(published if isinstance(published, int | float) else published[0])


def readable(paper: str, study: str) -> dict[str, Any]:
    """Returns the numbers that a paper states of a study's figures, by figure; {} without paper."""
    if not (PAPERS / paper / "published.json").is_file():
        return {}
    return {
        name: {"of": figure["of"], **figure["values"]}
        for name, figure in published(paper)["figures"].items()
        if figure["study"] == study and "values" in figure
    }


def has_diverged(line: Mapping[str, Any]) -> bool:
    """Returns True if outputs of a client are not finite at an evaluation, a line of metrics."""
    return any((line.get(stage) or {}).get("not_finite") for stage in run_reader.STAGES)


def accuracy(run: Any, when: str = "before", key: str = "accuracy_mean") -> float:
    """Returns the mean accuracy over clients at the last evaluation, in per cent.

    NaN if outputs of a client are not finite: a mean of the others would be another number.
    """
    return accuracy_of(run.metrics[-1][when], key)


def accuracy_of(scores: Mapping[str, Any], key: str = "accuracy_mean") -> float:
    """Returns an accuracy in the scores of one evaluation, in per cent, or NaN as `accuracy`."""
    return math.nan if scores.get("not_finite") else 100 * number(scores[key])


def curve(run: Any, when: str = "before") -> list[float]:
    """Returns the accuracy at each evaluation, as `accuracy`."""
    return [accuracy_of(line[when]) for line in run.metrics]


def after(run: Any) -> float:
    """Returns the accuracy after one more local training, in per cent."""
    return accuracy(run, "after")


def best(run: Any, key: str = "accuracy_mean") -> float:
    """Returns the served model's accuracy (%) at the evaluation with the best validation score."""
    best_round = run.metrics[-1]["best_round"]
    line = next((m for m in run.metrics if m["round"] == best_round), run.metrics[-1])
    return accuracy_of(line["before"], key)


def moved(run: Any) -> int:
    """Returns the bytes of all clients, both directions."""
    return run.metrics[-1]["bytes_down"] + run.metrics[-1]["bytes_up"]


def accuracy_over(is_counted: Callable[[Mapping[str, Any], int], bool], when: str) -> Measure:
    """Returns the measure "mean accuracy (%) over some clients".

    `is_counted` takes a client's row and the number of clients. `when` is before or after, for the
    last evaluation, or best_before or best_after, for the evaluation with the best validation
    score. Without validation examples that is the last one. NaN if the run has diverged.
    """
    last = when.removeprefix("best_")

    def measure(run: Any) -> float:
        if has_diverged(run.metrics[-1]):
            return math.nan
        rows = [row for row in run.clients if is_counted(row, len(run.clients))]
        missing = (None, "")  # in a row, and in a file
        scores = [
            number(row[f"{last}_accuracy"] if score in missing else score)
            for row in rows
            for score in [row.get(f"{when}_accuracy")]
        ]
        return 100 * float(np.mean(scores))

    return measure


def plateau(run: Any, when: str = "before") -> str:
    """Tells if the last quarter of the evaluations is within half a point of the third quarter."""
    values = curve(run, when)
    quarter = len(values) // 4
    if has_diverged(run.metrics[-1]):
        return "diverged"
    if not quarter:
        return "too short to tell"
    last, earlier = np.mean(values[-quarter:]), np.mean(values[-2 * quarter : -quarter])
    return "plateau" if abs(last - earlier) <= 0.5 else "not converged"


def cell(value: Any) -> str:
    """Formats a mean and its deviation, or any other content of a cell."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        value = (value["mean"], value["std"])
    if value is None:
        return "-"
    mean, std = (value, None) if isinstance(value, float | int) else value
    if math.isnan(mean):
        return "-"
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"
