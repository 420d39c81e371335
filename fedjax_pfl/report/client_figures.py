"""Figure of the scores of all clients, and quantiles for many clients."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes

from fedjax_pfl.core.metrics import Metric
from fedjax_pfl.report import drawing
from fedjax_pfl.report.numbers import format_score, metric_name, metric_title, number

MAX_POINTS = 1000  # with more clients, points overlap and the page takes megabytes
_MAX_ROWS = 60  # with more clients, names are too small to read
MAX_AXIS_CHARACTERS = 70  # horizontal labels below an axis
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


_PARTICIPANT = "participant"
# Markers by the role of a client in the last phase; None: that of the stage.
_MARKERS = {_PARTICIPANT: None, "not taking part": None, "attacker": "X"}
_LINES = {_PARTICIPANT: "-", "not taking part": "--", "attacker": ":"}


class _Scores(NamedTuple):
    """Scores of clients, arrays of shape [N]; NaN is a missing score."""

    before: np.ndarray  # before local training
    after: np.ndarray  # after it
    roles: np.ndarray  # the role of a client in the last phase, a key of `_MARKERS`

    def groups(self, stage: str) -> Iterator[tuple[np.ndarray, str, str]]:
        """Yields (bool [N], role, label) of the clients with a score, one role after the other.

        `stage` is "before" or "after" local training. A role without clients is left out.
        """
        finite = np.isfinite(getattr(self, stage))
        for role in _MARKERS:
            mask = (self.roles == role) & finite
            if mask.any():
                yield mask, role, stage if role == _PARTICIPANT else f"{stage}, {role}"


def _role(row: Mapping[str, Any], held_out: bool) -> str:
    """Returns the role of a client, a row of clients.csv, in the last phase."""
    if bool(row.get("active", True)) is held_out:
        return "not taking part"
    return "attacker" if row.get("attacker") else _PARTICIPANT


def draw(
    clients: Sequence[Mapping[str, Any]], metric: Metric, *, held_out: bool = False
) -> drawing.Picture | None:
    """Draws the final scores of clients, rows of clients.csv, before and after local training.

    Up to 60 clients are a pair of points each, sorted by score. Up to 1,000 are points over the
    number of training examples. More are a histogram. Clients without a score before local training
    are left out. Returns None if none has one. With `held_out` the clients that took part are the
    held-out ones.
    """
    rows = [row for row in clients if not math.isnan(number(row.get(f"before_{metric.name}")))]
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: number(row[f"before_{metric.name}"]))
    before, after = (
        np.array([number(row.get(f"{stage}_{metric.name}")) for row in rows])
        for stage in drawing.STAGES
    )
    roles = np.array([_role(row, held_out) for row in rows])
    scores = _Scores(before=before, after=after, roles=roles)
    figure, axes = drawing.new_axes(f"{metric_title(metric)} of each client")
    if len(rows) <= _MAX_ROWS:
        _client_pairs(axes, [client_name(row) for row in rows], scores)
        order = "Clients are sorted by the score as served."
        drawing.score_axis(axes, metric)
    elif len(rows) <= MAX_POINTS:
        _client_points(axes, np.array([number(row["train_examples"]) for row in rows]), scores)
        order = "Each client is drawn at its number of training examples."
        drawing.score_axis(axes, metric)
    else:
        _histogram(axes, metric, scores)
        order = "The height is the number of clients with such a score."
    drawing.legend(axes)
    caption = f"Final {metric_name(metric)} of each client on its own test examples. {order}"
    low, high = (format_score(metric, before[i]) for i in (0, -1))
    count = f"{len(rows)} clients before local training"
    alt = f"{metric_title(metric)} of {count}, from {low} to {high}."
    return drawing.Picture(figure, caption, alt)


def client_name(row: Mapping[str, Any]) -> str:
    """Returns the name of the owner of a client's examples, or the client's number."""
    return str(row.get("owner") or row["client"])


def _client_pairs(axes: Axes, names: list[str], scores: _Scores) -> None:
    """Draws clients `names` as two points each, before and after local training, with a line."""
    x = np.arange(len(names))
    axes.vlines(x, scores.before, scores.after, color="#999999", linewidth=1.2)
    for stage in drawing.STAGES:
        for mask, role, label in scores.groups(stage):
            colour = drawing.STAGE_COLOURS[stage]
            axes.plot(
                x[mask],
                getattr(scores, stage)[mask],
                _MARKERS[role] or drawing.STAGE_MARKERS[stage],
                color=colour,
                label=label,
                markersize=8 if stage == "before" else 5,  # both are visible at one score
                markerfacecolor=colour if role == _PARTICIPANT else "none",
            )
    is_crowded, is_wide = len(names) > 30, sum(map(len, names)) > MAX_AXIS_CHARACTERS
    axes.set_xticks(
        range(len(names)),
        [drawing.shorten(name, _MAX_NAME) for name in names],
        fontsize=7 if is_crowded else 9,
        rotation=90 if is_wide else 0,
    )
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.7, max(len(names), 4) - 0.3)  # few clients do not spread
    axes.set_xlabel("client")


def _client_points(axes: Axes, sizes: np.ndarray, scores: _Scores) -> None:
    """Draws scores over the clients' numbers of training examples, `sizes` [N]."""
    for stage in drawing.STAGES:
        for mask, role, label in scores.groups(stage):
            colour = drawing.STAGE_COLOURS[stage]
            axes.scatter(
                sizes[mask],
                getattr(scores, stage)[mask],
                s=18,
                label=label,
                alpha=0.65,
                marker=_MARKERS[role] or drawing.STAGE_MARKERS[stage],
                linewidths=0.8,
                edgecolors=colour,
                facecolors=colour if role == _PARTICIPANT else "none",
            )
    if sizes.min() > 0 and sizes.max() > 20 * sizes.min():
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.set_xlabel("training examples of the client")


def _histogram(axes: Axes, metric: Metric, scores: _Scores) -> None:
    """Draws a histogram: numbers of clients by score, before and after local training."""
    values = np.concatenate([scores.before, scores.after])
    finite = values[np.isfinite(values)]
    middle, width = (finite.max() + finite.min()) / 2, np.ptp(finite)
    width = max(width, 1e-6 * abs(middle)) or 1.0  # scores that differ only by rounding
    edges = np.linspace(middle - width / 2, middle + width / 2, _BINS + 1)
    for stage in drawing.STAGES:
        for mask, role, label in scores.groups(stage):
            axes.stairs(
                np.histogram(getattr(scores, stage)[mask], edges)[0],
                edges,
                label=label,
                color=drawing.STAGE_COLOURS[stage],
                linestyle=_LINES[role],
                fill=label == "before",
                alpha=0.45 if label == "before" else 1.0,
                linewidth=1.6,
            )
    if metric.unit == "%":
        axes.xaxis.set_major_formatter(drawing.PERCENT_FORMATTER)
    axes.set_xlabel(metric_name(metric))
    axes.set_ylabel("clients")
    axes.set_ylim(bottom=0)


def quantiles(values: Sequence[float], metric: Metric) -> dict[str, float]:
    """Returns seven quantiles of finite scores by name, from "worst" over "median" to "best".

    They are NaN if no score is finite.
    """
    scores = np.array(values)
    scores = scores[np.isfinite(scores)]
    if not len(scores):
        return dict.fromkeys(_QUANTILES, math.nan)
    shares = [s if metric.higher_is_better else 1 - s for s in _QUANTILES.values()]
    return dict(zip(_QUANTILES, np.quantile(scores, shares).tolist(), strict=True))
