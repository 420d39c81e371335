"""Finds how many images a client has and how dominant a class is, from Local's accuracies alone.

The pFedLA paper states neither. Local training depends on little else, and no method under
comparison is looked at.

python -m experiments.studies pfedla calibration --dataset=cifar10 --seeds=5

A seed draws the partition and the training; all points are run with one seed before the next. A
point that is far from the published accuracies is not run with further seeds.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from experiments.papers.pfedla.tables import PUBLISHED, row
from experiments.papers.study import COLOURS, DATASET, SEEDS, mean_std, run
from experiments.papers.table import accuracy
from fedjax_pfl.core.errors import UsageError

IMAGES = (100, 150, 200, 300, 600)  # 100 clients have at most 600 each
RATIOS = (2, 4, 6, 10)
MARGIN = 3.0  # points of accuracy; more than the deviation over partitions
ACCEPTED_DISTANCE = 2.0  # points of accuracy
# The paper has BatchNorm on CIFAR only. The other network is tried if the stated one is not
# within the accepted distance.
BATCH_NORM = {"cifar10": (True, False), "emnist_digits": (False,)}


class Point(NamedTuple):
    """The settings that the paper leaves open."""

    images: int  # per client, for training and testing together
    ratio: int  # of a dominant class to another one, on the second split
    batch_norm: bool  # the paper has it on CIFAR


Key = tuple[str, Point]  # a partition and a point; the first partition has no ratio
Scores = Mapping[Key, Sequence[float]]  # accuracies in per cent, by seed


def keys(point: Point) -> tuple[Key, Key]:
    """Returns the keys of a point's runs on both partitions."""
    return ("classes", point._replace(ratio=0)), ("dominant", point)


def distance(point: Point, scores: Scores, published: tuple[float, float]) -> float:
    """Returns the larger distance of the mean accuracies from the published ones, by partition.

    A partition without a run counts 0, so that this is a lower bound of the distance.
    """
    distances = [
        abs(float(np.mean(scores[key])) - value)
        for key, value in zip(keys(point), published, strict=True)
        if key in scores
    ]
    return max(distances, default=0.0)


def nearest(distances: Mapping[Point, float]) -> Point:
    """Returns the point nearest to Local's published accuracies.

    Equal distances, to a tenth, are decided by more images, then by a smaller ratio.
    """
    return min(distances, key=lambda p: (round(distances[p], 1), -p.images, p.ratio))


def scan(
    points: Sequence[Point],
    seeds: int,
    published: tuple[float, float],
    local: Callable[[str, Point, int], float],
) -> dict[Key, list[float]]:
    """Returns the accuracies of Local, by partition, point and seed.

    Args:
      points: Points to compare.
      seeds: Number of seeds. All points are run with one seed before the next.
      published: Accuracies on both partitions, in per cent.
      local: Trains Local; takes a partition, a point and a seed.

    With every seed only those points are run whose distance so far is at most `MARGIN` above the
    least one of points that have runs on both partitions.
    """
    scores: dict[Key, list[float]] = {}

    def open_points() -> list[Point]:
        """Returns the points that can still be nearest, the nearest so far first."""
        distances = {point: distance(point, scores, published) for point in points}
        complete = [d for p, d in distances.items() if all(key in scores for key in keys(p))]
        limit = min(complete, default=np.inf) + MARGIN
        return sorted((p for p in points if distances[p] <= limit), key=lambda p: distances[p])

    for seed in range(seeds):
        for k in range(2):  # the first partition of all points before the second one
            for point in open_points():
                key = keys(point)[k]
                if len(scores.get(key, ())) == seed and point in open_points():
                    scores.setdefault(key, []).append(local(*key, seed))
    return scores


def calibration() -> tuple[dict[str, Any], Figure]:
    """Local's accuracy by images, ratio and BatchNorm; the point nearest to the published ones."""
    if DATASET.value not in BATCH_NORM:
        raise UsageError(f"calibration has --dataset={' or '.join(BATCH_NORM)}")
    published = _published()
    means = (published[0][0], published[1][0])
    scores: dict[Key, list[float]] = {}
    distances: dict[Point, float] = {}
    for norm in BATCH_NORM[DATASET.value]:
        points = [Point(*point, norm) for point in itertools.product(IMAGES, RATIOS)]
        scores |= scan(points, SEEDS.value, means, _local)
        complete = [p for p in points if _runs(p, scores) == SEEDS.value]
        distances |= {point: distance(point, scores, means) for point in complete}
        if min(distances.values()) <= ACCEPTED_DISTANCE:
            break
    best = nearest(distances)
    numbers: dict[str, Any] = {
        "chosen": {**best._asdict(), "distance": distances[best]},
        "published": {
            f"table{k + 1}": {"mean": mean, "std": std} for k, (mean, std) in enumerate(published)
        },
    }
    scanned = itertools.product(IMAGES, RATIOS, {point.batch_norm for _, point in scores})
    for key in sorted({key for point in scanned for key in keys(Point(*point))}):
        partition, point = key
        name = "first split" if partition == "classes" else f"second split, ratio {point.ratio}"
        name += ", BatchNorm" if point.batch_norm else ", no BatchNorm"
        spread = {**mean_std(scores[key]), "seeds": len(scores[key])} if key in scores else None
        numbers.setdefault(name, {})[str(point.images)] = spread
    return numbers, _figure(scores, published)


def _runs(point: Point, scores: Scores) -> int:
    """Returns the number of seeds with runs on both partitions."""
    return min(len(scores.get(key, ())) for key in keys(point))


def _local(partition: str, point: Point, seed: int) -> float:
    """Returns Local's accuracy at the end, in per cent."""
    config = row("local", partition, DATASET.value, 10)
    config.partition_seed = seed
    config.classes.examples = config.dominant.examples = point.images
    if partition == "dominant":
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


def _figure(scores: Scores, published: list[tuple[float, float]]) -> Figure:
    """Draws accuracy over images on both splits; bands are the published values."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, (mean, std), title in zip(
        axes, published, ("a few classes per client", "all classes, some dominant"), strict=True
    ):
        axis.axhspan(mean - std, mean + std, color="0.8", label="published")
        axis.set(title=title, xlabel="images per client", ylabel="accuracy of Local (%)")
        axis.set_xscale("log", base=2)
        axis.set_xticks(IMAGES, [str(n) for n in IMAGES])
    kinds = sorted({point.batch_norm for _, point in scores}, reverse=True)
    for norm, style in zip(kinds, ("-", "--"), strict=False):
        suffix = "" if norm or len(kinds) == 1 else ", no BatchNorm"
        first = [Point(images, 0, norm) for images in IMAGES]
        _line(axes[0], "classes", first, scores, COLOURS[0], style, "Local" + suffix)
        for ratio, colour in zip(RATIOS, COLOURS, strict=False):
            second = [Point(images, ratio, norm) for images in IMAGES]
            _line(axes[1], "dominant", second, scores, colour, style, f"ratio {ratio}{suffix}")
    for axis in axes:
        axis.legend(frameon=False, fontsize=7)
    return figure


def _line(
    axis: Any,
    partition: str,
    points: Sequence[Point],
    scores: Scores,
    colour: str,
    style: str,
    label: str,
) -> None:
    """Draws means over the images of points with runs, and bars of one deviation over seeds."""
    points = [point for point in points if (partition, point) in scores]
    spreads = [mean_std(scores[partition, point]) for point in points]
    axis.errorbar(
        [point.images for point in points],
        [spread["mean"] for spread in spreads],
        [spread["std"] or 0.0 for spread in spreads],
        color=colour,
        linestyle=style,
        marker=".",
        label=label,
        capsize=2,
    )
