"""Results of a grid search on validation examples: tables, a picture and a page."""

import html
import io
import itertools
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from ml_collections import ConfigDict

from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.core.scores import ACCURACY, Metric
from fedjax_pfl.report import csv_tables, drawing
from fedjax_pfl.report import html_page as report
from fedjax_pfl.report.drawing import Picture
from fedjax_pfl.report.numbers import format_mean_std, metric_of, metric_title, unit_suffix
from fedjax_pfl.report.run_reader import Run
from fedjax_pfl.report.text_tables import Table
from fedjax_pfl.runs.tuning import choice, grids, trials
from fedjax_pfl.runs.tuning.choice import PointResult
from fedjax_pfl.settings.configuration import BUILTINS, Registry

Found = Mapping[str, Sequence[PointResult]]  # by method, points in grid order


def metric_in(found: Found) -> Metric:
    """Returns the metric that ranks points; accuracy if there is no finished run."""
    runs = (run for tried in found.values() for one in tried for run in one.runs.values())
    first = next(runs, None)
    return metric_of(first.metrics) if first else ACCURACY


def tables(found: Found) -> list[Table]:
    """Returns one table per method with its points by score."""
    metric, made = metric_in(found), []
    for method, tried in found.items():
        best = choice.best_point(tried)
        rows = [
            [grids.label(one.point), *_cells(one, metric), "chosen" if one is best else ""]
            for one in choice.ranked(tried)
        ]
        made.append(Table(method, ["validation", "best round", "seeds", "rounds", ""], rows))
    return made


def _cells(one: PointResult, metric: Metric) -> list[str]:
    if not one.runs:
        return ["not run", "", "", ""]
    spread, lasts = choice.spread(one), [run.metrics[-1] for run in one.runs.values()]
    best = ", ".join(f"{last.get('best_round') or '–'}" for last in lasts)
    rounds = ", ".join(f"{n}" for n in sorted({last["round"] for last in lasts}))
    seeds = f"{len(lasts)}" if one.complete else f"{len(lasts)} of {one.seeds}"
    return [format_mean_std(spread, metric), best, seeds, rounds]


def head(
    found: Found, seeds: int, configs: Mapping[str, ConfigDict], words: Registry = BUILTINS
) -> str:
    """Returns the heading: definition of the score, and the budget of each method."""
    metric = metric_in(found)
    points = _count((len(tried) for tried in found.values()), "point")
    looks = _count((trials.evaluations(one, words) for one in configs.values()), "evaluation")
    return (
        f"{metric_title(metric)}{unit_suffix(metric)} on validation examples: mean over clients at "
        "a run's best evaluation, then mean ± sample standard deviation over seeds. Each method "
        f"has {points}, {_count([seeds], 'seed')} and {looks} to be best in. Client visits of a "
        f"run: {work(configs, words)}."
    )


def _count(numbers: Iterable[int], noun: str) -> str:
    least, *_, most = sorted([*numbers] * 2)
    return f"{'at most ' * (least < most)}{most} {noun}{'s' * (most > 1)}"


def work(configs: Mapping[str, ConfigDict], words: Registry = BUILTINS) -> str:
    """Returns the client visits of each method's runs, with rounds and cohort sizes."""
    alike: dict[str, list[str]] = {}
    for method, config in configs.items():
        parts = [
            f"{_count([n], 'round')} of {clients}" for n, clients in trials.cohorts(config, words)
        ]
        said = f"{trials.visits(config, words)} ({' and '.join(parts)})"
        alike.setdefault(said, []).append(method)
    return "; ".join(f"{', '.join(methods)} {said}" for said, methods in alike.items())


def notes(found: Found, wholes: Mapping[str, int], budget: int | None) -> list[str]:
    """Returns warnings about the selected points and missing runs."""
    said = []
    for method, tried in found.items():
        points, own, whole = [one.point for one in tried], [], wholes[method]
        if budget and whole < budget:
            own.append(
                f"it has {whole} points, fewer than the budget of {budget}: give its grid "
                "more values, or it has been tried less than the others"
            )
        elif whole > len(points):
            own.append(f"{len(points)} points were drawn of {whole}")
        best = choice.best_point(tried)
        if best is not None:
            own += choice.edges(best.point, points)
            if like := choice.close(best, tried):
                others = " and over ".join(grids.label(one.point) for one in like)
                own.append(f"its lead over {others} is within what seeds differ by")
            if all(_still_rising(run) for run in best.runs.values()):
                own.append("its best rounds are the last ones, and more may choose otherwise")
        elif all(one.complete for one in tried):
            own.append("no point has a finite score, and none is chosen")
        else:
            left = sum(one.seeds - len(one.runs) for one in tried)
            own.append(f"{left} of its runs are missing, and nothing is chosen yet")
        if own:
            said.append(f"{method}: {'; '.join(own)}.")
    if any(one.seeds == 1 < len(tried) for tried in found.values() for one in tried):
        said.append("One seed cannot tell close points apart: --seeds=3 says how far seeds differ.")
    notes = [(name, METHODS[name].tuning_note) for name in found if name in METHODS]
    said += [f"{name}: {note}." for name, note in notes if note]
    return said


def _still_rising(run: Run) -> bool:
    last = run.metrics[-1]
    return len(run.metrics) > 1 and last.get("best_round") == last["round"]


def as_csv(found: Found) -> str:
    """Returns CSV with one line per point by score; settings that a method lacks are empty."""
    settings = dict.fromkeys(
        name for tried in found.values() for one in tried for name in one.point
    )
    lines = []
    for method, tried in found.items():
        best = choice.best_point(tried)
        for rank, one in enumerate(choice.ranked(tried), 1):
            spread = choice.spread(one) if one.runs else {"mean": None, "std": None}
            lines.append(
                {
                    "method": method,
                    "rank": rank,
                    **{
                        name: grids.format_value(one.point[name]) if name in one.point else None
                        for name in settings
                    },
                    "validation_mean": spread["mean"],
                    "validation_std": spread["std"],
                    "seeds": len(one.runs),
                    "chosen": int(one is best),
                }
            )
    buffer = io.StringIO()
    csv_tables.write(buffer, lines)
    return buffer.getvalue().rstrip("\n")


def draw(found: Found) -> Picture | None:
    """Draws the score against each numeric setting. Returns None if no setting has two values."""
    done = {m: [one for one in tried if one.complete] for m, tried in found.items()}
    values: dict[str, set[float]] = {}
    for tried in done.values():
        for one in tried:
            for name, value in one.point.items():
                if choice.is_number(value):
                    values.setdefault(name, set()).add(value)
    settings = [name for name, each in values.items() if len(each) > 1]
    if not settings:
        return None
    metric, across = metric_in(found), min(3, len(settings))
    down = math.ceil(len(settings) / across)
    figure = drawing.new_figure(
        f"{metric_title(metric)} on validation examples",
        (4.8, 7.2, 10.2)[across - 1],
        0.9 + 3.1 * down,
    )
    panels = figure.subplots(down, across, sharey=True, squeeze=False).flatten()
    styles = itertools.cycle(zip(drawing.COLOURS, itertools.cycle(drawing.MARKERS)))
    lines = {}
    for (method, tried), style in zip(done.items(), styles, strict=False):
        for setting, axes in zip(settings, panels, strict=False):
            if line := _profile(axes, setting, tried, choice.best_point(found[method]), style):
                lines[method] = line
    for setting, axes in itertools.zip_longest(settings, panels):
        if setting is None:
            axes.set_visible(False)
            continue
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
        "Mean over clients at a run's best round, mean over seeds. Small dots are all points of a "
        "grid; a line joins the best with each value; a ring is what was chosen."
    )
    picked = {method: choice.best_point(tried) for method, tried in found.items()}
    ends = [f"{m}: {grids.label(best.point)}." for m, best in picked.items() if best]
    return Picture(figure, caption, f"{caption} {' '.join(ends)}")


def _profile(
    axes: Axes,
    setting: str,
    tried: Sequence[PointResult],
    best: PointResult | None,
    style: tuple[str, str],
) -> Any:
    """Draws the scores of a method in a panel. Returns its line, or None without the setting."""
    found: dict[float, list[float]] = {}
    for one in tried:
        mean = choice.spread(one)["mean"]
        if choice.is_number(one.point.get(setting)) and not math.isnan(mean):
            found.setdefault(one.point[setting], []).append(mean)
    if not found:
        return None
    at, (colour, marker) = sorted(found), style
    best_of = max if choice.sign(tried[0]) > 0 else min
    every = [(value, mean) for value in at for mean in found[value]]
    axes.plot(*zip(*every, strict=True), ".", color=colour, markersize=5, alpha=0.4, clip_on=False)
    (line,) = axes.plot(
        at,
        [best_of(found[value]) for value in at],
        color=colour,
        marker=marker,
        markersize=5,
        linewidth=1.6,
        zorder=3,
        clip_on=False,
    )
    if best is not None and setting in best.point and choice.is_number(best.point[setting]):
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
    """Sets the ticks to the values; the axis is logarithmic if they span a factor of 8."""
    if values[0] > 0 and values[-1] >= 8 * values[0]:
        axes.set_xscale("log")
    axes.minorticks_off()
    few = values if len(values) < 8 else values[:: math.ceil(len(values) / 7)]
    axes.set_xticks(few, [f"{value:g}" for value in few], rotation=30 if len(few) > 4 else 0)
    axes.margins(x=0.12)
    axes.set_xlabel(setting)


def page(found: Found, said: Sequence[str], picture: Picture | None) -> str:
    """Returns the page with all results."""
    blocks = "\n".join(
        "<section>\n<h2>{}</h2>\n{}\n</section>".format(
            html.escape(table.caption),
            report.table_block(
                "Points by their score.",
                table.heads,
                [[_breakable(label), *cells] for label, *cells in table.rows],
            ),
        )
        for table in tables(found)
    )
    text = "\n".join(f"<p>{html.escape(line)}</p>" for line in said)
    image = ""
    if picture:
        block = report.figure_block(picture, "settings")
        image = f"<section>\n<h2>Score by setting</h2>\n{block}\n</section>"
    facts = [f"{len(found)} methods", f"{sum(len(tried) for tried in found.values())} points"]
    return report.page(
        "Settings chosen on validation examples", facts, f"{text}\n{blocks}\n{image}"
    )


def _breakable(label: str) -> str:
    return "<br>".join(html.escape(line) for line in textwrap.wrap(label, 36))
