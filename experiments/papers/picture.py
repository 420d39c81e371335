"""Draws the curves of a published table's cells with the published numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.papers.table import Table, accuracy, after, best, mean_of
from fedjax_pfl.algorithms import VARIANT
from fedjax_pfl.report import drawing

Curves = dict[str, dict[str, Any]]  # by "row/column" and seed
ON_CURVES = (accuracy, after, best)  # measures that lie on the curves


def picture(name: str, table: Table, curves: Curves) -> Figure | None:
    """Draws accuracy over rounds, a panel per column, with the published numbers at the right.

    Columns of one dataset share a scale. A column has a panel if its measure lies on the curves.
    Returns None if no column has.
    """
    labels = [tuple(label.split("/")) for label in curves]
    columns = [
        one
        for one in table.columns
        if table.measures(one)[0] in ON_CURVES and any(column == one for _, column in labels)
    ]
    if not columns:
        return None
    there = [row for row in table.rows if any((row, one) in labels for one in columns)]
    colours = {row: drawing.COLOURS[i % len(drawing.COLOURS)] for i, row in enumerate(there)}
    width = max(drawing.WIDTH, 3.7 * len(columns))
    sheet = drawing.new_figure(f"{name}: lines are ours, points the published numbers", width, 4.2)
    panels = sheet.subplots(1, len(columns), squeeze=False)[0]
    heights: dict[str, list[float]] = {}  # by dataset, as the panels
    alike: dict[str, list[Axes]] = {}
    for axes, column in zip(panels, columns, strict=True):
        drawing.style_axes(axes).set(title=column, xlabel="round")
        rows = [row for row in there if (row, column) in labels]
        seen = heights.setdefault(table.dataset(column), [])
        alike.setdefault(table.dataset(column), []).append(axes)
        for row in rows:
            own = curves[f"{row}/{column}"]
            seen += _line(axes, own, table.reported, row, colours[row])
        end = axes.get_xlim()[1]
        for i, row in enumerate(rows):
            seen += _point(axes, table, (row, column), end * (1 + 0.03 * i), colours[row])
    for dataset, seen in heights.items():
        low, high = min(seen), max(seen)
        span = max(high - low, 4)  # the curve is cut off this many points below
        lowest = min(axes.dataLim.y0 for axes in alike[dataset])
        for axes in alike[dataset]:
            axes.set_ylim(max(low - span, lowest - span / 10), high + span / 10)
    panels[0].set_ylabel("accuracy (%)")
    lines = {line.get_label(): line for axes in panels for line in axes.lines}
    names = [f"{row} ({VARIANT})" if row in table.variants else row for row in there]
    handles, few = [lines[row] for row in there], min(len(there), 6)
    sheet.legend(handles, names, loc="outside lower center", ncols=few, frameon=False, fontsize=9)
    return sheet


def _line(axes: Axes, own: Mapping[str, Any], stage: str, row: str, colour: str) -> Sequence[float]:
    """Draws the mean and range over seeds; returns the heights of the second half and the top."""
    each = [dict(zip(one["round"], one[stage], strict=True)) for one in own.values()]
    rounds = sorted(set.intersection(*map(set, each)))
    values = np.array([[curve[r] for r in rounds] for curve in each])
    axes.plot(rounds, values.mean(0), color=colour, label=row, linewidth=1.4)
    axes.fill_between(rounds, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
    return [*values[:, len(rounds) // 2 :].ravel().tolist(), values.max()]


def _point(
    axes: Axes, table: Table, cell: tuple[str, str], place: float, colour: str
) -> list[float]:
    """Draws the published mean and deviation; returns their heights."""
    value = table.published(*cell)
    if value is None:
        return []
    mean, std = mean_of(value), 0.0 if isinstance(value, int | float) else value[1]
    axes.errorbar(place, mean, std, fmt="o", markersize=4, color=colour, capsize=2, linewidth=1)
    return [mean - std, mean + std]
