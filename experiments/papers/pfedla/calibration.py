"""Finds how many images a client has and how dominant a class is, from Local's accuracies alone.

The pFedLA paper states neither. Local training depends on little else, and no method under
comparison is looked at.

python -m experiments.studies pfedla calibration --dataset=cifar10 --seeds=5

A seed draws the partition and the training; all points are run with one seed before the next.
"""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from experiments.papers.pfedla.tables import PUBLISHED, row
from experiments.papers.study import COLOURS, DATASET, SEEDS, mean_std, run
from experiments.papers.table import accuracy
from fedjax_pfl.core.errors import UsageError

IMAGES = (100, 150, 200, 300, 600)  # 100 clients have at most 600 each
RATIOS = (2, 4, 6, 10)
BATCH_NORM = {"cifar10": (True, False), "emnist_digits": (False,)}  # the paper: on CIFAR only


class Point(NamedTuple):
    """The settings that the paper leaves open."""

    images: int  # per client, for training and testing together
    ratio: int  # of a dominant class to another one, on the second split
    batch_norm: bool  # the paper has it on CIFAR


def chosen(
    first: Mapping[tuple[int, bool], float],
    second: Mapping[Point, float],
    published: tuple[float, float],
    stated: bool,
) -> tuple[Point, float]:
    """Returns the point nearest to Local's published accuracies, and its distance.

    The distance is the larger one of the two splits; `first` has accuracies in per cent by images
    and BatchNorm. The network is the stated one if it comes within two points. Equal distances, to
    a tenth, are decided by more images, then by a smaller ratio.
    """
    distances = {
        point: max(
            abs(first[point.images, point.batch_norm] - published[0]),
            abs(accuracy - published[1]),
        )
        for point, accuracy in second.items()
    }
    as_stated = {p: d for p, d in distances.items() if p.batch_norm == stated}
    if min(as_stated.values()) <= 2:
        distances = as_stated
    point = min(distances, key=lambda p: (round(distances[p], 1), -p.images, p.ratio))
    return point, distances[point]


def calibration() -> tuple[dict[str, Any], Figure]:
    """Local's accuracy by images, ratio and BatchNorm; the point nearest to the published ones."""
    if DATASET.value not in BATCH_NORM:
        raise UsageError(f"calibration has --dataset={' or '.join(BATCH_NORM)}")
    kinds = BATCH_NORM[DATASET.value]
    firsts = list(itertools.product(IMAGES, kinds))
    seconds = [Point(*point) for point in itertools.product(IMAGES, RATIOS, kinds)]
    scores: dict[Any, list[float]] = {key: [] for key in (*firsts, *seconds)}
    for seed in range(SEEDS.value):  # all points with one seed, before the next seed
        for images, norm in firsts:
            scores[images, norm].append(_local("classes", Point(images, RATIOS[0], norm), seed))
        for point in seconds:
            scores[point].append(_local("dominant", point, seed))
    spreads = {key: mean_std(values) for key, values in scores.items()}
    means = {key: spread["mean"] for key, spread in spreads.items()}
    published = _published()
    point, distance = chosen(
        {key: means[key] for key in firsts},
        {key: means[key] for key in seconds},
        (published[0][0], published[1][0]),
        kinds[0],
    )
    numbers: dict[str, Any] = {
        "chosen": {**point._asdict(), "distance": distance},
        "published": {
            f"table{k + 1}": {"mean": mean, "std": std} for k, (mean, std) in enumerate(published)
        },
    }
    for norm in kinds:
        suffix = "BatchNorm" if norm else "no BatchNorm"
        numbers[f"first split, {suffix}"] = {str(n): spreads[n, norm] for n in IMAGES}
        for ratio in RATIOS:
            numbers[f"second split, {suffix}, ratio {ratio}"] = {
                str(n): spreads[Point(n, ratio, norm)] for n in IMAGES
            }
    return numbers, _figure(spreads, published)


def _local(partition: str, point: Point, seed: int) -> float:
    """Returns Local's accuracy at the end, in per cent."""
    config = row("local", partition, DATASET.value, 10)
    config.partition_seed = seed
    config.classes.examples = config.dominant.examples = point.images
    config.dominant.ratio = float(point.ratio)
    config.lenet.batch_norm = point.batch_norm
    name = f"calibration-{partition}-{point.images}-bn{int(point.batch_norm)}"
    if partition == "dominant":
        name += f"-ratio{point.ratio}"
    return accuracy(run(config, name, seed))


def _published() -> list[tuple[float, float]]:
    """Returns mean and deviation of Local with ten clients in the first two tables."""
    column = f"{DATASET.value}-n10"
    return [tuple(PUBLISHED[table]["rows"]["local"][column]) for table in ("table1", "table2")]


def _figure(spreads: Mapping[Any, Any], published: list[tuple[float, float]]) -> Figure:
    """Draws accuracy over images on both splits; bands are the published values."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    kinds = BATCH_NORM[DATASET.value]
    for axis, (mean, std), title in zip(
        axes, published, ("a few classes per client", "all classes, some dominant"), strict=True
    ):
        axis.axhspan(mean - std, mean + std, color="0.8", label="published")
        axis.set(title=title, xlabel="images per client", ylabel="accuracy of Local (%)")
        axis.set_xscale("log", base=2)
        axis.set_xticks(IMAGES, [str(n) for n in IMAGES])
    for norm, style in zip(kinds, ("-", "--"), strict=False):
        suffix = "" if norm else ", no BatchNorm"
        _line(axes[0], [spreads[n, norm] for n in IMAGES], COLOURS[0], style, "Local" + suffix)
        for ratio, colour in zip(RATIOS, COLOURS, strict=False):
            values = [spreads[Point(n, ratio, norm)] for n in IMAGES]
            _line(axes[1], values, colour, style, f"ratio {ratio}{suffix}")
    for axis in axes:
        axis.legend(frameon=False, fontsize=7)
    return figure


def _line(axis: Any, spreads: list[Any], colour: str, style: str, label: str) -> None:
    """Draws means over images, with bars of one deviation over partitions."""
    means = np.array([spread["mean"] for spread in spreads])
    bars = [spread["std"] or 0.0 for spread in spreads]
    axis.errorbar(IMAGES, means, bars, color=colour, linestyle=style, label=label, capsize=2)
