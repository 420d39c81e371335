"""Figures of the arrays that a method exposes, and of its diagnostics.

The shape of an array decides its figure: bars for [N], a heat map for [N, M], a heat map per layer
for [N, layers, N]. A method's `Picture` has a title and a caption, and may select a scatter plot of
the first two principal components.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedjax_pfl.core.diagnostics import Diagnostic, Picture
from fedjax_pfl.report import method_labels
from fedjax_pfl.report.drawing import COLOURS, DASHES, INK, WIDTH, new_axes, new_figure, style_axes
from fedjax_pfl.report.run_reader import Record

_MAX_LAYERS = 12  # heat maps in one figure
_MAX_NAMES = 30  # clients with numbers next to their points
_COLUMNS = 4  # heat maps per row


def draw(
    config: Mapping[str, Any],
    exposed: Mapping[str, tuple[Sequence[int], Sequence[np.ndarray]]],
    layers: Sequence[str],
    metrics: Sequence[Record],
) -> dict[str, Figure]:
    """Returns all figures of a run's methods, by name.

    `exposed` has the arrays that the methods exposed: (rounds, one array per round) by name.
    """
    arrays = draw_arrays(exposed, layers, method_labels.pictures(config))
    return arrays | draw_diagnostics(method_labels.diagnostics(config), metrics)


def draw_arrays(
    exposed: Mapping[str, tuple[Sequence[int], Sequence[np.ndarray]]],
    layers: Sequence[str],
    pictures: Mapping[str, Picture],
) -> dict[str, Figure]:
    """Draws the last value of each exposed array, and returns the figures by name.

    Arrays are [N], [N, M] or [N, layers, N]; those that are empty or not finite are left out.
    `pictures` has titles and captions by name of the array; another array is titled by its name.
    """
    figures_by_name = {}
    for name, (rounds, history) in exposed.items():
        values = np.asarray(history[-1], np.float64)
        default = Picture(name.replace("_", " ").capitalize(), name)
        picture = pictures.get(name) or pictures.get(name.partition("_group")[0]) or default
        title, columns = picture.title, picture.columns
        if not values.size or not np.isfinite(values).all():
            continue
        if picture.is_scatter and values.ndim == 2 and min(values.shape) > 1:
            figure = _scatter(title, values)
        elif values.ndim == 1:
            figure = _bars(title, values)
        elif values.ndim == 2:
            figure = _maps(title, [("", values)], columns)
        elif values.ndim == 3:
            figure = _maps(title, _by_layer(values, layers), columns)
        else:
            continue
        figure.set_label(f"After round {rounds[-1]}: {picture.meaning}{_left_out(values)}.")
        figures_by_name[name] = figure
    return figures_by_name


def draw_diagnostics(
    diagnostics: Mapping[str, Diagnostic], metrics: Sequence[Record]
) -> dict[str, Figure]:
    """Returns {"diagnostics": figure}, a panel for each diagnostic over rounds, or {} without any.

    Of values by layer, the first 12 layers are drawn.
    """
    lines = [line for line in metrics if line.get("diagnostics")]
    names = [name for name in diagnostics if any(name in line["diagnostics"] for line in lines)]
    if not names:
        return {}
    figure = new_figure("Diagnostics", WIDTH, 2.2 * len(names) + 0.8)
    panels = figure.subplots(len(names), 1, squeeze=False, sharex=True)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        observed = [line for line in lines if name in line["diagnostics"]]
        values = [line["diagnostics"][name] for line in observed]
        rounds = [line["round"] for line in observed]
        by_layer = values if isinstance(values[0], dict) else [{"": value} for value in values]
        for n, layer in enumerate(list(by_layer[-1])[:_MAX_LAYERS]):
            style_axes(axes).plot(
                rounds,
                [value.get(layer, np.nan) for value in by_layer],
                color=COLOURS[n % len(COLOURS)],
                linestyle=DASHES[n % len(DASHES)],
                marker=".",
                label=layer,
            )
        axes.set_title(name.replace("_", " "), fontsize=9, color=INK)
        if all(0 <= number <= 1 for value in by_layer for number in value.values()):
            axes.set_ylim(-0.05, 1.05)  # a share on its full range, or noise would fill the panel
        if len(by_layer[-1]) > 1:
            axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    panels[-1].set_xlabel("round")
    panels[-1].xaxis.set_major_locator(MaxNLocator(8, integer=True))
    meanings = "; ".join(f"{name.replace('_', ' ')}: {diagnostics[name].meaning}" for name in names)
    figure.set_label(f"Diagnostics of the method's mechanism. {meanings}.")
    return {"diagnostics": figure}


def _by_layer(values: np.ndarray, layers: Sequence[str]) -> list[tuple[str, np.ndarray]]:
    """Returns (name, values [N, N]) of the first 12 layers of `values` [N, layers, N]."""
    count = values.shape[1]
    names = list(layers) if len(layers) == count else [f"layer {j + 1}" for j in range(count)]
    return [(names[j], values[:, j]) for j in range(min(count, _MAX_LAYERS))]


def _left_out(values: np.ndarray) -> str:
    count = values.shape[1] - _MAX_LAYERS if values.ndim == 3 else 0
    return f"; the first {_MAX_LAYERS} layers, without {count} others" if count > 0 else ""


def _maps(title: str, panels: Sequence[tuple[str, np.ndarray]], columns: str) -> Figure:
    """Draws titled heat maps [N, M] of clients (y axis) with one colour scale for all."""
    width = min(_COLUMNS, len(panels))
    height = -(-len(panels) // width)
    figure = new_figure(title, max(WIDTH, 2.3 * width + 0.9), max(3.8, 2.4 * height + 0.6))
    grid = figure.subplots(height, width, squeeze=False, sharex=True, sharey=True)
    low = min(float(values.min()) for _, values in panels)
    high = max(float(values.max()) for _, values in panels)
    image: Any = None
    for axes, (name, values) in zip(grid.flat, panels, strict=False):
        image = axes.imshow(
            values, cmap="Blues", vmin=low, vmax=high, aspect="auto", interpolation="nearest"
        )
        axes.set_title(name, fontsize=9, color=INK)
        axes.tick_params(colors=INK, labelsize=8)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, integer=True))
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("client", fontsize=9, color=INK)
    for axes in grid[-1]:
        axes.set_xlabel(columns, fontsize=9, color=INK)
    bar = figure.colorbar(image, ax=list(grid.flat), fraction=0.04, pad=0.02)
    bar.ax.tick_params(colors=INK, labelsize=8)
    bar.outline.set_visible(False)
    return figure


def _bars(title: str, values: np.ndarray) -> Figure:
    """Draws a bar for each client; `values` is [N]."""
    figure, axes = new_axes(title, 3.6)
    axes.bar(range(len(values)), values, color="#2f6690")
    axes.set_xlabel("client")
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    if (values == values.round()).all():
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure


def _scatter(title: str, values: np.ndarray) -> Figure:
    """Draws the rows of `values` [N, M], one per client, by two principal components."""
    centred = values - values.mean(0)
    _, scale, directions = np.linalg.svd(centred, full_matrices=False)
    points = centred @ directions[:2].T
    share = scale[:2] ** 2 / max(float((scale**2).sum()), 1e-30)
    figure, axes = new_axes(title, 3.6)
    axes.scatter(points[:, 0], points[:, 1], s=26, color="#2f6690")
    for i, (x, y) in enumerate(points[: _MAX_NAMES if len(points) <= _MAX_NAMES else 0]):
        axes.annotate(str(i), (x, y), (4, 3), textcoords="offset points", fontsize=8, color=INK)
    axes.set_xlabel(f"first component ({100 * share[0]:.0f} % of the variance)")
    axes.set_ylabel(f"second ({100 * share[1]:.0f} %)")
    return figure
