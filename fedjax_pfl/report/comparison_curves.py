"""Figure of a comparison: curves over rounds, bytes and seconds, with bands over seeds."""

import itertools
import textwrap
from collections.abc import Mapping

from fedjax_pfl.core.metrics import Metric
from fedjax_pfl.report import drawing
from fedjax_pfl.report.drawing import Picture
from fedjax_pfl.report.figures import MAX_MARKERS, Curve
from fedjax_pfl.report.numbers import format_score, metric_name, metric_title


def draw(rows: Mapping[str, Curve], metric: Metric) -> Picture:
    """Draws mean scores before local training over rounds, bytes moved and simulated seconds.

    There is no panel for bytes or seconds if no run has any. `rows` are the curves of the compared
    rows by label; one without rounds is left out. A band reaches from the lowest to the highest
    seed.
    """
    rows = {label: curve for label, curve in rows.items() if curve.rounds}
    moved = any(value > 0 for curve in rows.values() for value in curve.bytes_moved)
    is_timed = any(curve.seconds for curve in rows.values())
    count = 1 + moved + is_timed
    has_band = any(
        low < high
        for curve in rows.values()
        for low, high in zip(curve.lowest, curve.highest, strict=True)
    )
    wrapped = [textwrap.fill(label, 60).replace("$", r"\$") for label in rows]
    height = 4.2 + 0.1 * sum(label.count("\n") + 1 for label in wrapped)
    figure = drawing.new_figure(
        f"{metric_title(metric)} before local training",
        drawing.WIDTH * (1 + count) / 2,
        height,
    )
    panels = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    looks = (drawing.COLOURS, drawing.MARKERS, drawing.DASHES)
    styles = zip(*map(itertools.cycle, looks), strict=True)
    for curve, (colour, marker, dash) in zip(rows.values(), styles, strict=False):
        crowded = len(curve.rounds) > MAX_MARKERS
        values = [curve.rounds, *[curve.bytes_moved] * moved, *[curve.seconds] * is_timed]
        for axes, x in zip(panels, values, strict=True):
            if not x:  # a run without simulated time
                continue
            axes.plot(
                x,
                curve.score,
                color=colour,
                linestyle=dash,
                marker="" if crowded else marker,
                markersize=4,
                linewidth=1.6,
                clip_on=False,
                zorder=3,
            )
            if max(x) > min(x):
                axes.fill_between(
                    x, curve.lowest, curve.highest, color=colour, alpha=0.15, linewidth=0
                )
            else:  # a band needs two points
                axes.vlines(x, curve.lowest, curve.highest, color=colour, alpha=0.5)
    for axes in map(drawing.style_axes, panels):
        axes.label_outer()
    drawing.round_axis(panels[0], sorted({r for curve in rows.values() for r in curve.rounds}))
    drawing.score_axis(panels[0], metric)
    if moved:
        drawing.bytes_axis(panels[1])
        panels[1].set_xlabel("bytes moved, down and up, all clients")
    if is_timed:
        panels[-1].set_xlabel("simulated seconds")
    figure.legend(
        panels[0].lines,  # with labels of the lines, those that start with "_" would be missing
        wrapped,
        loc="outside lower left",
        ncols=min(count, 2),
        frameon=False,
        fontsize=9,
        labelcolor=drawing.INK,
        handlelength=3,
    )
    caption = f"Mean {metric_name(metric)} over clients, before local training; mean over seeds."
    if has_band:
        caption += " Bands reach from the lowest to the highest seed."
    ends = [f"{label}: {format_score(metric, curve.score[-1])}." for label, curve in rows.items()]
    return Picture(figure, caption, f"{caption} Final scores: {' '.join(ends)}")
