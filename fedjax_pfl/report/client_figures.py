"""The scores of single clients in one picture, and in words where there are too many."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes

from fedjax_pfl.core.scores import Metric
from fedjax_pfl.report.drawing import (
    PER_CENT,
    STAGE_COLOURS,
    STAGE_MARKERS,
    STAGES,
    Picture,
    canvas,
    legend,
    score_axis,
    shorten,
)
from fedjax_pfl.report.numbers import number, show_score, spoken, word

MOST_POINTS = 1000  # clients: beyond, points hide each other and make a page of megabytes
_MOST_BARS = 60  # clients: beyond, bars are too thin to read and the figure becomes a scatter
_WIDEST, _LONGEST = 70, 16  # characters of all names under an axis that lie flat, and of one
_BINS = 40
_QUANTILES = {  # from the worst score to the best
    "worst": 0.0,
    "5 % are at most as good": 0.05,
    "25 %": 0.25,
    "median": 0.5,
    "75 %": 0.75,
    "95 %": 0.95,
    "best": 1.0,
}


def draw(clients: Sequence[Mapping[str, Any]], metric: Metric) -> Picture | None:
    """Draws the final scores of clients: a bar, a point or, of many, a histogram.

    Returns None if no client has a score.

    Args:
      clients: Rows of clients.csv.
      metric: The score.
    """
    rows = [row for row in clients if not math.isnan(number(row.get(f"before_{metric.name}")))]
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: number(row[f"before_{metric.name}"]))
    before, after = (
        [number(row.get(f"{stage}_{metric.name}")) for row in rows] for stage in STAGES
    )
    active = [bool(row.get("active", True)) for row in rows]
    figure, axes = canvas(f"{word(metric)} of each client")
    if len(rows) <= _MOST_BARS:
        _client_bars(axes, [client_name(row) for row in rows], before, after, active)
        order = "Clients are sorted by the score as served."
        score_axis(axes, metric)
    elif len(rows) <= MOST_POINTS:
        _client_points(axes, [number(row["train_examples"]) for row in rows], before, after, active)
        order = "Each client is drawn at its number of training examples."
        score_axis(axes, metric)
    else:
        _histogram(axes, metric, before, after, active)
        order = "The height is the number of clients with such a score."
    legend(axes)
    caption = f"Final {spoken(metric)} of each client on its own test examples. {order}"
    alt = (
        f"{word(metric)} of {len(rows)} clients before local training, from "
        f"{show_score(metric, before[0])} to {show_score(metric, before[-1])}."
    )
    return Picture(figure, caption, alt)


def client_name(row: Mapping[str, Any]) -> str:
    """Whose examples a client has, or its number."""
    return str(row.get("owner") or row["client"])


def _client_bars(
    axes: Axes, names: list[str], before: list[float], after: list[float], active: list[bool]
) -> None:
    for taking_part, label in ((True, "before"), (False, "before, not taking part")):
        at = [i for i, a in enumerate(active) if a == taking_part]
        if at:
            style: dict[str, Any] = {} if taking_part else {"hatch": "///", "edgecolor": "white"}
            axes.bar(
                at, [before[i] for i in at], color=STAGE_COLOURS["before"], label=label, **style
            )
    if not all(map(math.isnan, after)):
        axes.plot(
            range(len(after)),
            after,
            STAGE_MARKERS["after"],
            color=STAGE_COLOURS["after"],
            label="after",
            markersize=5,
            markeredgecolor="white",
            markeredgewidth=0.6,
        )
    crowded, wide = len(names) > 30, sum(map(len, names)) > _WIDEST
    shown = [shorten(name, _LONGEST) for name in names]
    axes.set_xticks(
        range(len(names)), shown, fontsize=7 if crowded else 9, rotation=90 if wide else 0
    )
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.7, max(len(names), 4) - 0.3)  # a bar of a lonely client stays a bar
    axes.set_xlabel("client")


def _client_points(
    axes: Axes, size: list[float], before: list[float], after: list[float], active: list[bool]
) -> None:
    for stage, values in (("before", before), ("after", after)):
        for taking_part, label in ((True, stage), (False, f"{stage}, not taking part")):
            at = [i for i, a in enumerate(active) if a == taking_part and not math.isnan(values[i])]
            if at:
                axes.scatter(
                    [size[i] for i in at],
                    [values[i] for i in at],
                    s=18,
                    label=label,
                    alpha=0.65,
                    marker=STAGE_MARKERS[stage],
                    linewidths=0.8,
                    edgecolors=STAGE_COLOURS[stage],
                    facecolors=STAGE_COLOURS[stage] if taking_part else "none",
                )
    if min(size) > 0 and max(size) > 20 * min(size):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.set_xlabel("training examples of the client")


def _histogram(
    axes: Axes, metric: Metric, before: list[float], after: list[float], active: list[bool]
) -> None:
    """Outlines of how many clients have which score, before and after local training."""
    takes_part = np.array(active)
    scores = {"before": np.array(before), "after": np.array(after)}
    finite = np.concatenate([values[np.isfinite(values)] for values in scores.values()])
    middle, width = (finite.max() + finite.min()) / 2, np.ptp(finite)
    width = max(width, 1e-6 * abs(middle)) or 1.0  # scores that are alike but for rounding
    edges = np.linspace(middle - width / 2, middle + width / 2, _BINS + 1)
    for stage, values in scores.items():
        for which, label in ((takes_part, stage), (~takes_part, f"{stage}, not taking part")):
            counts, _ = np.histogram(values[which & np.isfinite(values)], edges)
            if counts.any():
                axes.stairs(
                    counts,
                    edges,
                    label=label,
                    color=STAGE_COLOURS[stage],
                    linestyle="-" if label == stage else "--",
                    fill=label == "before",
                    alpha=0.45 if label == "before" else 1.0,
                    linewidth=1.6,
                )
    if metric.unit == "%":
        axes.xaxis.set_major_formatter(PER_CENT)
    axes.set_xlabel(spoken(metric))
    axes.set_ylabel("clients")
    axes.set_ylim(bottom=0)


def quantiles(values: Sequence[float], metric: Metric) -> dict[str, float]:
    """Returns the worst, the median and so on of the finite scores, by their names."""
    scores = np.array(values)
    scores = scores[np.isfinite(scores)]
    if not len(scores):
        return dict.fromkeys(_QUANTILES, math.nan)
    shares = [s if metric.higher_is_better else 1 - s for s in _QUANTILES.values()]
    return dict(zip(_QUANTILES, np.quantile(scores, shares).tolist(), strict=True))
