"""What a published table is to us: its cells, the settings of each, and how we measure them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

PAPERS = Path(__file__).parent
Measure = Callable[[Any], float]  # of a run that is read back, or of a runner's result
Published = float | Sequence[float] | None  # a mean, a mean and its deviation, or no number


def _as_it_is(config: ConfigDict) -> None:
    """Nothing else changes."""


def _possible(config: ConfigDict) -> str:
    """Nothing keeps a cell from being run."""
    return ""


class Quick(NamedTuple):
    """The scale that ends within minutes on two cores."""

    columns: tuple[str, ...]  # those that are run where no cells are chosen
    rounds: int  # on digits
    light: Mapping[str, int] = {}  # rounds on a column's own dataset, where it is small enough
    shrink: Callable[[ConfigDict], None] = _as_it_is  # what else changes there


class Table(NamedTuple):
    """A table of a paper, and rows of ours. Columns differ in data, rows in the method."""

    about: str  # the paper, and what its numbers are
    ours: str  # what ours are, and the number shown beside them
    cells: Mapping[str, Mapping[str, Published]]  # by row and column
    dataset: Callable[[str], str]  # of a column
    # Settings of (row, column) on a dataset, for so many rounds; None: the published number. Where
    # the dataset is not the column's own they are those of a small federation.
    settings: Callable[[str, str, str, int | None], ConfigDict]
    measures: Callable[[str], tuple[Measure, Measure | None]]  # of a column: ours, and beside it
    beside: str  # the name of the second
    quick: Quick
    impossible: Callable[[ConfigDict], str] = _possible  # why a cell cannot be run
    variants: Sequence[str] = ()  # rows that no paper has: variants of this library

    @property
    def reported(self) -> str:
        """Which accuracy `ours` is: before local training or after it."""
        return "after" if self.beside == "before" else "before"

    @property
    def columns(self) -> list[str]:
        """In the order in which they first appear."""
        return list(dict.fromkeys(column for row in self.cells.values() for column in row))

    @property
    def rows(self) -> list[str]:
        """The paper's methods, then variants of this library."""
        return [*self.cells, *self.variants]

    def published(self, row: str, column: str) -> Published:
        """The paper's number, where it has one."""
        return self.cells.get(row, {}).get(column)


class Cell(NamedTuple):
    """One place of a table."""

    row: str
    column: str
    published: Published


def cells_of(table: Table) -> list[Cell]:
    """All cells of a table, column by column."""
    return [
        Cell(row, column, table.published(row, column))
        for column in table.columns
        for row in table.rows
    ]


def published(paper: str) -> dict[str, Any]:
    """The numbers of a paper, as they are kept in experiments/papers."""
    return json.loads((PAPERS / paper / "published.json").read_text())


def mean_of(published: float | Sequence[float]) -> float:
    """The published number without its deviation."""
    return float(published if isinstance(published, int | float) else published[0])


def readable(paper: str, study: str) -> dict[str, Any]:
    """The numbers that a paper states of the figures that a study is about, by figure."""
    return {
        name: {"of": one["of"], **one["values"]}
        for name, one in published(paper)["figures"].items()
        if one["study"] == study and "values" in one
    }


def accuracy(run: Any, when: str = "before", key: str = "accuracy_mean") -> float:
    """Mean accuracy over clients at the last evaluation, in per cent."""
    return 100 * run.metrics[-1][when][key]


def after(run: Any) -> float:
    """The same after one more local training."""
    return accuracy(run, "after")


def best(run: Any, key: str = "accuracy_mean") -> float:
    """Accuracy as served in per cent, at the evaluation that is best on validation examples."""
    chosen = run.metrics[-1]["best_round"]
    line = next((m for m in run.metrics if m["round"] == chosen), run.metrics[-1])
    return 100 * line["before"][key]


def moved(run: Any) -> int:
    """Bytes of all clients, both directions."""
    return run.metrics[-1]["bytes_down"] + run.metrics[-1]["bytes_up"]


def among(chosen: Callable[[Mapping[str, Any], int], bool], when: str) -> Measure:
    """Mean accuracy in per cent over the clients for which chosen(row of N, N) holds.

    when: before or after, at the last evaluation; best_before or best_after, at that which is best
    on validation examples, or at the last one where there are none.
    """
    last = when.removeprefix("best_")

    def measure(run: Any) -> float:
        found = [row for row in run.clients if chosen(row, len(run.clients))]
        own = [row.get(f"{when}_accuracy") for row in found]
        unknown = (None, "")  # as in a row, and as in a file
        scores = [
            row[f"{last}_accuracy"] if score in unknown else score
            for row, score in zip(found, own, strict=True)
        ]
        return 100 * float(np.mean(np.array(scores, float)))

    return measure


def plateau(run: Any, when: str = "before") -> str:
    """Whether the last quarter of the evaluations is within half a point of the one before."""
    curve = [100 * line[when]["accuracy_mean"] for line in run.metrics]
    quarter = len(curve) // 4
    if not quarter:
        return "too short to tell"
    last, earlier = np.mean(curve[-quarter:]), np.mean(curve[-2 * quarter : -quarter])
    return "plateau" if abs(last - earlier) <= 0.5 else "not converged"


def cell(value: Any) -> str:
    """A mean and its deviation, or whatever else stands in a table."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        value = (value["mean"], value["std"])
    if value is None:
        return "-"
    mean, std = (value, None) if isinstance(value, float | int) else value
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"
