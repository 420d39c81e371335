"""The figures of a run: pure functions from its recorded numbers to matplotlib figures.

Blue circles are the model as served, vermilion squares the model after local training. The colours
are Okabe and Ito's, and shape or line style says the same thing once more for who cannot tell the
colours apart. The background is always white, so that a figure can be printed and pasted.
"""

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from fedjax_pfl.core.scores import Metric
from fedjax_pfl.report import client_figures
from fedjax_pfl.report.drawing import (
    COLOURS,
    DASHES,
    INK,
    MARKERS,
    STAGE_COLOURS,
    STAGE_MARKERS,
    STAGES,
    WIDTH,
    Picture,
    bytes_axis,
    canvas,
    dressed,
    legend,
    round_axis,
    score_axis,
    sheet,
    shorten,
)
from fedjax_pfl.report.numbers import human_bytes, metric_of, number, show_score, spoken, word
from fedjax_pfl.report.run_reader import Record

_DIRECTIONS = {"down": "#0072B2", "up": "#E69F00"}
_OTHER = "#666666"
_SPREAD = ("mean", "std", "worst10")
_MOST_LAYERS = 20  # the smallest layers beyond are drawn as one bar
_MOST_MARKERS = 40  # evaluations: beyond, markers hide the line


class Curve(NamedTuple):
    """What one row of a comparison draws: at each evaluation, means over its seeds."""

    rounds: Sequence[int]
    moved: Sequence[float]  # bytes
    score: Sequence[float]


def draw(
    metrics: Sequence[Record],
    clients: Sequence[Mapping[str, Any]],
    traffic: Mapping[str, Any],
    beside: Mapping[str, Curve] = {},
) -> dict[str, Picture]:
    """All figures that these numbers have something to show in, by file name, in reading order.

    beside: curves of other methods on the same work, by their names.
    """
    metric = metric_of(metrics)
    drawn = {
        "score_rounds": _over_rounds(metrics, metric, beside),
        "score_bytes": _over_bytes(metrics, metric, beside),
        "train_loss": _train_loss(metrics),
        "clients": client_figures.draw(clients, metric),
        "traffic": _traffic(traffic),
    }
    return {key: picture for key, picture in drawn.items() if picture is not None}


def _over_rounds(metrics: Sequence[Record], metric: Metric, beside: Mapping[str, Curve]) -> Picture:
    figure, axes = canvas(f"{word(metric)} over rounds")
    rounds = [record["round"] for record in metrics]
    for stage in _stages(metrics):
        mean, std, worst = (_series(metrics, stage, f"{metric.name}_{k}") for k in _SPREAD)
        # Side by side where there is but one evaluation, as the whiskers would hide each other.
        at = rounds if len(rounds) > 1 else [rounds[0] + (0.1 if stage == "after" else -0.1)]
        _line(axes, at, mean, stage, f"{stage}: mean ± std")
        low = [m - s for m, s in zip(mean, std, strict=True)]
        high = [m + s for m, s in zip(mean, std, strict=True)]
        colour = STAGE_COLOURS[stage]
        if len(rounds) > 1:
            axes.fill_between(rounds, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(rounds, worst, color=colour, linestyle="--", label=f"{stage}: worst 10 %")
        else:
            # A band and a dashed line need two points; one evaluation gets whiskers and a dash.
            axes.errorbar(at, mean, std, color=colour, capsize=5, alpha=0.6)
            axes.plot(at, worst, "_", color=colour, markersize=14, label=f"{stage}: worst 10 %")
    _others(axes, {label: (curve.rounds, curve.score) for label, curve in beside.items()})
    for record, following in itertools.pairwise(metrics):
        if record.get("phase") != following.get("phase"):
            axes.axvline(record["round"], color=INK, linewidth=0.8, linestyle=":")
    best = metrics[-1].get("best_round")
    if best is not None and len(rounds) > 1:
        axes.axvline(best, color="#009E73", linewidth=1.2, linestyle="-.", label="best round")
    round_axis(axes, [record["round"] for record in metrics])
    score_axis(axes, metric)
    legend(axes)
    caption = (
        f"{word(metric)} on the clients' test examples: the mean over clients, one standard "
        "deviation over clients on either side, and the mean of the worst tenth of the clients."
    )
    phases = len({record.get("phase") for record in metrics}) > 1
    if best is not None:
        where = " in the last phase" if phases else ""
        caption += f" Round {best} was best on the validation examples{where}."
    if phases:
        caption += " A dotted line is drawn where a phase ended."
    return Picture(figure, caption, f"{word(metric)} over rounds. {_ends(metrics, metric)}")


def _over_bytes(
    metrics: Sequence[Record], metric: Metric, beside: Mapping[str, Curve]
) -> Picture | None:
    moved = [number(r.get("bytes_down")) + number(r.get("bytes_up")) for r in metrics]
    if not any(total > 0 for total in moved):
        return None
    figure, axes = canvas(f"{word(metric)} over bytes moved")
    for stage in _stages(metrics):
        _line(axes, moved, _series(metrics, stage, f"{metric.name}_mean"), stage, f"{stage}: mean")
    _others(axes, {label: (curve.moved, curve.score) for label, curve in beside.items()})
    bytes_axis(axes)
    axes.set_xlabel("bytes moved, down and up, all clients")
    score_axis(axes, metric)
    legend(axes)
    caption = f"Mean {spoken(metric)} over clients against all bytes moved up to then."
    alt = f"{word(metric)} over bytes moved. {_ends(metrics, metric)}"
    return Picture(figure, caption, f"{alt} {human_bytes(moved[-1])} were moved.")


def curves(rows: Mapping[str, Curve], metric: Metric) -> Picture:
    """Several configurations in one figure: the score over rounds, and over bytes if any moved."""
    moved = any(value > 0 for curve in rows.values() for value in curve.moved)
    wrapped = [textwrap.fill(label, 60).replace("$", r"\$") for label in rows]
    height = 4.2 + 0.1 * sum(label.count("\n") + 1 for label in wrapped)
    figure = sheet(f"{word(metric)} before local training", WIDTH * (1.5 if moved else 1), height)
    panels = figure.subplots(1, 2 if moved else 1, sharey=True, squeeze=False)[0]
    styles = zip(itertools.cycle(COLOURS), itertools.cycle(MARKERS), itertools.cycle(DASHES))
    for label, curve, (colour, marker, dash) in zip(wrapped, rows.values(), styles, strict=False):
        crowded = len(curve.rounds) > _MOST_MARKERS
        for axes, x in zip(panels, (curve.rounds, curve.moved), strict=False):
            axes.plot(
                x,
                curve.score,
                color=colour,
                linestyle=dash,
                marker="" if crowded else marker,
                markersize=4,
                linewidth=1.6,
                label=label,
                clip_on=False,
                zorder=3,
            )
    for axes in map(dressed, panels):
        axes.label_outer()
    round_axis(panels[0], sorted({r for curve in rows.values() for r in curve.rounds}))
    score_axis(panels[0], metric)
    if moved:
        bytes_axis(panels[1])
        panels[1].set_xlabel("bytes moved, down and up, all clients")
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower left",
        ncols=2 if moved else 1,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=3,
    )
    caption = f"Mean {spoken(metric)} over clients, before local training; mean over seeds."
    ends = [f"{label}: {show_score(metric, curve.score[-1])}." for label, curve in rows.items()]
    return Picture(figure, caption, f"{caption} At last, {' '.join(ends)}")


def _train_loss(metrics: Sequence[Record]) -> Picture | None:
    loss = [number(record.get("train_loss")) for record in metrics]
    if all(map(math.isnan, loss)):
        return None
    figure, axes = canvas("Training loss")
    _line(axes, [record["round"] for record in metrics], loss, "before", "training loss")
    round_axis(axes, [record["round"] for record in metrics])
    axes.set_ylabel("loss")
    alt = f"Training loss over rounds, {_plain(loss[0])} at first and {_plain(loss[-1])} at last."
    return Picture(figure, "Loss during local training.", alt)


def _traffic(traffic: Mapping[str, Any]) -> Picture | None:
    down, up = traffic.get("down", {}), traffic.get("up", {})
    names = list(dict.fromkeys([*down, *up]))
    bill = {name: (down.get(name, 0), up.get(name, 0)) for name in names}
    if not any(map(sum, bill.values())):
        return None
    if len(bill) > _MOST_LAYERS:
        largest = sorted(names, key=lambda name: -sum(bill[name]))[: _MOST_LAYERS - 1]
        rest = [bill.pop(name) for name in names if name not in set(largest)]
        bill[f"{len(rest)} smaller layers"] = (sum(d for d, _ in rest), sum(u for _, u in rest))
    figure, axes = canvas("Traffic of each layer", height=1.6 + 0.38 * len(bill))
    for side, (direction, label) in enumerate((("down", "down"), ("up", "up"))):
        values = [float(pair[side]) for pair in bill.values()]  # Python integers may pass 64 bits
        at = [i + (side - 0.5) * 0.4 for i in range(len(bill))]
        bars = axes.barh(
            at,
            values,
            height=0.38,
            color=_DIRECTIONS[direction],
            label=label,
            hatch="///" if direction == "up" else None,
            edgecolor="white",
            linewidth=0,
        )
        axes.bar_label(bars, [human_bytes(v) for v in values], padding=4, fontsize=8, color=INK)
    axes.set_yticks(range(len(bill)), [shorten(name) for name in bill])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(bill) - 0.4, -0.6)
    axes.margins(x=0.16)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color="#dddddd", linewidth=0.6)
    bytes_axis(axes)
    axes.set_xlabel("bytes, all clients and rounds")
    legend(axes)
    total_down = traffic.get("total_down", sum(down.values()))
    total_up = traffic.get("total_up", sum(up.values()))
    alt = (
        f"Bytes moved by {len(names)} layers: {human_bytes(total_down)} down and "
        f"{human_bytes(total_up)} up."
    )
    return Picture(figure, "Bytes moved in the whole run, by layer and direction.", alt)


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], stage: str, label: str) -> None:
    marker = STAGE_MARKERS[stage] if len(x) <= _MOST_MARKERS else ""
    axes.plot(
        x, y, color=STAGE_COLOURS[stage], marker=marker, markersize=5, linewidth=1.8, label=label
    )


def _others(axes: Axes, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """Thin gray lines of other methods; where nothing moved, one at the height of the last."""
    for (label, (x, y)), dash in zip(lines.items(), itertools.cycle(("--", ":"))):
        if len(x) > 1 and max(x) > min(x):
            axes.plot(x, y, color=_OTHER, linestyle=dash, linewidth=1.4, label=label)
        else:
            axes.axhline(y[-1], color=_OTHER, linestyle=dash, linewidth=1.4, label=label)


def _stages(metrics: Sequence[Record]) -> list[str]:
    return [stage for stage in STAGES if any(record.get(stage) for record in metrics)]


def _series(metrics: Sequence[Record], stage: str, key: str) -> list[float]:
    return [number((record.get(stage) or {}).get(key)) for record in metrics]


def _ends(metrics: Sequence[Record], metric: Metric) -> str:
    ends = [
        f"{STAGES[stage].capitalize()} the mean is {show_score(metric, values[0])} at round "
        f"{metrics[0]['round']} and {show_score(metric, values[-1])} at round "
        f"{metrics[-1]['round']}."
        for stage in _stages(metrics)
        for values in [_series(metrics, stage, f"{metric.name}_mean")]
    ]
    return " ".join(ends)


def _plain(value: float) -> str:
    return "not finite" if math.isnan(value) else f"{value:.4g}"
