"""Picture of the time of a client step against the number of clients."""

import itertools
import textwrap
from collections.abc import Mapping

from matplotlib import ticker
from matplotlib.figure import Figure

from fedjax_pfl.report import drawing

_LIBRARIES = ("library", "torch", "fl_bench", "pfllib", "fedjax")  # in the order of their colours


def draw(
    points: Mapping[str, Mapping[int, float]], names: Mapping[str, str], caption: str
) -> Figure:
    """Draws a curve per library on logarithmic axes, with a caption such as the machine.

    `points` has milliseconds by library and number of clients, `names` the titles of the rivals.
    """
    figure, axes = drawing.new_axes("LeNet: time of one client step", 4.4)
    styles = zip(
        _LIBRARIES, drawing.COLOURS, drawing.MARKERS, itertools.cycle(drawing.DASHES), strict=False
    )
    for library, colour, marker, dash in styles:
        if curve := points.get(library):
            axes.plot(
                list(curve),
                list(curve.values()),
                color=colour,
                marker=marker,
                linestyle=dash,
                linewidth=1.8,
                label=names.get(library, "fedjax_pfl"),
                clip_on=False,
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    times = [ms for curve in points.values() for ms in curve.values()]
    axes.set_ylim(min(times) / 1.6, max(times) * 1.6)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    clients = sorted({n for curve in points.values() for n in curve})
    axes.set_xticks(clients, [f"{n:,}" for n in clients])
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.set_xlabel("clients in a round")
    axes.set_ylabel("milliseconds per client step")
    drawing.legend(axes)
    text = textwrap.fill(caption, 110)
    figure.supxlabel(text, x=0.012, ha="left", fontsize=8, color=drawing.INK)
    return figure
