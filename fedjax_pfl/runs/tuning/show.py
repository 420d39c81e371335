"""Results of a grid search on validation examples: tables, a picture and a page."""

import html
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from ml_collections import ConfigDict

from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.core.metrics import ACCURACY, Metric
from fedjax_pfl.report import csv_text, drawing
from fedjax_pfl.report import html_page as report
from fedjax_pfl.report.drawing import Picture
from fedjax_pfl.report.numbers import format_mean_std, metric_of, metric_title, unit_suffix
from fedjax_pfl.report.text_tables import Table
from fedjax_pfl.runs.tuning import choice, grids, trials
from fedjax_pfl.runs.tuning.choice import PointResult
from fedjax_pfl.settings.configuration import BUILTINS, Registry

Results = Mapping[str, Sequence[PointResult]]  # by method, points in grid order


def metric_in(results: Results) -> Metric:
    """Returns the metric that ranks points; accuracy if there is no finished run."""
    for result in itertools.chain.from_iterable(results.values()):
        for run in result.runs.values():
            return metric_of(run.metrics)
    return ACCURACY


def tables(results: Results) -> list[Table]:
    """Returns a table per method: a row per point, from best to worst, and the best one marked."""
    metric = metric_in(results)
    return [
        Table(
            caption=method,
            heads=["validation", "best round", "seeds", "rounds", ""],
            rows=[
                [
                    grids.label(result.point),
                    *_cells(result, metric),
                    "chosen" if result is choice.best_point(points) else "",
                ]
                for result in choice.ranked(points)
            ],
        )
        for method, points in results.items()
    ]


def _cells(result: PointResult, metric: Metric) -> list[str]:
    """Returns four cells: mean score ± deviation over seeds, best round of each seed, number of
    finished seeds, and rounds trained.
    """
    if not result.runs:
        return ["not run", "", "", ""]
    last_lines = [run.metrics[-1] for run in result.runs.values()]
    best_rounds = ", ".join(f"{line.get('best_round') or '–'}" for line in last_lines)
    rounds = ", ".join(map(str, sorted({line["round"] for line in last_lines})))
    seeds = f"{len(last_lines)}" + ("" if result.complete else f" of {result.seeds}")
    return [format_mean_std(choice.spread(result), metric), best_rounds, seeds, rounds]


def head(
    results: Results, seeds: int, configs: Mapping[str, ConfigDict], registry: Registry = BUILTINS
) -> str:
    """Returns the heading: definition of the score, and the budget of each method.

    `seeds` is the number of seeds; `configs` has the configuration of each method.
    """
    metric = metric_in(results)
    counts = [
        _count(map(len, results.values()), "point"),
        _count([seeds], "seed"),
        _count((trials.evaluations(c, registry) for c in configs.values()), "evaluation"),
    ]
    methods: dict[str, list[str]] = {}  # by their client updates
    for method, config in configs.items():
        cohorts = trials.cohorts(config, registry)
        phases = " and ".join(f"{_count([n], 'round')} of {clients}" for n, clients in cohorts)
        work = f"{trials.client_updates(config, registry)} ({phases})"
        methods.setdefault(work, []).append(method)
    work_text = "; ".join(f"{', '.join(names)} {work}" for work, names in methods.items())
    return (
        f"{metric_title(metric)}{unit_suffix(metric)} on validation examples: mean over clients at "
        "a run's best evaluation, then mean ± sample standard deviation over seeds. Each method "
        f"has {counts[0]}, {counts[1]} and {counts[2]} to be best in. Client updates of a run: "
        f"{work_text}."
    )


def _count(numbers: Iterable[int], noun: str) -> str:
    """Formats a count that may differ between methods, such as "at most 3 points"."""
    smallest, *_, largest = sorted([*numbers] * 2)
    return f"{'at most ' * (smallest < largest)}{largest} {noun}{'s' * (largest > 1)}"


def notes(results: Results, grid_sizes: Mapping[str, int], budget: int | None) -> list[str]:
    """Returns warnings about the selected points and missing runs.

    `grid_sizes` has the number of points of each method's full grid. `budget` is the number of
    points to sample for each method; None: all.
    """
    lines = []
    for method, points in results.items():
        if warnings := _warnings(points, grid_sizes[method], budget):
            lines.append(f"{method}: {'; '.join(warnings)}.")
    if any(result.seeds == 1 < len(points) for points in results.values() for result in points):
        lines.append("One seed cannot rank close points: --seeds=3 shows how much seeds differ.")
    for name in results:
        if name in METHODS and METHODS[name].tuning_note:
            lines.append(f"{name}: {METHODS[name].tuning_note}.")
    return lines


def _warnings(points: Sequence[PointResult], grid_size: int, budget: int | None) -> list[str]:
    """Returns warnings about one method's points; `grid_size` and `budget` are as for `notes`."""
    warnings = []
    if budget and grid_size < budget:
        warnings.append(
            f"it has {grid_size} points, fewer than the budget of {budget}: give its grid more "
            "values, or it has been tried less than the others"
        )
    elif grid_size > len(points):
        warnings.append(f"{len(points)} of {grid_size} points were sampled")
    best = choice.best_point(points)
    if best is not None:
        warnings += choice.edges(best.point, [result.point for result in points])
        if ties := choice.close(best, points):
            labels = " and over ".join(grids.label(result.point) for result in ties)
            warnings.append(f"its lead over {labels} is within the differences between seeds")
        if all(choice.is_still_rising(run) for run in best.runs.values()):
            warnings.append(
                "its best rounds are the last ones; with more rounds the choice may differ"
            )
    elif all(result.complete for result in points):
        warnings.append("no point has a finite score, so none is chosen")
    else:
        missing = sum(result.seeds - len(result.runs) for result in points)
        warnings.append(f"{missing} of its runs are missing, so none is chosen yet")
    return warnings


def as_csv(results: Results) -> str:
    """Returns CSV with a line per point, by method and from best to worst.

    Has a column for every setting in a grid, empty for methods without it.
    """
    settings = dict.fromkeys(
        name for points in results.values() for result in points for name in result.point
    )
    rows = []
    for method, points in results.items():
        best = choice.best_point(points)
        for rank, result in enumerate(choice.ranked(points), 1):
            point = {name: grids.format_value(value) for name, value in result.point.items()}
            spread = choice.spread(result) if result.runs else {"mean": None, "std": None}
            rows.append(
                {
                    "method": method,
                    "rank": rank,
                    **dict.fromkeys(settings),
                    **point,
                    "validation_mean": spread["mean"],
                    "validation_std": spread["std"],
                    "seeds": len(result.runs),
                    "chosen": int(result is best),
                }
            )
    return csv_text.text(rows).rstrip("\n")


def draw_scores(results: Results) -> Picture | None:
    """Draws the mean score of every point: a panel per numeric setting, a line per method.

    Returns None if no setting has two values among points whose runs are all finished.
    """
    values: dict[str, set[float]] = {}
    for result in itertools.chain.from_iterable(results.values()):
        for name, value in result.point.items() if result.complete else ():
            if choice.is_number(value):
                values.setdefault(name, set()).add(value)
    settings = [name for name in values if len(values[name]) > 1]
    if not settings:
        return None
    metric, columns = metric_in(results), min(3, len(settings))
    rows = math.ceil(len(settings) / columns)
    figure = drawing.new_figure(
        f"{metric_title(metric)} on validation examples",
        (4.8, 7.2, 10.2)[columns - 1],
        0.9 + 3.1 * rows,
    )
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    styles = itertools.cycle(zip(drawing.COLOURS, itertools.cycle(drawing.MARKERS)))
    lines = {}
    for (method, points), style in zip(results.items(), styles, strict=False):
        for setting, axes in zip(settings, panels, strict=False):
            if line := _draw_method(axes, setting, points, style):
                lines[method] = line
    for setting, axes in itertools.zip_longest(settings, panels):
        if setting is None:
            axes.set_visible(False)
        else:
            _value_axis(drawing.style_axes(axes), setting, sorted(values[setting]))
    drawing.score_axis(panels[0], metric)
    for axes in panels[: len(settings)]:
        axes.set_ylabel(panels[0].get_ylabel() if axes.get_subplotspec().is_first_col() else "")
    figure.legend(
        list(lines.values()),
        list(lines),
        loc="outside lower left",
        ncols=5,
        frameon=False,
        fontsize=9,
        labelcolor=drawing.INK,
    )
    caption = (
        "Mean over clients at a run's best round, mean over seeds. A small dot is a point of the "
        "grid; a line joins the best points of each value; a ring marks the chosen point."
    )
    best_points = {method: choice.best_point(points) for method, points in results.items()}
    choices = [f"{m}: {grids.label(best.point)}." for m, best in best_points.items() if best]
    return Picture(figure, caption, f"{caption} {' '.join(choices)}")


def _draw_method(
    axes: Axes, setting: str, points: Sequence[PointResult], style: tuple[str, str]
) -> Any:
    """Draws the scores of a method in the panel of a setting, with a colour and a marker (`style`).

    Returns the line of the legend, or None if the method has no finished point with this setting.
    """
    scores: dict[float, list[float]] = {}  # by value of the setting
    finished = [result for result in points if result.complete]
    for result in finished:
        value, mean = result.point.get(setting), choice.spread(result)["mean"]
        if value is not None and choice.is_number(value) and not math.isnan(mean):
            scores.setdefault(value, []).append(mean)
    if not scores:
        return None
    colour, marker = style
    pairs = [(value, mean) for value in sorted(scores) for mean in scores[value]]
    axes.plot(*zip(*pairs, strict=True), ".", color=colour, markersize=5, alpha=0.4, clip_on=False)
    best_of = max if choice.sign(finished[0]) > 0 else min
    (line,) = axes.plot(
        sorted(scores),
        [best_of(scores[value]) for value in sorted(scores)],
        color=colour,
        marker=marker,
        markersize=5,
        linewidth=1.6,
        zorder=3,
        clip_on=False,
    )
    best = choice.best_point(points)
    if best is not None and choice.is_number(best.point.get(setting)):
        axes.plot(
            best.point[setting],
            choice.spread(best)["mean"],
            "o",
            markersize=12,
            markerfacecolor="none",
            markeredgecolor=colour,
            markeredgewidth=1.4,
            clip_on=False,
        )
    return line


def _value_axis(axes: Axes, setting: str, values: Sequence[float]) -> None:
    """Labels the horizontal axis with `setting`; `values`, in ascending order, are its ticks.

    Of 8 or more values not all have a tick. Positive values that span a factor of 8 get a
    logarithmic axis.
    """
    if values[0] > 0 and values[-1] >= 8 * values[0]:
        axes.set_xscale("log")
    axes.minorticks_off()
    ticks = values if len(values) < 8 else values[:: math.ceil(len(values) / 7)]
    labels = [f"{value:g}" for value in ticks]
    axes.set_xticks(ticks, labels, rotation=30 if len(ticks) > 4 else 0)
    axes.margins(x=0.12)
    axes.set_xlabel(setting)


def page(results: Results, lines: Sequence[str], picture: Picture | None) -> str:
    """Returns the HTML page: `lines` as paragraphs, tables of all results, and the picture."""
    blocks = [f"<p>{html.escape(line)}</p>" for line in lines]
    for table in tables(results):
        rows = [[report.breakable(label, 36), *cells] for label, *cells in table.rows]
        block = report.table_block("Points by their score.", table.heads, rows)
        blocks.append(report.section(html.escape(table.caption), block))
    if picture:
        blocks.append(report.section("Score by setting", report.figure_block(picture, "settings")))
    facts = [f"{len(results)} methods", f"{sum(map(len, results.values()))} points"]
    return report.page("Settings chosen on validation examples", facts, "\n".join(blocks))
