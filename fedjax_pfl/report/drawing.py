"""How every figure looks: its sheet, its axes, its colours and its legend."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fedjax_pfl.core.scores import Metric
from fedjax_pfl.report.numbers import human_bytes, spoken

# Of rows that are compared, with as many markers and dashes: the same triple comes after 140 rows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS, DASHES = "osD^v", ("-", "--", "-.", ":")
STAGES = {"before": "before local training", "after": "after local training"}
STAGE_COLOURS = {"before": "#0072B2", "after": "#D55E00"}
STAGE_MARKERS = {"before": "o", "after": "s"}
INK = "#333333"
WIDTH = 7.2  # inches, of a figure with one panel
_STEPS = (1, 2, 2.5, 5, 10)  # ticks at round numbers


class Picture(NamedTuple):
    """A figure, the sentence beneath it, and the words that replace it for who cannot see it."""

    figure: Figure
    caption: str
    alt: str


def canvas(title: str, height: float = 4.2) -> tuple[Figure, Axes]:
    """A figure as wide as a page's column, and its axes."""
    figure = sheet(title, WIDTH, height)
    return figure, dressed(figure.add_subplot())


def sheet(title: str, width: float, height: float) -> Figure:
    """An empty figure, in inches, with a title."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    figure = Figure(figsize=(width, height), layout=layout, facecolor="white")
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    return figure


def dressed(axes: Axes) -> Axes:
    """Axes as those of all figures look."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.grid(visible=True, axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    return axes


def legend(axes: Axes) -> None:
    """Above the axes, where it hides nothing: "before" in the first column, then "after"."""
    order = ("before", "after")
    handles, labels = axes.get_legend_handles_labels()
    entries = sorted(
        zip(handles, labels, strict=True),
        key=lambda entry: next((i for i, o in enumerate(order) if entry[1].startswith(o)), 2),
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
    """The x axis of rounds, with room on both sides of a single one."""
    axes.set_xlabel("round")
    if len(rounds) == 1:
        axes.set_xlim(rounds[0] - 1, rounds[0] + 1)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(8, integer=True, steps=_STEPS))


PER_CENT = ticker.FuncFormatter(lambda value, _: f"{100 * value:g} %")


def score_axis(axes: Axes, metric: Metric) -> None:
    """The y axis of a score: per cent of a share, and a point of it never large."""
    axes.set_ylabel(spoken(metric))
    if metric.unit == "%":
        low, high = axes.get_ylim()
        wider = max(0.1 - (high - low), 0) / 2  # a difference of a point should not look large
        axes.set_ylim(max(low - wider, 0), min(high + wider, 1.02))
        axes.yaxis.set_major_formatter(PER_CENT)


def bytes_axis(axes: Axes) -> None:
    """The x axis of amounts of bytes, from 0."""
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: human_bytes(value)))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, steps=_STEPS))
    axes.set_xlim(left=0)


def shorten(name: str, longest: int = 28) -> str:
    """A name as a figure can show it."""
    half = longest // 2
    short = name if len(name) <= longest else f"{name[: half - 2]}…{name[half + 1 - longest :]}"
    return short.replace("$", r"\$")  # which would start a formula
