"""Style of all figures: size, axes, colours and legend."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fedjax_pfl.core.metrics import Metric
from fedjax_pfl.report.numbers import format_bytes, metric_name

# Styles of compared rows. A triple of colour, marker and dash repeats after 140 rows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS, DASHES = "osD^v", ("-", "--", "-.", ":")
STAGES = {"before": "before local training", "after": "after local training"}
STAGE_COLOURS = {"before": "#0072B2", "after": "#D55E00"}
STAGE_MARKERS = {"before": "o", "after": "s"}
INK = "#333333"
WIDTH = 7.2  # inches, for a figure with one panel
_STEPS = (1, 2, 2.5, 5, 10)  # ticks at round numbers


class Picture(NamedTuple):
    """A figure with its caption and its alternative text."""

    figure: Figure
    caption: str  # plain text below the figure
    alt: str  # plain text for readers who cannot see the figure


def new_axes(title: str, height: float = 4.2) -> tuple[Figure, Axes]:
    """Returns a titled figure, 7.2 inches wide and `height` inches high, and its only axes."""
    figure = new_figure(title, WIDTH, height)
    return figure, style_axes(figure.add_subplot())


def new_figure(title: str, width: float, height: float) -> Figure:
    """Returns an empty figure with a title; width and height are in inches."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    figure = Figure(figsize=(width, height), layout=layout, facecolor="white")
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    return figure


def style_axes(axes: Axes) -> Axes:
    """Applies the common colours, spines and grid to axes in place, and returns them."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.grid(visible=True, axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    return axes


def legend(axes: Axes) -> None:
    """Adds a legend above the axes: labels that start with "before", then "after", then others."""
    order = ("before", "after")
    handles, labels = axes.get_legend_handles_labels()
    entries = sorted(
        zip(handles, labels, strict=True),
        key=lambda entry: next(
            (i for i, stage in enumerate(order) if entry[1].startswith(stage)), 2
        ),
    )
    axes.legend(
        [handle for handle, _ in entries],
        [label for _, label in entries],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols={4: 2}.get(len(entries), 3),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        borderaxespad=0.3,
        handlelength=2.2,
        columnspacing=1.4,
    )


def round_axis(axes: Axes, rounds: Sequence[int]) -> None:
    """Formats an x axis of rounds in place; `rounds` are those drawn, a single one is centred."""
    axes.set_xlabel("round")
    if len(rounds) == 1:
        axes.set_xlim(rounds[0] - 1, rounds[0] + 1)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(8, integer=True, steps=_STEPS))


PERCENT_FORMATTER = ticker.FuncFormatter(lambda value, _: f"{100 * value:g} %")


def score_axis(axes: Axes, metric: Metric) -> None:
    """Formats a y axis of scores in place: those in % as percentages, over at least 10 points."""
    axes.set_ylabel(metric_name(metric))
    if metric.unit == "%":
        low, high = axes.get_ylim()
        margin = max(0.1 - (high - low), 0) / 2  # a difference of a point should not look large
        axes.set_ylim(max(low - margin, 0), min(high + margin, 1.02))
        axes.yaxis.set_major_formatter(PERCENT_FORMATTER)


def bytes_axis(axes: Axes) -> None:
    """Formats an x axis of bytes, which starts at 0."""
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: format_bytes(value)))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, steps=_STEPS))
    axes.set_xlim(left=0)


def shorten(name: str, longest: int = 28) -> str:
    """Returns a name of at most `longest` characters, cut in the middle, escaped for matplotlib."""
    half = longest // 2
    short = name if len(name) <= longest else f"{name[: half - 2]}…{name[half + 1 - longest :]}"
    return short.replace("$", r"\$")  # a dollar sign starts a formula
