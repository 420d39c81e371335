"""Figure of a partition: examples of each client by class."""

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.examples import FederatedData
from fedjax_pfl.data.federate import Portions, portions
from fedjax_pfl.report.drawing import shorten

_RANGES = 20  # of a regression target
_MAX_BUBBLES = 30  # clients and classes that are drawn as bubbles
_MAX_ROWS = 1000  # with more clients, histograms are drawn
_BINS = 40
_COLOURS = {"train": "#2f6690", "validation": "#81c3d7", "test": "#f2a65a"}
_HELD_OUT_COLOUR = "#b23a48"
_COLOUR_MAP = ListedColormap(colormaps["Blues"](np.linspace(0.2, 1, 256)))  # white marks 0


def draw_partition(data: FederatedData, federation: Federation) -> Figure:
    """Draws training examples by client and class, and the size of each client's splits.

    Up to 30 clients and classes are bubbles whose area is the number of examples, more are a heat
    map, and over 1,000 clients histograms. Classes are those of the dataset, before a client
    renumbers them. Held-out clients' names are red. For a regression, ranges of the target replace
    the classes; examples with several classes each, such as texts, are only counted. The figure's
    label (`get_label`) is its caption.
    """
    y = np.asarray(data.y)
    stored = 1 if federation.class_counts is None else federation.class_counts.shape[1]
    by_split = portions(data, stored)
    column, counts, edges = "class", by_split.train, None
    if y.ndim > 1 and y.dtype.kind != "f":
        column = ""
    elif y.ndim > 1:
        column = "target" if y.shape[1] == 1 else f"the first of {y.shape[1]} targets"
        counts, edges = _histogram(data, y[:, 0])
        metadata = federation.metadata or {}
        if "target_mean" in metadata:  # targets are normalised
            edges = edges * metadata["target_deviation"][0] + metadata["target_mean"][0]
        stored = counts.shape[1]
    if federation.clients > _MAX_ROWS:
        return _histograms(by_split, counts, column)
    draw_bubbles = federation.clients <= _MAX_BUBBLES and stored <= _MAX_BUBBLES
    height = np.clip(1.6 + 0.3 * federation.clients, 3.2, 9.0)
    figure = Figure(figsize=(float(np.clip(4.6 + 0.26 * stored, 6.6, 11.0)), float(height)))
    figure.set_layout_engine("constrained")
    grid, side = figure.subplots(1, 2, sharey=True, width_ratios=(2.4, 1))

    if draw_bubbles:
        _bubbles(grid, counts, column)
    else:
        _heat(figure, grid, counts, column)
    grid.set_xlabel(column)
    grid.set_ylabel("client")
    if edges is not None:
        ticks = np.linspace(0, len(edges) - 1, 6).round().astype(int)
        grid.set_xticks(ticks - 0.5, [f"{edges[i]:.3g}" for i in ticks])
    elif stored <= 20:
        grid.set_xticks(range(stored) if column else [])
    else:
        grid.xaxis.set_major_locator(MaxNLocator(20, integer=True))
    if federation.clients <= _MAX_BUBBLES:
        names = federation.owners or map(str, range(federation.clients))
        grid.set_yticks(range(federation.clients), [shorten(name, 16) for name in names])
    else:
        grid.yaxis.set_major_locator(MaxNLocator(10, integer=True))
    grid.set_ylim(federation.clients - 0.5, -0.5)

    left = np.zeros(federation.clients)
    thickness = 0.75 if federation.clients <= _MAX_BUBBLES else 1.0
    for name, counts in by_split._asdict().items():
        if counts.any():
            number = counts.sum(1)
            side.barh(range(len(number)), number, thickness, left, color=_COLOURS[name], label=name)
            left = left + number
    side.set_xlabel("examples")
    side.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    side.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=3,
        frameon=False,
        fontsize=8,
        handlelength=0.9,
        columnspacing=0.8,
        handletextpad=0.4,
        borderaxespad=0.2,
    )
    for axes in (grid, side):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    side.tick_params(axis="y", left=False, labelleft=False)
    _mark_held_out(grid, side, federation)
    kind = f" of each {'range of ' * (edges is not None)}{column}" if column else ""
    held_out = "" if np.all(federation.active) else "; held-out clients are red"
    figure.set_label(
        f"Of each client: training examples{kind}, and the sizes of its splits{held_out}."
    )
    return figure


def _histograms(by_split: Portions, counts: np.ndarray, column: str) -> Figure:
    """Draws the distribution over clients of their numbers of examples and of classes.

    `by_split` is int [N, C]; `counts` are training examples, int [N, classes or ranges of a
    target]; `column` is "class", the target, or "" to draw the numbers of examples only.
    """
    figure = Figure(figsize=(9.0, 3.6))
    figure.set_layout_engine("constrained")
    left, right = figure.subplots(1, 2, sharey=False)
    sizes = {name: part.sum(1) for name, part in by_split._asdict().items() if part.any()}
    largest = max(int(number.max()) for number in sizes.values())
    edges = np.unique(np.linspace(0, largest + 1, _BINS + 1).round()) - 0.5
    for name, number in sizes.items():
        left.stairs(
            np.histogram(number, edges)[0], edges, color=_COLOURS[name], label=name, linewidth=1.6
        )
    left.set_xlabel("examples of a client")
    left.legend(frameon=False, fontsize=8)
    kinds = "classes" if column == "class" else f"of {counts.shape[1]} ranges of {column}"
    if column:
        different = np.bincount((counts > 0).sum(1), minlength=2)
        right.bar(range(len(different)), different, color=_COLOURS["train"], width=1.0)
        right.set_xlabel(f"{kinds} that a client trains on")
        right.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    else:
        right.remove()
    for axes in figure.axes:
        axes.set_ylabel("clients")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    number = sizes["train"]
    low, middle, high = np.quantile(number, [0.05, 0.5, 0.95])
    classes = f", and of the {kinds} that they train on" if column else ""
    figure.set_label(
        f"Distribution over {len(number):,} clients of their examples{classes}. Half have at most "
        f"{middle:,.0f} training examples, 90 % have {low:,.0f} to {high:,.0f}."
    )
    return figure


def _unit(column: str) -> str:
    """Returns " per class" or " per range", or "" if classes are not drawn."""
    return f" per {'class' if column == 'class' else 'range'}" if column else ""


def _histogram(data: FederatedData, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts each client's training examples by the value of `target`, [examples of `data`].

    Returns int [N, 20] for 20 equal ranges, and the edges of the ranges [21].
    """
    rows, sizes = np.asarray(data.train.rows), np.asarray(data.train.size)
    edges = np.histogram_bin_edges(target, _RANGES)
    counts = [
        np.histogram(target[row[:size]], edges)[0] for row, size in zip(rows, sizes, strict=True)
    ]
    return np.stack(counts), edges


def _bubbles(axes: Axes, counts: np.ndarray, column: str) -> None:
    """Draws a bubble per client and class; `counts` [N, C] are numbers of training examples."""
    clients, classes = np.nonzero(counts)
    number = counts[clients, classes]
    axes.grid(color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.scatter(classes, clients, s=150 * number / counts.max(), color=_COLOURS["train"])
    axes.set_xlim(-0.7, counts.shape[1] - 0.3)
    axes.set_title(f"training examples{_unit(column)} (largest: {number.max()})", fontsize=10)


def _heat(figure: Figure, axes: Axes, counts: np.ndarray, column: str) -> None:
    """Draws a heat map of the square root of `counts` [N, C], which shows small numbers."""
    image = axes.imshow(
        np.ma.masked_equal(counts, 0),
        aspect="auto",
        interpolation="nearest",
        cmap=_COLOUR_MAP,
        norm=PowerNorm(0.5, 0, max(1, int(counts.max()))),
    )
    bar = figure.colorbar(image, ax=axes, location="left", fraction=0.04, pad=0.02, aspect=40)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    axes.set_title(f"training examples{_unit(column)}", fontsize=10)


def _mark_held_out(grid: Axes, side: Axes, federation: Federation) -> None:
    """Marks held-out clients by lines on both axes and, for up to 30 clients, by red names."""
    active = np.asarray(federation.active)
    if active.all():
        return
    for edge in np.flatnonzero(np.diff(active.astype(int))) + 0.5:
        for axes in (grid, side):
            axes.axhline(edge, color=_HELD_OUT_COLOUR, linewidth=1)
    if federation.clients <= _MAX_BUBBLES:
        for label, is_active in zip(grid.get_yticklabels(), active, strict=True):
            label.set_color("black" if is_active else _HELD_OUT_COLOUR)
