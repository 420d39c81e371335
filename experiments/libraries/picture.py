"""One picture: time of a client step against the number of clients."""

import textwrap
from collections.abc import Mapping

from matplotlib import ticker
from matplotlib.figure import Figure

_INK = "#333333"
# Okabe and Ito's; marker and dash say the same once more.
_STYLES = {
    "ours": ("#0072B2", "o", "-"),
    "torch": ("#D55E00", "s", "--"),
    "fl_bench": ("#009E73", "D", "-."),
    "pfllib": ("#CC79A7", "^", ":"),
    "fedjax": ("#E69F00", "v", "--"),
}


def draw(points: Mapping[str, Mapping[int, float]], names: Mapping[str, str], under: str) -> Figure:
    """Both axes logarithmic; `under` says on what machine and how often."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    figure.suptitle(
        "LeNet: time of one client step",
        x=0.012,
        ha="left",
        fontsize=13,
        fontweight="bold",
        color=_INK,
    )
    clients = sorted({n for own in points.values() for n in own})
    for who, (colour, marker, dash) in _STYLES.items():
        if own := points.get(who):
            axes.plot(
                list(own),
                list(own.values()),
                color=colour,
                marker=marker,
                linestyle=dash,
                linewidth=1.8,
                markersize=6,
                label=names.get(who, "fedjax_pfl"),
                clip_on=False,
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    values = [ms for own in points.values() for ms in own.values()]
    axes.set_ylim(min(values) / 1.6, max(values) * 1.6)
    plain = ticker.FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.set_xticks(clients, [f"{n:,}" for n in clients])
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.set_xlabel("clients in a round")
    axes.set_ylabel("milliseconds a client step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.grid(visible=True, axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(_INK)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=5,
        frameon=False,
        fontsize=9,
        labelcolor=_INK,
        borderaxespad=0.3,
    )
    figure.supxlabel(textwrap.fill(under, 110), x=0.012, ha="left", fontsize=8, color=_INK)
    return figure
