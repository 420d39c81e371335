"""Figure of the scores of all clients, and quantiles for many clients."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes

from fedjax_pfl.core.scores import Metric
from fedjax_pfl.report.drawing import (
    PERCENT_FORMATTER,
    STAGE_COLOURS,
    STAGE_MARKERS,
    STAGES,
    Picture,
    legend,
    new_axes,
    score_axis,
    shorten,
)
from fedjax_pfl.report.numbers import format_score, metric_name, metric_title, number

MAX_POINTS = 1000  # with more clients, points overlap and the page takes megabytes
_MAX_BARS = 60  # with more clients, bars are too thin to read
_MAX_AXIS_CHARACTERS = 70  # horizontal labels below an axis
_MAX_NAME = 16
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
    """Draws the final scores of clients as bars, as points or, for many clients, as a histogram.

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
    figure, axes = new_axes(f"{metric_title(metric)} of each client")
    if len(rows) <= _MAX_BARS:
        _client_bars(axes, [client_name(row) for row in rows], before, after, active)
        order = "Clients are sorted by the score as served."
        score_axis(axes, metric)
    elif len(rows) <= MAX_POINTS:
        _client_points(axes, [number(row["train_examples"]) for row in rows], before, after, active)
        order = "Each client is drawn at its number of training examples."
        score_axis(axes, metric)
    else:
        _histogram(axes, metric, before, after, active)
        order = "The height is the number of clients with such a score."
    legend(axes)
    caption = f"Final {metric_name(metric)} of each client on its own test examples. {order}"
    alt = (
        f"{metric_title(metric)} of {len(rows)} clients before local training, from "
        f"{format_score(metric, before[0])} to {format_score(metric, before[-1])}."
    )
    return Picture(figure, caption, alt)


def client_name(row: Mapping[str, Any]) -> str:
    """Returns the name of the owner of a client's examples, or the client's number."""
    return str(row.get("owner") or row["client"])


def _client_bars(
    axes: Axes, names: list[str], before: list[float], after: list[float], active: list[bool]
) -> None:
    """Draws a bar per client before local training, and a marker after it.

    Args:
      axes: Axes to draw on.
      names: Names of the clients.
      before: Scores before local training, one per client.
      after: Scores after local training, one per client.
      active: Whether each client takes part in training.
    """
    for taking_part, label in ((True, "before"), (False, "before, not taking part")):
        selected = [i for i, a in enumerate(active) if a == taking_part]
        if selected:
            style: dict[str, Any] = {} if taking_part else {"hatch": "///", "edgecolor": "white"}
            axes.bar(
                selected,
                [before[i] for i in selected],
                color=STAGE_COLOURS["before"],
                label=label,
                **style,
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
    is_crowded, is_wide = len(names) > 30, sum(map(len, names)) > _MAX_AXIS_CHARACTERS
    tick_labels = [shorten(name, _MAX_NAME) for name in names]
    axes.set_xticks(
        range(len(names)),
        tick_labels,
        fontsize=7 if is_crowded else 9,
        rotation=90 if is_wide else 0,
    )
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.7, max(len(names), 4) - 0.3)  # keep the bars of few clients narrow
    axes.set_xlabel("client")


def _client_points(
    axes: Axes, size: list[float], before: list[float], after: list[float], active: list[bool]
) -> None:
    """Draws scores over the clients' numbers of training examples.

    Args:
      axes: Axes to draw on.
      size: Training examples of each client.
      before: Scores before local training, one per client.
      after: Scores after local training, one per client.
      active: Whether each client takes part in training.
    """
    for stage, values in (("before", before), ("after", after)):
        for taking_part, label in ((True, stage), (False, f"{stage}, not taking part")):
            selected = [
                i for i, a in enumerate(active) if a == taking_part and not math.isnan(values[i])
            ]
            if selected:
                axes.scatter(
                    [size[i] for i in selected],
                    [values[i] for i in selected],
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
    """Draws the number of clients by score, before and after local training.

    Args:
      axes: Axes to draw on.
      metric: The score.
      before: Scores before local training, one per client.
      after: Scores after local training, one per client.
      active: Whether each client takes part in training.
    """
    takes_part = np.array(active)
    scores = {"before": np.array(before), "after": np.array(after)}
    finite = np.concatenate([values[np.isfinite(values)] for values in scores.values()])
    middle, width = (finite.max() + finite.min()) / 2, np.ptp(finite)
    width = max(width, 1e-6 * abs(middle)) or 1.0  # scores that differ only by rounding
    edges = np.linspace(middle - width / 2, middle + width / 2, _BINS + 1)
    for stage, values in scores.items():
        for selected, label in ((takes_part, stage), (~takes_part, f"{stage}, not taking part")):
            counts, _ = np.histogram(values[selected & np.isfinite(values)], edges)
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
        axes.xaxis.set_major_formatter(PERCENT_FORMATTER)
    axes.set_xlabel(metric_name(metric))
    axes.set_ylabel("clients")
    axes.set_ylim(bottom=0)


def quantiles(values: Sequence[float], metric: Metric) -> dict[str, float]:
    """Returns quantiles of the finite scores by name, from worst to best."""
    scores = np.array(values)
    scores = scores[np.isfinite(scores)]
    if not len(scores):
        return dict.fromkeys(_QUANTILES, math.nan)
    shares = [s if metric.higher_is_better else 1 - s for s in _QUANTILES.values()]
    return dict(zip(_QUANTILES, np.quantile(scores, shares).tolist(), strict=True))
