"""Figures of a run: pure functions from recorded numbers to matplotlib figures.

Blue circles show the model as served, vermilion squares the model after local training. The colours
are by Okabe and Ito. Markers and line styles repeat the distinction for readers who cannot
tell the colours apart. The background is white, for print.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedjax_pfl.core.metrics import Metric
from fedjax_pfl.report import client_figures, drawing
from fedjax_pfl.report.drawing import Picture
from fedjax_pfl.report.numbers import (
    format_bytes,
    format_score,
    metric_name,
    metric_of,
    metric_title,
    number,
)
from fedjax_pfl.report.run_reader import Record

_DIRECTIONS = {"down": "#0072B2", "up": "#E69F00"}
_STATISTICS = ("mean", "std", "worst10")
_MAX_LAYERS = 20  # smaller layers share one bar
MAX_MARKERS = 40  # with more evaluations, markers hide the line


class Curve(NamedTuple):
    """Scores before local training at each evaluation, for runs that differ only in the seed."""

    rounds: Sequence[int]  # of the evaluations
    bytes_moved: Sequence[float]  # since round 0, down and up, all clients; mean over seeds
    score: Sequence[float]  # mean over clients and seeds
    lowest: Sequence[float]  # score of the seed where it is lowest, at each evaluation
    highest: Sequence[float]  # score of the seed where it is highest
    seconds: Sequence[float] = ()  # simulated, since round 0, mean over seeds; empty: none


def draw(
    metrics: Sequence[Record],
    clients: Sequence[Mapping[str, Any]],
    traffic: Mapping[str, Any],
    reference_curves: Mapping[str, Curve] = {},
    *,
    held_out: bool = False,
) -> dict[str, Picture]:
    """Returns the figures of a run by file name without .png, in reading order, without empty ones.

    `metrics`, `clients` and `traffic` are the contents of the run's files. `reference_curves` are
    those of runs to compare with, by label. With `held_out` the run ends on held-out clients.
    """
    metric = metric_of(metrics)
    pictures = {
        "score_rounds": _over_rounds(metrics, metric, reference_curves),
        "score_bytes": _over_bytes(metrics, metric, reference_curves),
        "score_seconds": _over_seconds(metrics, metric, reference_curves),
        "train_loss": _train_loss(metrics),
        "clients": client_figures.draw(clients, metric, held_out=held_out),
        "traffic": _traffic(traffic),
    }
    return {key: picture for key, picture in pictures.items() if picture is not None}


def _over_rounds(
    metrics: Sequence[Record], metric: Metric, reference_curves: Mapping[str, Curve]
) -> Picture:
    """Draws scores over rounds, before and after local training, also of reference runs.

    Lines are the mean over clients with a band of one standard deviation, and the worst tenth.
    """
    figure, axes = drawing.new_axes(f"{metric_title(metric)} over rounds")
    rounds = [record["round"] for record in metrics]
    for stage in _stages(metrics):
        mean, std, worst = (_series(metrics, stage, f"{metric.name}_{k}") for k in _STATISTICS)
        # With a single evaluation the stages are pictures side by side, to separate their whiskers.
        x = rounds if len(rounds) > 1 else [rounds[0] + (0.1 if stage == "after" else -0.1)]
        _line(axes, x, mean, stage, f"{stage}: mean ± std")
        low = [m - s for m, s in zip(mean, std, strict=True)]
        high = [m + s for m, s in zip(mean, std, strict=True)]
        colour = drawing.STAGE_COLOURS[stage]
        if len(rounds) > 1:
            axes.fill_between(rounds, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(rounds, worst, color=colour, linestyle="--", label=f"{stage}: worst 10 %")
        else:
            # A band and a dashed line need two points.
            axes.errorbar(x, mean, std, color=colour, capsize=5, alpha=0.6)
            axes.plot(x, worst, "_", color=colour, markersize=14, label=f"{stage}: worst 10 %")
    _references(axes, {name: (c.rounds, c.score) for name, c in reference_curves.items()})
    for record, next_record in itertools.pairwise(metrics):
        if record.get("phase") != next_record.get("phase"):
            axes.axvline(record["round"], color=drawing.INK, linewidth=0.8, linestyle=":")
    best = metrics[-1].get("best_round")
    if best is not None and len(rounds) > 1:
        axes.axvline(best, color="#009E73", linewidth=1.2, linestyle="-.", label="best round")
    drawing.round_axis(axes, rounds)
    drawing.score_axis(axes, metric)
    drawing.legend(axes)
    caption = (
        f"{metric_title(metric)} on the clients' test examples: the mean over clients, one "
        "standard deviation on either side, and the mean of the worst tenth of the clients."
    )
    phases = len({record.get("phase") for record in metrics}) > 1
    if best is not None:
        phase_note = " in the last phase" if phases else ""
        caption += f" Round {best} was best on the validation examples{phase_note}."
    if phases:
        caption += " Dotted lines mark the ends of phases."
    return Picture(figure, caption, f"{metric_title(metric)} over rounds. {_ends(metrics, metric)}")


def _over_bytes(
    metrics: Sequence[Record], metric: Metric, reference_curves: Mapping[str, Curve]
) -> Picture | None:
    """Draws mean scores over bytes moved, or returns None if no bytes moved.

    Arguments as for `_over_rounds`.
    """
    moved = [number(r.get("bytes_down")) + number(r.get("bytes_up")) for r in metrics]
    if not any(total > 0 for total in moved):
        return None
    references = {name: (c.bytes_moved, c.score) for name, c in reference_curves.items()}
    figure, axes = _mean_over(moved, "bytes moved", metrics, metric, references)
    drawing.bytes_axis(axes)
    axes.set_xlabel("bytes moved, down and up, all clients")
    caption = f"Mean {metric_name(metric)} over clients against the total bytes moved."
    alt = f"{metric_title(metric)} over bytes moved. {_ends(metrics, metric)}"
    return Picture(figure, caption, f"{alt} {format_bytes(moved[-1])} were moved.")


def _over_seconds(
    metrics: Sequence[Record], metric: Metric, reference_curves: Mapping[str, Curve]
) -> Picture | None:
    """Draws mean scores over simulated seconds, or returns None if no time was simulated.

    Arguments as for `_over_rounds`; reference runs without simulated time are left out.
    """
    seconds = [number(record.get("simulated_seconds")) for record in metrics]
    if any(map(math.isnan, seconds)):
        return None
    references = {name: (c.seconds, c.score) for name, c in reference_curves.items() if c.seconds}
    figure, axes = _mean_over(seconds, "simulated seconds", metrics, metric, references)
    axes.set_xlabel("simulated seconds")
    caption = f"Mean {metric_name(metric)} over clients against the simulated seconds."
    alt = f"{metric_title(metric)} over simulated seconds. {_ends(metrics, metric)}"
    return Picture(figure, caption, f"{alt} The run lasts {seconds[-1]:,.4g} simulated seconds.")


def _mean_over(
    x: Sequence[float],
    x_name: str,
    metrics: Sequence[Record],
    metric: Metric,
    references: Mapping[str, tuple[Sequence[float], Sequence[float]]],
) -> tuple[Figure, Axes]:
    """Draws mean scores before and after local training over x, one value per evaluation.

    `references` has (x, score) of reference runs by label.
    """
    figure, axes = drawing.new_axes(f"{metric_title(metric)} over {x_name}")
    for stage in _stages(metrics):
        _line(axes, x, _series(metrics, stage, f"{metric.name}_mean"), stage, f"{stage}: mean")
    _references(axes, references)
    drawing.score_axis(axes, metric)
    drawing.legend(axes)
    return figure, axes


def _train_loss(metrics: Sequence[Record]) -> Picture | None:
    """Draws the training loss over rounds, or returns None if it was not recorded."""
    loss = [number(record.get("train_loss")) for record in metrics]
    if all(map(math.isnan, loss)):
        return None
    figure, axes = drawing.new_axes("Training loss")
    _line(axes, [record["round"] for record in metrics], loss, "before", "training loss")
    drawing.round_axis(axes, [record["round"] for record in metrics])
    axes.set_ylabel("loss")
    alt = f"Training loss over rounds, from {_loss_text(loss[0])} to {_loss_text(loss[-1])}."
    return Picture(figure, "Loss during local training.", alt)


def _traffic(traffic: Mapping[str, Any]) -> Picture | None:
    """Draws bytes by layer and direction, at most 20 bars; returns None if no bytes moved."""
    down, up = traffic.get("down", {}), traffic.get("up", {})
    names = list(dict.fromkeys([*down, *up]))
    by_layer = {name: (down.get(name, 0), up.get(name, 0)) for name in names}
    if not any(map(sum, by_layer.values())):
        return None
    if len(by_layer) > _MAX_LAYERS:
        largest = sorted(names, key=lambda name: -sum(by_layer[name]))[: _MAX_LAYERS - 1]
        small = [by_layer.pop(name) for name in names if name not in set(largest)]
        by_layer[f"{len(small)} smaller layers"] = (
            sum(down for down, _ in small),
            sum(up for _, up in small),
        )
    figure, axes = drawing.new_axes("Traffic of each layer", height=1.6 + 0.38 * len(by_layer))
    for side, direction in enumerate(("down", "up")):
        values = [float(pair[side]) for pair in by_layer.values()]  # integers may pass 64 bits
        y = [i + (side - 0.5) * 0.4 for i in range(len(by_layer))]
        bars = axes.barh(
            y,
            values,
            height=0.38,
            color=_DIRECTIONS[direction],
            label=direction,
            hatch="///" if direction == "up" else None,
            edgecolor="white",
            linewidth=0,
        )
        axes.bar_label(
            bars, [format_bytes(v) for v in values], padding=4, fontsize=8, color=drawing.INK
        )
    axes.set_yticks(range(len(by_layer)), [drawing.shorten(name) for name in by_layer])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(by_layer) - 0.4, -0.6)
    axes.margins(x=0.16)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color="#dddddd", linewidth=0.6)
    drawing.bytes_axis(axes)
    axes.set_xlabel("bytes, all clients and rounds")
    drawing.legend(axes)
    total_down = traffic.get("total_down", sum(down.values()))
    total_up = traffic.get("total_up", sum(up.values()))
    alt = (
        f"Bytes moved by {len(names)} layers: {format_bytes(total_down)} down and "
        f"{format_bytes(total_up)} up."
    )
    return Picture(figure, "Bytes moved in the whole run, by layer and direction.", alt)


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], stage: str, label: str) -> None:
    """Plots a line in the colour and marker of `stage`, "before" or "after" local training."""
    marker = drawing.STAGE_MARKERS[stage] if len(x) <= MAX_MARKERS else ""
    axes.plot(
        x,
        y,
        color=drawing.STAGE_COLOURS[stage],
        marker=marker,
        markersize=5,
        linewidth=1.8,
        label=label,
    )


def _references(axes: Axes, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """Plots runs, (x, y) by label, as gray lines, horizontal at the last y if x does not change."""
    for (label, (x, y)), dash in zip(lines.items(), itertools.cycle(("--", ":"))):
        style: Any = {"color": "#666666", "linestyle": dash, "linewidth": 1.4, "label": label}
        if len(x) > 1 and max(x) > min(x):
            axes.plot(x, y, **style)
        else:
            axes.axhline(y[-1], **style)


def _stages(metrics: Sequence[Record]) -> list[str]:
    return [stage for stage in drawing.STAGES if any(record.get(stage) for record in metrics)]


def _series(metrics: Sequence[Record], stage: str, key: str) -> list[float]:
    return [number((record.get(stage) or {}).get(key)) for record in metrics]


def _ends(metrics: Sequence[Record], metric: Metric) -> str:
    """Returns sentences with the first and last mean score before and after local training."""
    ends = [
        f"{drawing.STAGES[stage].capitalize()} the mean is {format_score(metric, values[0])} at "
        f"round {metrics[0]['round']} and {format_score(metric, values[-1])} at round "
        f"{metrics[-1]['round']}."
        for stage in _stages(metrics)
        for values in [_series(metrics, stage, f"{metric.name}_mean")]
    ]
    return " ".join(ends)


def _loss_text(value: float) -> str:
    return "not finite" if math.isnan(value) else f"{value:.4g}"
