"""Figure of confusion matrices, and the classes with the lowest recall."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from fedjax_pfl.report import drawing
from fedjax_pfl.report.drawing import Picture

_MAX_NUMBERS = 12  # classes of a matrix whose cells have numbers
_MAX_NAMED = 30  # classes whose names fit next to the axes
_LISTED = 3
_COLOUR_MAP = ListedColormap(colormaps["Blues"](np.linspace(0.15, 1, 256)))


def draw(confusion: Mapping[str, Any], names: Sequence[str] = ()) -> Picture | None:
    """Draws confusion matrices: shares of each class's test examples (row) by predicted class.

    One matrix is of predictions before local training and, if counted, one of those after it. Both
    are summed over the clients in the mean scores; each row sums to 1. `confusion` is the content
    of confusion.json, with counts [C, C] by class and prediction. Returns None if no test examples
    were counted.
    """
    matrices = {
        stage: np.array(confusion[stage], np.float64)
        for stage in ("before", "after")
        if confusion.get(stage) and np.any(confusion[stage])
    }
    if "before" not in matrices:
        return None
    classes, totals = len(matrices["before"]), matrices["before"].sum(1)
    names = _names(classes, names)
    size = float(np.clip(1.9 + 0.34 * classes, 3.6, 7.0))
    height = size * len(matrices)
    figure = drawing.new_figure("Predictions of each class", drawing.WIDTH, height)
    panels = figure.subplots(len(matrices), 1, squeeze=False)[:, 0]
    for axes, (stage, matrix) in zip(panels, matrices.items(), strict=True):
        _draw_matrix(drawing.style_axes(axes), matrix, names)
        if len(matrices) > 1:
            axes.set_title(f"{stage} local training", fontsize=10, color=drawing.INK)
    caption = (
        "Share, in per cent, of the test examples of each class by predicted class, over the "
        f"clients in the mean scores, {' and '.join(matrices)} local training. The diagonal is the "
        "recall of the class."
    )
    if unseen := int(np.sum(totals == 0)):
        caption += f" Classes without test examples: {unseen}."
    return Picture(figure, caption, f"Confusion matrix. {sentence(confusion, names)}")


def _draw_matrix(axes: Axes, matrix: np.ndarray, names: Sequence[str]) -> None:
    """Draws a confusion matrix of counts [C, C], each row divided by its sum."""
    classes, totals = len(matrix), matrix.sum(1)
    shares = matrix / np.where(totals > 0, totals, np.nan)[:, None]
    axes.grid(visible=False)
    axes.imshow(
        np.ma.masked_where(~(shares > 0), shares),
        aspect="auto",
        interpolation="nearest",
        cmap=_COLOUR_MAP,
        vmin=0,
        vmax=1,
    )
    if classes <= _MAX_NUMBERS:
        for i, j in np.argwhere(shares >= 0.005):
            colour = "#fefefe" if shares[i, j] > 0.55 else "#111111"  # the same in dark mode
            text = f"{100 * shares[i, j]:.0f}"
            axes.text(j, i, text, ha="center", va="center", fontsize=8, color=colour)
    if classes <= _MAX_NAMED:
        recalls = [f"{100 * shares[i, i]:.0f} %" if totals[i] else "none" for i in range(classes)]
        labels = [drawing.shorten(name, 16) for name in names]
        rows = [f"{label}: {recall}" for label, recall in zip(labels, recalls, strict=True)]
        is_wide = sum(map(len, labels)) > 70
        axes.set_xticks(range(classes), labels, rotation=90 if is_wide else 0)
        axes.set_yticks(range(classes), rows)
    axes.set_ylabel("class: recall" if classes <= _MAX_NAMED else "class")
    axes.tick_params(length=0)
    axes.set_xlabel("predicted class")


def sentence(confusion: Mapping[str, Any], names: Sequence[str] = ()) -> str:
    """Returns a sentence that names the three classes with the lowest recall before local training.

    Returns "" if no examples were counted. For arguments see `draw`.
    """
    matrix = np.array(confusion.get("before") or np.zeros((0, 0)), np.float64)
    totals = matrix.sum(1)
    tested = np.flatnonzero(totals > 0)
    if not len(tested):
        return ""
    recall = np.diag(matrix)[tested] / totals[tested]
    lowest = np.argsort(recall, kind="stable")[:_LISTED]
    names = _names(len(matrix), names)
    parts = [
        f"class {names[tested[i]]} ({100 * recall[i]:.1f} % of {totals[tested[i]]:,.0f} examples)"
        for i in lowest
    ]
    return f"Lowest recall before local training: {', '.join(parts)}."


def _names(classes: int, names: Sequence[str]) -> Sequence[str]:
    return names if len(names) == classes else [str(i) for i in range(classes)]
