"""The figure of the FedMN paper, and studies of its routes. Tables: experiments.reproduce.

python -m experiments.studies fedmn grouping --dataset=digits --seeds=3 --rounds=60

figure2 has 20 rounds, as in the paper. The others have 60, or 150 with --paper.

figure2   accuracy against traffic: FedMN with 1 x a x b blocks, FedAvg on MLPs of the same depth;
          --blocks=8, and with --paper --blocks=8,9,10
paths     the routes by which each client is served
grouping  three groups of clients with disjoint classes: do routes find the groups?
conflict  two groups give images of the same classes different labels: FedMN, FedMN by
          correlation, Local, FedAvg and FedPer. --labels=other: of five classes, class c is c + 5
          in the second group. --labels=next: of ten classes, each has the label of the next in the
          second group
gates     entropy of the gates and active blocks over the rounds
"""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ml_collections import ConfigDict
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.special import logit
from sklearn.metrics import adjusted_rand_score

from experiments.papers import setting_checks, study
from experiments.papers.fedmn import tables as tables
from experiments.papers.study import DATA_DIR, DATASET, ROUNDS, SEEDS, mean_std, run
from experiments.papers.table import accuracy, curve, moved
from fedjax_pfl import data
from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.algorithms.fedmn import router
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import runner

BLOCKS = flags.DEFINE_list("blocks", ["8"], "Blocks and layers, in figure2.")
LABELS = flags.DEFINE_enum(
    "labels", "other", ["other", "next"], "How the labels of the groups in conflict differ."
)
BLUE, ORANGE = "#0072b2", "#d55e00"


def _config(method: str = "fedmn") -> ConfigDict:
    """Returns a preset of the dataset for --rounds rounds, pre-training included."""
    return tables.settings(method, DATASET.value, ROUNDS.value)


def layouts(blocks: int) -> list[tuple[int, int, int]]:
    """Returns layouts 1 x a x b with `blocks` blocks in total, at least two in the last layers."""
    return [(1, a, blocks - 1 - a) for a in range(2, blocks - 2)]


def _block_counts() -> list[int]:
    """Returns the numbers of --blocks; raises UsageError if a number has no layout."""
    texts = study.value_of(BLOCKS, ["8"], ["8", "9", "10"])
    for text in texts:
        if not text.isdecimal() or not layouts(int(text)):
            raise UsageError(f"--blocks has {text!r}; give whole numbers from 5")
    return list(map(int, texts))


def figure2() -> tuple[dict[str, Any], Figure]:
    """Compares FedMN and FedAvg on networks with 256 hidden units, without pre-training."""
    summary: dict[str, Any] = {}
    figure = Figure(figsize=(6.5, 4))
    axis = figure.subplots()
    for blocks, marker in zip(_block_counts(), itertools.cycle("os^Dv"), strict=False):
        for kind, colour in (("FedAvg", ORANGE), ("FedMN", BLUE)):
            points = []
            for layout in layouts(blocks) if kind == "FedMN" else [None]:
                config = _config("fedavg" if layout is None else "fedmn")
                # Both train like FedMN, so that only the network differs.
                like = _config()
                config.update(learning_rate=like.learning_rate, learning_rate_drops=())
                config.update(phases=(), model="mlp", keep_optimizer=False, evaluate_after=False)
                config.mlp.hidden = () if layout else (256,) * (blocks - 1)
                if layout:
                    config.fedmn.update(layout=layout, width=256, hidden=256)
                name = f"{kind}-" + ("x".join(map(str, layout)) if layout else f"{blocks}")
                results = study.runs(config, f"figure2-{name}")
                numbers = mean_std([moved(r) / 4e6 for r in results])
                summary[name] = {
                    "accuracy": mean_std([accuracy(r) for r in results]),
                    "million_numbers": numbers,
                }
                points.append((numbers["mean"], summary[name]["accuracy"]["mean"]))
            label = f"{kind}, {blocks} {'blocks' if kind == 'FedMN' else 'layers'}"
            axis.plot(*zip(*points, strict=True), marker, color=colour, label=label, alpha=0.8)
    axis.set(
        xlabel=f"million numbers moved in {ROUNDS.value} rounds, both ways",
        ylabel="accuracy (%)",
    )
    axis.margins(0.15)
    axis.legend(frameon=False, fontsize=8)
    return summary, figure


def _last_observation(result: runner.Result, name: str) -> np.ndarray:
    """Returns an observation of the last phase, [evaluations, clients, gates]."""
    return np.stack(result.observations[name][1])


def served(pi: np.ndarray, layout: tuple[int, ...]) -> np.ndarray:
    """Returns the gates that evaluation opens, bool [clients, gates]."""
    return np.stack([np.asarray(router.decide(jnp.asarray(z), layout)) for z in logit(pi)])


def draw_routes(axis: Axes, gates: np.ndarray, layout: tuple[int, ...]) -> None:
    """Draws blocks as dots, a column per layer and one for the output, and open gates as lines.

    Gates on a path from an encoder to the output are blue, dead ends are dotted. `gates` is bool
    [gates]; `layout` has the blocks per layer.
    """
    sizes = (*layout, 1)

    def height(layer: int, j: int) -> float:
        return (sizes[layer] - 1) / 2 - j

    fed, used = router.connected(jnp.asarray(gates), layout)
    for layer, size in enumerate(sizes):
        axis.plot([layer] * size, [height(layer, j) for j in range(size)], "o", color="0.6", ms=4)
    for layer, matrix in enumerate(router.cut(jnp.asarray(gates), layout)):
        for j, i in zip(*np.nonzero(matrix), strict=True):
            is_used = bool(fed[layer][0, i] and used[layer + 1][0, j])
            style = {"color": BLUE} if is_used else {"color": "0.6", "linestyle": ":"}
            ends = [height(layer, i), height(layer + 1, j)]
            axis.plot([layer, layer + 1], ends, **style)  # type: ignore[arg-type]
    axis.set_axis_off()
    axis.margins(0.15)


def paths() -> tuple[dict[str, Any], Figure]:
    """Draws the gates with π > ½ of up to twelve clients after their last round."""
    if SEEDS.value > 1:
        raise UsageError(f"paths draws the routes of one run; leave --seeds={SEEDS.value} out")
    config = _config()
    layout = tuple(config.fedmn.layout)
    result = run(config, "preset", 0)
    pi = _last_observation(result, "pi")[-1]
    opened = served(pi, layout)
    first_clients = opened[:12]
    lines = -(-len(first_clients) // 6)
    figure = Figure(figsize=(10, 1.9 * lines), layout="constrained")
    axes = figure.subplots(lines, 6).ravel()
    for i, (axis, gates) in enumerate(zip(axes, first_clients, strict=False)):
        draw_routes(axis, gates, layout)
        axis.set_title(f"client {i}", fontsize=9)
    for axis in axes[len(first_clients) :]:
        axis.set_axis_off()
    different = len(np.unique(opened, axis=0))
    numbers = {"accuracy": accuracy(result), "different_routes": different}
    return {**numbers, "pi": pi.round(3).tolist()}, figure


def grouped(pi: np.ndarray, true: np.ndarray) -> float:
    """Returns the adjusted Rand index of average-linkage clusters of π against the true groups."""
    clusters = fcluster(linkage(pi, "average"), len(np.unique(true)), "maxclust")
    return float(adjusted_rand_score(true, clusters))


def grouping() -> tuple[dict[str, Any], Figure]:
    """Clusters π of three groups of four clients; each group has three classes."""
    true = np.repeat(np.arange(3), 4)
    config = _config()
    config.update(partition="listed", clients=len(true), evaluate_after=False)
    config.listed.classes = tuple((3 * g, 3 * g + 1, 3 * g + 2) for g in true.tolist())
    config.listed.examples = 120 if DATASET.value == "digits" else 600
    results = study.runs(config, "grouping")
    routes = [served(_last_observation(r, "pi")[-1], tuple(config.fedmn.layout)) for r in results]
    labels = [np.unique(seed, axis=0, return_inverse=True)[1].ravel() for seed in routes]
    # [seeds, evaluations, clients, gates]
    pi = np.stack([_last_observation(r, "pi") for r in results])
    rounds = results[0].observations["pi"][0]
    index = np.array([[grouped(routes_of_seed, true) for routes_of_seed in seed] for seed in pi])
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(rounds, index.mean(0), color=BLUE)
    left.set(xlabel="round", ylabel="adjusted Rand index of clusters of π", ylim=(-0.3, 1.1))
    centred = pi[0, -1] - pi[0, -1].mean(0)
    image = right.imshow(centred, aspect="auto", cmap="RdBu")
    title = "π minus its mean over clients, last round, seed 0"
    right.set(xlabel="gate", ylabel="client", title=title)
    figure.colorbar(image, ax=right)
    return {
        "accuracy": mean_std([accuracy(r) for r in results]),
        "adjusted_rand_index_of_pi": mean_std(index[:, -1].tolist()),
        "adjusted_rand_index_of_routes": mean_std([adjusted_rand_score(true, x) for x in labels]),
        "different_routes": mean_std([len(np.unique(x)) for x in labels]),
        "std_of_pi_over_clients": mean_std(pi[:, -1].std(1).mean(-1).tolist()),
        "std_of_pi_within_groups": mean_std(
            [float(np.mean([p[true == g].std(0).mean() for g in range(3)])) for p in pi[:, -1]]
        ),
    }, figure


def contradicting(name: str, data_dir: str | None, per_client: int, labels: str) -> data.Dataset:
    """Returns the data of twelve clients, the last six with other labels for the same classes.

    With `labels` "other" there are five classes and c becomes c + 5; with "next" ten and c + 1.
    """
    source = data.load(name, data_dir)
    rows = np.flatnonzero(source.y_train < {"other": 5, "next": 10}[labels])
    rows = np.random.default_rng(0).permutation(rows)[: 12 * per_client]
    owners = np.arange(len(rows)) % 12
    shift = {"other": 5, "next": 1}[labels]
    renamed = (source.y_train[rows] + np.where(owners < 6, 0, shift)) % 10
    return data.arrays(
        source.x_train[rows],
        renamed,
        outputs=10,
        scale=source.scale,
        shift=source.shift,
        owners=owners,
        name=f"contradicting_{name}",
    )


def conflict() -> tuple[dict[str, Any], Figure]:
    """Compares methods where one model for both groups is right half of the time."""
    per_client = {"other": 70, "next": 140}[LABELS.value] if DATASET.value == "digits" else 300
    setting_checks.require_classes(DATASET.value, DATA_DIR.value)
    dataset = contradicting(DATASET.value, DATA_DIR.value, per_client, LABELS.value)
    true = np.arange(12) // 6
    summary: dict[str, Any] = {}
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axis = figure.subplots()
    methods = study.select_methods(("local", "fedavg", "fedper", "fedmn", "fedmn_correlation"))
    for method, colour in zip(methods, study.COLOURS, strict=False):
        config = _config("plain")
        config.update(algorithm=method, dataset=dataset.name, partition="natural", clients=12)
        config.update(evaluate_after=False, batch_size=8, eval_every=5, fraction=1.0)
        results = study.runs(config, f"conflict-{LABELS.value}-{method}", dataset=dataset)
        curves = [curve(result) for result in results]
        rounds = [m["round"] for m in results[0].metrics]
        axis.plot(rounds, np.mean(curves, 0), color=colour, label=METHODS[method].title)
        summary[method] = {"accuracy": mean_std([accuracy(r) for r in results])}
        if method in tables.presets.ROUTED:
            pi = [_last_observation(r, "pi")[-1] for r in results]
            layout = tuple(config[method].layout)
            routes = [np.unique(served(p, layout), axis=0, return_inverse=True)[1] for p in pi]
            summary[method] |= {
                "different_routes": mean_std([len(np.unique(route)) for route in routes]),
                "routes_shared_by_both_groups": mean_std(
                    [len(np.intersect1d(route[true == 0], route[true == 1])) for route in routes]
                ),
                "adjusted_rand_index_of_pi": mean_std([grouped(p, true) for p in pi]),
                "std_of_pi_over_clients": mean_std([float(p.std(0).mean()) for p in pi]),
            }
    axis.set(xlabel="round", ylabel="accuracy (%)", ylim=(0, 102))
    axis.legend(frameon=False)
    return summary, figure


def gates() -> tuple[dict[str, Any], Figure]:
    """Plots the mean entropy of a gate in bits, and the mean share of downloaded blocks."""
    config = _config()
    layout = tuple(config.fedmn.layout)
    results = study.runs(config, "preset")
    rounds = results[0].observations["pi"][0]
    pi = np.clip(np.stack([_last_observation(r, "pi") for r in results]), 1e-7, 1 - 1e-7)
    entropy = -(pi * np.log2(pi) + (1 - pi) * np.log2(1 - pi)).mean((0, 2, 3))
    opened = np.stack([_last_observation(r, "gates") for r in results])
    client_gates = opened.reshape(-1, opened.shape[-1])
    used = np.array(
        [float(router.active(jnp.asarray(gates), layout).mean()) for gates in client_gates]
    )
    share = used.reshape(opened.shape[:-1]).mean((0, 2))
    figure = Figure(figsize=(6, 3.6))
    axis = figure.subplots()
    axis.plot(rounds, entropy, color=BLUE, label="entropy of a gate (bits)")
    axis.plot(rounds, share, color=ORANGE, label="active blocks (share)")
    axis.set(xlabel="round", ylim=(0, 1.05))
    axis.legend(frameon=False)
    return {"rounds": rounds, "entropy": entropy.tolist(), "active": share.tolist()}, figure


_USUAL_OPTIONS = study.StudyOptions(60, 150, own_settings=("*.layout",))
_CLASSES = ("clients", "partition", "listed.*")
OPTIONS = {
    "": _USUAL_OPTIONS,
    "figure2": study.StudyOptions(
        20,
        20,
        ("blocks",),
        own_settings=(
            "fedmn.layout",
            "fedmn.width",
            "fedmn.hidden",
            "model",
            "mlp.hidden",
            "phases",
        ),
    ),
    "grouping": _USUAL_OPTIONS._replace(own_settings=("*.layout", *_CLASSES)),
    "conflict": _USUAL_OPTIONS._replace(
        flags=("labels", "methods"), own_settings=("*.layout", *_CLASSES)
    ),
}
STUDIES: dict[str, study.Study] = {
    "figure2": figure2,
    "paths": paths,
    "grouping": grouping,
    "conflict": conflict,
    "gates": gates,
}
