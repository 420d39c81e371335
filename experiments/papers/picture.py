"""Draws the curves of a published table's cells with the published numbers."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.papers.table import Published, Table, accuracy, after, best, mean_of
from fedjax_pfl.algorithms import VARIANT
from fedjax_pfl.report import drawing

Curves = dict[str, dict[str, Any]]  # by "row/column" and seed
ON_CURVES = (accuracy, after, best)  # measures whose values are on the curves


def picture(name: str, table: Table, curves: Curves) -> Figure | None:
    """Draws accuracy over rounds, a panel per column, with the published numbers at the right.

    Columns of one dataset share a scale. A column has a panel if its measure is in `ON_CURVES`;
    returns None if none has one.
    """
    cells = [tuple(label.split("/")) for label in curves]
    columns = [
        column
        for column in table.columns
        if table.measures(column)[0] in ON_CURVES and any(column == c for _, c in cells)
    ]
    if not columns:
        return None
    rows = [row for row in table.rows if any((row, column) in cells for column in columns)]
    styles = {row: _style(i) for i, row in enumerate(rows)}
    width = max(drawing.WIDTH, 3.7 * len(columns))
    title = f"{name}: lines are ours, points the published numbers"
    figure = drawing.new_figure(title, width, 4.2)
    panels = figure.subplots(1, len(columns), squeeze=False)[0]
    heights: dict[str, list[float]] = {}  # by dataset, to scale its panels alike
    panels_by_dataset: dict[str, list[Axes]] = {}
    for axes, column in zip(panels, columns, strict=True):
        drawing.style_axes(axes).set(title=column, xlabel="round")
        panels_by_dataset.setdefault(table.dataset(column), []).append(axes)
        dataset_heights = heights.setdefault(table.dataset(column), [])
        rows_of_column = [row for row in rows if (row, column) in cells]
        for row in rows_of_column:
            curve = curves[f"{row}/{column}"]
            dataset_heights += _line(axes, curve, table.reported, row, styles[row])
        end = axes.get_xlim()[1]
        axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= end])
        for i, row in enumerate(rows_of_column):
            x = end * (1 + 0.03 * i)
            dataset_heights += _point(axes, x, table.published(row, column), styles[row])
    for dataset, dataset_panels in panels_by_dataset.items():
        low, high = min(heights[dataset]), max(heights[dataset])
        span = max(high - low, 4)  # curves are cut off this many points below
        lowest = min(axes.dataLim.y0 for axes in dataset_panels)
        for axes in dataset_panels:
            axes.set_ylim(max(low - span, lowest - span / 10), high + span / 10)
    panels[0].set_ylabel("accuracy (%)")
    lines = {line.get_label(): line for axes in panels for line in axes.lines}
    names = [f"{row} ({VARIANT})" if row in table.variants else row for row in rows]
    figure.legend(
        [lines[row] for row in rows],
        names,
        loc="outside lower center",
        ncols=min(len(rows), 6),
        frameon=False,
        fontsize=9,
    )
    return figure


class _Style(NamedTuple):
    """Style of a row: of its line, and of its published number."""

    colour: str
    dash: str
    marker: str


def _style(i: int) -> _Style:
    """Returns the style of row i; 28 rows differ."""
    repeats, colour = divmod(i, len(drawing.COLOURS))
    dash, marker = (options[repeats % 4] for options in (drawing.DASHES, drawing.MARKERS))
    return _Style(drawing.COLOURS[colour], dash, marker)


def _line(
    axes: Axes, by_seed: Mapping[str, Any], stage: str, label: str, style: _Style
) -> Sequence[float]:
    """Draws the mean and range over seeds up to the last round that all have, then thin lines.

    Returns the heights of the second half and the top.
    """
    seeds = [dict(zip(curve["round"], curve[stage], strict=True)) for curve in by_seed.values()]
    rounds = sorted(set.intersection(*map(set, seeds)))
    values = np.array([[curve[r] for r in rounds] for curve in seeds])
    colour = style.colour
    axes.plot(rounds, values.mean(0), style.dash, color=colour, label=label, linewidth=1.4)
    axes.fill_between(rounds, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
    for curve in seeds:
        later = [r for r in curve if r >= max(rounds, default=0)]
        if len(later) > 1 or not rounds:
            axes.plot(later, [curve[r] for r in later], style.dash, color=colour, linewidth=0.6)
    points = sorted((r, value) for curve in seeds for r, value in curve.items())
    second_half = [value for r, value in points if r > points[-1][0] / 2]
    return [*second_half, max(value for _, value in points)]


def _point(axes: Axes, x: float, published: Published, style: _Style) -> list[float]:
    """Draws a published mean and deviation at x; returns the heights of its ends."""
    if published is None:
        return []
    mean, std = mean_of(published), published[1] if isinstance(published, Sequence) else 0.0
    fmt, colour = style.marker, style.colour
    axes.errorbar(x, mean, std, fmt=fmt, markersize=4, color=colour, capsize=2, linewidth=1)
    return [mean - std, mean + std]
