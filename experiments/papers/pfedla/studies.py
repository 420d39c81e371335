"""The figures of the pFedLA paper, and HeurpFedLA with compressed uploads.

Tables: experiments.reproduce.

python -m experiments.studies pfedla figure6 --dataset=mnist --seeds=3 --rounds=60

Each has 60 rounds; the paper's models have 600, which --paper asks for.

figure1  layer-wise against model-wise mixing: six clients, nine classes
figure5  a client's weights in the first, middle and last period
figure6  eight clients in a chain of overlapping classes: α per layer
figure7  the weights of one client in all layers
retained  accuracy and megabytes with k = 0, 1, 2, 3 retained layers, drawn
compression  HeurpFedLA with quantised and sparsified uploads: accuracy against bytes
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from ml_collections import ConfigDict
from scipy.stats import spearmanr

from experiments.papers import study
from experiments.papers.pfedla import presets as presets
from experiments.papers.pfedla.tables import retained as settings_of_retained
from experiments.papers.study import DATASET, SEEDS, mean_std, run
from experiments.papers.table import accuracy, moved, plateau
from fedjax_pfl.core import trees
from fedjax_pfl.runs import runner

BLUE, ORANGE = "#0072b2", "#d55e00"


def _config(clients: int, **pfedla: Any) -> ConfigDict:
    config = presets.get_config(f"{DATASET.value}-n{clients}")
    config.pfedla.update(pfedla)
    return config


def _listed(classes: Sequence[tuple[int, ...]], **pfedla: Any) -> ConfigDict:
    """Clients with given classes; on digits as many images as there are for all of them."""
    config = _config(len(classes), **pfedla)
    most = max(sum(c in own for own in classes) for c in range(10))
    config.partition = "listed"
    config.listed.classes = tuple(classes)
    each = 170 // most  # digits has 174 images of the rarest class
    config.listed.examples = len(classes[0]) * each if DATASET.value == "digits" else 600
    return config


def _layers(result: runner.Result) -> list[str]:
    return list(trees.layers(result.state.rows.theta))


def figure1() -> tuple[dict[str, Any], Figure]:
    """Layer-wise against model-wise mixing; the weights of client 1 at the end."""
    classes = [(0, 1, 2), (1, 2, 3), (2, 3, 4), (4, 5, 6), (5, 6, 7), (6, 7, 8)]
    found: dict[str, Any] = {}
    figure = Figure(figsize=(10, 3.6))
    left, right = figure.subplots(1, 2)
    for kind, colour in (("layer", BLUE), ("model", ORANGE)):
        results = [
            run(_listed(classes, granularity=kind), f"figure1-{kind}", seed)
            for seed in range(SEEDS.value)
        ]
        for when in ("before", "after"):
            found[f"{kind}_{when}"] = mean_std([accuracy(r, when) for r in results])
        curve = [[line["before"]["accuracy_mean"] for line in r.metrics] for r in results]
        rounds = [line["round"] for line in results[0].metrics]
        left.plot(rounds, 100 * np.mean(curve, 0), color=colour, label=f"{kind}-wise")
        if kind == "layer":
            weights = results[0].observations["alpha"][1][-1][0]
            names = _layers(results[0])
    left.set(xlabel="round", ylabel="accuracy before local training (%)")
    left.legend(frameon=False)
    image = right.imshow(weights, aspect="auto", cmap="Blues")
    right.set(yticks=range(len(names)), yticklabels=names, xlabel="client", title="α of client 1")
    figure.colorbar(image, ax=right)
    return found, figure


def figure5() -> tuple[dict[str, Any], Figure]:
    """Weights of a target client 0; client 1 has the same classes, client 2 three of the four."""
    classes = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 4), (4, 5, 6, 7)]
    classes += [(5, 6, 7, 8), (6, 7, 8, 9), (4, 5, 8, 9), (4, 6, 7, 9)]
    results = [run(_listed(classes), "figure5", seed) for seed in range(SEEDS.value)]
    alphas = np.stack([np.stack(r.observations["alpha"][1])[:, 0] for r in results])
    rounds, names = results[0].observations["alpha"][0], _layers(results[0])
    periods = {"first": 0, "middle": len(rounds) // 2, "last": len(rounds) - 1}
    groups = {"itself": [0], "same classes": [1], "three shared": [2], "others": [3, 4, 5, 6, 7]}
    found: dict[str, Any] = {}
    figure = Figure(figsize=(12, 3.4))
    for axis, (period, e) in zip(figure.subplots(1, 3, sharey=True), periods.items(), strict=True):
        for g, (group, ids) in enumerate(groups.items()):
            values = alphas[:, e][:, :, ids].mean(axis=(0, 2))
            found[f"{period}, round {rounds[e]}: {group}"] = dict(
                zip(names, values.tolist(), strict=True)
            )
            axis.bar(np.arange(len(names)) + g / 5, values, 0.2, label=group)
        axis.set(title=f"{period} period, round {rounds[e]}")
        axis.set_xticks(np.arange(len(names)) + 0.3, names)
    figure.axes[0].set_ylabel("weight, mean over the group")
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, ncols=len(groups), loc="upper center", fontsize=9)
    figure.subplots_adjust(top=0.8)
    return found, figure


def agreement(alpha: np.ndarray, overlap: np.ndarray) -> tuple[float, float, float]:
    """How α [N, N] orders clients: rank correlation with overlap off the diagonal, share of rows
    whose largest weight is the client's own, mean own weight.
    """
    off = ~np.eye(len(alpha), dtype=bool)
    correlation = spearmanr(alpha[off], overlap[off]).statistic
    own = float(np.mean(np.argmax(alpha, 1) == np.arange(len(alpha))))
    return float(correlation), own, float(np.mean(np.diag(alpha)))


def figure6() -> tuple[dict[str, Any], Figure]:
    """Eight clients, neighbours share three of their four classes."""
    classes = [tuple((i + c) % 10 for c in range(4)) for i in range(7)] + [(7, 8, 9, 0)]
    overlap = np.array([[len({*a} & {*b}) for b in classes] for a in classes])
    results = [run(_listed(classes), "figure6", seed) for seed in range(SEEDS.value)]
    alphas = np.stack([r.observations["alpha"][1][-1] for r in results])
    names = _layers(results[0])
    found: dict[str, Any] = {
        when: mean_std([accuracy(r, when) for r in results]) for when in ("before", "after")
    }
    found["curve"] = [plateau(r) for r in results]
    figure = Figure(figsize=(3 * len(names), 3), layout="constrained")
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    for j, (axis, name) in enumerate(zip(axes, names, strict=True)):
        measures = zip(*(agreement(a[:, j], overlap) for a in alphas), strict=True)
        words = ("rank_correlation", "own_is_largest", "own_weight")
        found[name] = {w: mean_std(values) for w, values in zip(words, measures, strict=True)}
        # Against 1/N, because near-uniform weights would all read .125.
        image = axis.imshow(alphas[:, :, j].mean(0) * len(classes), cmap="viridis")
        axis.set(title=name, xlabel="client")
        figure.colorbar(image, ax=axis, shrink=0.7, format="%.4f")
    axes[0].set_ylabel("client")
    figure.suptitle("α of each layer, as a multiple of 1/N")
    return found, figure


def figure7() -> tuple[dict[str, Any], Figure]:
    """All layers' weights of client 0 at the end of a run on the paper's first split."""
    result = run(_config(10), "figure7", 0)
    alpha, names = result.observations["alpha"][1][-1][0], _layers(result)
    figure = Figure(figsize=(8, 3.4))
    axis = figure.subplots()
    for j, name in enumerate(names):
        axis.bar(np.arange(10) + j / (len(names) + 1), alpha[j], 1 / (len(names) + 1), label=name)
    axis.set(xlabel="client", ylabel="weight for client 0", xticks=range(10))
    axis.legend(frameon=False, ncols=len(names), fontsize=8)
    return {name: alpha[j].tolist() for j, name in enumerate(names)}, figure


def retained() -> tuple[dict[str, Any], Figure]:
    """Retained layers against accuracy and megabytes (MiB, both directions)."""
    found: dict[str, Any] = {}
    for k in range(4):
        made = [settings_of_retained(k, DATASET.value) for _ in range(SEEDS.value)]
        results = [run(config, f"table3-k{k}", seed) for seed, config in enumerate(made)]
        sizes = [moved(r) / 2**20 for r in results]
        found[f"k={k}"] = {
            "before": mean_std([accuracy(r) for r in results]),
            "after": mean_std([accuracy(r, "after") for r in results]),
            "mebibytes": mean_std(sizes),
        }
    return found, _against_bytes(found)


def compression() -> tuple[dict[str, Any], Figure]:
    """HeurpFedLA, k = 1, with smaller uploads."""
    settings: dict[str, dict[str, Any]] = {
        "whole": {},
        "8 bits": {"upload_bits": 8},
        "4 bits": {"upload_bits": 4},
        "top 10 %": {"upload_top_k": 0.1},
        "top 10 %, 8 bits": {"upload_top_k": 0.1, "upload_bits": 8},
    }
    found: dict[str, Any] = {}
    for name, changes in settings.items():
        results = []
        for seed in range(SEEDS.value):
            config = _config(10, k=1)
            config.update(changes)
            results.append(run(config, f"compression-{name}", seed))
        sizes = [moved(r) / 2**20 for r in results]
        found[name] = {
            "before": mean_std([accuracy(r) for r in results]),
            "after": mean_std([accuracy(r, "after") for r in results]),
            "mebibytes": mean_std(sizes),
        }
    return found, _against_bytes(found)


def _against_bytes(found: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(6, 3.8))
    axis = figure.subplots()
    for when, marker, colour in (("before", "o", BLUE), ("after", "s", ORANGE)):
        x = [row["mebibytes"]["mean"] for row in found.values()]
        y = [row[when]["mean"] for row in found.values()]
        axis.plot(x, y, marker, color=colour, label=f"{when} local training")
    for name, row in found.items():
        place = (row["mebibytes"]["mean"], row["before"]["mean"])
        axis.annotate(name, place, xytext=(4, -12), textcoords="offset points", fontsize=8)
    axis.set(xlabel="MiB moved, both directions", ylabel="accuracy (%)")
    axis.margins(0.15)
    axis.legend(frameon=False)
    return figure


LENGTHS = {"": study.Length(60, 600)}
STUDIES: dict[str, study.Study] = {
    "figure1": figure1,
    "figure5": figure5,
    "figure6": figure6,
    "figure7": figure7,
    "retained": retained,
    "compression": compression,
}
