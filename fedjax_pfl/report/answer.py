"""First section of a report: whether the method helped, in a sentence and a figure."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import ticker

from fedjax_pfl.core.metrics import Metric
from fedjax_pfl.report import client_figures, comparison, drawing, method_labels, references
from fedjax_pfl.report.comparison import PairedTest
from fedjax_pfl.report.drawing import Picture
from fedjax_pfl.report.html_page import figure_block
from fedjax_pfl.report.numbers import (
    direction,
    format_score,
    mean_score,
    metric_name,
    metric_of,
    number,
)
from fedjax_pfl.report.run_reader import Record, Run

_MAX_NAMED = 30  # clients whose names fit below the axis
_MAX_STEMS = 60  # with more clients, an area is drawn
_LEVEL = 0.05  # of the test between the run and a reference run
_MIN_RANGE = 0.05  # of an axis of shares
_COLOURS = {"better": "#0072B2", "worse": "#D55E00", "equal": "#666666"}
_MARKERS = {"better": "^", "worse": "v", "equal": "o"}


def section(run: Run, reference_runs: Mapping[str, Run], picture: Picture | None) -> str:
    """Returns the section as HTML: its title is "Did it help?" or "Did local training help?".

    A run is compared with the best comparable reference run. If there is none, its scores before
    and after local training are compared. `picture` is the figure of `draw`.
    """
    title, details = "Did it help?", ""
    comparable = references.comparable(run, reference_runs)
    best = _best(run, comparable)
    if best is not None:
        intro = references.STAGES["before"]
        comparisons = references.stage_sentence(run, best, reference_runs[best], "before", intro)
        sentences = [f"{_verdict(run, reference_runs[best])}{comparisons}"]
    else:
        sentences = [_stages_sentence(run.metrics)]
        if {*method_labels.methods(run.config)} <= {*references.METHODS}:
            title = "Did local training help?"
        elif reference_runs and not comparable:
            sentences.append(references.no_verdict_note(run, reference_runs))
        elif run.examples is None:
            sentences.append(
                "The examples of this run are unknown here, so it is compared with no other run."
            )
        else:
            sentences.append(
                "There is no finished run of Local or FedAvg on the same data, split, seed and "
                "network to compare with. The setting reference=true runs both."
            )
    if reference_runs:
        lines = [
            references.sentence(run, name, reference) for name, reference in reference_runs.items()
        ]
        items = "\n".join(f"<p>{html.escape(line)}</p>" for line in lines)
        details = (
            f"<details>\n<summary>Each reference run, before and after local training</summary>\n"
            f"{items}\n</details>"
        )
    text = "\n".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences)
    block = "" if picture is None else figure_block(picture, "answer")
    return f'<section class="answer">\n<h2>{title}</h2>\n{text}\n{block}\n{details}\n</section>'


def draw(run: Run, reference_runs: Mapping[str, Run]) -> Picture | None:
    """Draws the gain in score of each participating client, sorted, positive if this run is better.

    The gain is that over the same client in the best comparable reference run, both before local
    training. Without such a run it is the gain by local training, after minus before. Clients that
    attack in one of the runs are left out. Returns None if no client has both scores.
    `reference_runs` are runs by label.
    """
    metric = metric_of(run.metrics)
    best = _best(run, references.comparable(run, reference_runs))
    column = f"before_{metric.name}"
    attackers = comparison.attackers([run] if best is None else [run, reference_runs[best]])
    rows = {row["client"]: row for row in run.participants if row["client"] not in attackers}
    if best is None:
        pairs = {i: (row, f"after_{metric.name}", row) for i, row in rows.items()}
        title, compared = "Gain of each client by local training", "after and before local training"
    else:
        pairs = {
            reference_row["client"]: (rows[reference_row["client"]], column, reference_row)
            for reference_row in reference_runs[best].clients
            if reference_row["client"] in rows
        }
        title, compared = f"Gain of each client over {best}", f"between this run and {best}"
    gains = {
        i: direction(metric) * (number(row.get(name)) - number(reference_row.get(column)))
        for i, (row, name, reference_row) in pairs.items()
    }
    ids = sorted((i for i, gain in gains.items() if gain == gain), key=gains.__getitem__)
    if not ids:
        return None
    names = [client_figures.client_name(rows[i]) for i in ids]
    values = np.array([gains[i] for i in ids])
    better, worse = int(np.sum(values > 0)), int(np.sum(values < 0))
    counts = f"{better:,} better, {worse:,} worse, {len(values) - better - worse:,} equal"
    caption = (
        f"Difference in {metric_name(metric)} {compared} on each client's test examples. "
        f"Clients are sorted: {counts}."
    )
    figure, axes = drawing.new_axes(title, height=3.4)
    _draw_gains(axes, values, names, metric)
    return Picture(figure, caption, f"{title}: {counts}.")


def _draw_gains(axes: Any, values: np.ndarray, names: Sequence[str], metric: Metric) -> None:
    """Draws gains in score [N], sorted: a line per client or, for more than 60, an area.

    `names` are the names of the clients.
    """
    x = np.arange(len(values))
    masks = {"better": values > 0, "worse": values < 0, "equal": values == 0}
    for kind, mask in masks.items():
        if not mask.any():
            continue
        if len(values) <= _MAX_STEMS:
            axes.vlines(x[mask], 0, values[mask], color=_COLOURS[kind], linewidth=2)
            axes.plot(x[mask], values[mask], _MARKERS[kind], color=_COLOURS[kind], label=kind)
        elif kind != "equal":
            positions = np.linspace(0, len(values) - 1, min(len(values), client_figures.MAX_POINTS))
            heights = np.interp(positions, x, np.where(mask, values, 0))
            axes.fill_between(positions, heights, color=_COLOURS[kind], label=kind, linewidth=0)
    axes.axhline(0, color=drawing.INK, linewidth=1)
    if len(values) <= _MAX_NAMED:
        rotation = 90 if sum(map(len, names)) > client_figures.MAX_AXIS_CHARACTERS else 0
        axes.set_xticks(x, [drawing.shorten(name, 16) for name in names], rotation=rotation)
        axes.set_xlabel("client")
    else:
        axes.set_xticks([])
        axes.set_xlabel(f"{len(values):,} clients, sorted")
    axes.set_xlim(-0.7, max(len(values), 4) - 0.3)
    low, high = axes.get_ylim()
    if metric.unit == "%":
        margin = max(_MIN_RANGE - (high - low), 0) / 2
        axes.set_ylim(low - margin, high + margin)
        axes.yaxis.set_major_formatter(
            ticker.FuncFormatter(lambda v, _: f"{100 * v:+g}" if v else "0")
        )
        axes.set_ylabel(f"gain in {metric_name(metric)}, points")
    else:
        axes.set_ylabel(f"gain in {metric_name(metric)}")
    drawing.legend(axes)


def _best(run: Run, reference_runs: Mapping[str, Run]) -> str | None:
    """Returns the label of the run with the best last score before local training, or None."""
    metric = metric_of(run.metrics)
    scores = {
        name: mean_score(reference.metrics[-1], metric, "before")
        for name, reference in reference_runs.items()
    }
    finite = [name for name, score in scores.items() if score == score]
    return max(finite, key=lambda name: direction(metric) * scores[name], default=None)


def _verdict(run: Run, reference: Run) -> str:
    """Says in text whether `run` is better than `reference` before local training.

    Returns "Yes. " or "No. " if a paired test over clients has p < 0.05 and its ranks agree with
    the mean, else "Not clearly. "; "" if the clients cannot be paired.
    """
    row, baseline = references.as_row(run), references.as_row(reference)
    test = comparison.paired_test(row, baseline, "before")
    if not isinstance(test, PairedTest):
        return ""
    if test.p >= _LEVEL or test.difference * test.signed_ranks <= 0:
        return "Not clearly. "
    is_better = (test.difference > 0) == metric_of(run.metrics).higher_is_better
    return "Yes. " if is_better else "No. "


def _stages_sentence(metrics: Sequence[Record]) -> str:
    """Returns a sentence with the last mean scores before and after local training."""
    metric = metric_of(metrics)
    before, after = (mean_score(metrics[-1], metric, stage) for stage in drawing.STAGES)
    sentence = f"The mean {metric_name(metric)} is {format_score(metric, before)} as served"
    if after == after:
        sentence += f" and {format_score(metric, after)} after one more local training"
    return f"{sentence}."
