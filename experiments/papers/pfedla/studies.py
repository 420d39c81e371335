"""The figures of the pFedLA paper, a sweep of its rate, and HeurpFedLA with compressed uploads.

Tables: experiments.reproduce.

python -m experiments.studies pfedla figure6 --dataset=mnist --seeds=3 --rounds=60

Each has 60 rounds, calibration 30. With --paper they have CIFAR-10 and 600 rounds; the paper's
other datasets are --dataset=emnist_digits, fashion_mnist or cifar100.

figure1      mixing by similarity of layers or of models: six clients, nine classes
figure5      weights of a client in the first, middle and last period
figure6      eight clients in a chain of overlapping classes: alpha of each layer
figure7      the weights of one client in all layers
retained     accuracy and megabytes with k = 0, 1, 2, 3 retained layers, as a picture
rates        the served model over a range of eta, with Local, FedAvg and HeurpFedLA
compression  HeurpFedLA with quantised and sparsified uploads: accuracy against bytes
calibration  images per client and dominance of classes, found from Local's published accuracies
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from ml_collections import ConfigDict
from scipy.stats import spearmanr

from experiments.papers import study
from experiments.papers.pfedla.calibration import calibration
from experiments.papers.pfedla.similarity import similarity
from experiments.papers.pfedla.tables import retained as settings_of_retained
from experiments.papers.study import COLOURS, DATASET, ROUNDS, SEEDS, mean_std, run, runs
from experiments.papers.table import accuracy, accuracy_of, moved, plateau
from fedjax_pfl.presets import pfedla as presets
from fedjax_pfl.runs import runner

BLUE, ORANGE = "#0072b2", "#d55e00"


def _config(clients: int, **pfedla: Any) -> ConfigDict:
    """Returns a preset with eta 0.5, the same for all datasets of a figure."""
    config = presets.get_config(f"{DATASET.value}-n{clients}")
    config.pfedla.update({"rate": 0.5} | pfedla)
    return config


def _listed(classes: Sequence[tuple[int, ...]], **pfedla: Any) -> ConfigDict:
    """Returns settings with the given classes per client, and 600 images, fewer for digits."""
    config = _config(len(classes), **pfedla)
    most = max(sum(c in client for client in classes) for c in range(10))
    config.partition = "listed"
    config.listed.classes = tuple(classes)
    per_class = 170 // most  # digits has 174 images of the rarest class
    config.listed.examples = len(classes[0]) * per_class if DATASET.value == "digits" else 600
    return config


def _layers(result: runner.Result) -> list[str]:
    return list(result.ledger.down)


def figure1() -> tuple[dict[str, Any], Figure]:
    """Accuracy of client 1 with similarities of layers or of models; its weights at the end."""
    classes = [(0, 1, 2), (1, 2, 3), (2, 3, 4), (4, 5, 6), (5, 6, 7), (6, 7, 8)]
    numbers: dict[str, Any] = {}
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, (kind, colour) in enumerate((("layer", BLUE), ("model", ORANGE))):
        config = _listed(classes)
        with config.unlocked():
            config.algorithm, config.similarity = "similarity", {"granularity": kind}
        results = runs(config, f"figure1-{kind}", ROUNDS.value, algorithm=similarity)
        scores = [100 * r.clients[0]["before_accuracy"] for r in results]
        numbers[f"{kind}-wise"] = {
            "client 1": mean_std(scores),
            "all clients": mean_std([accuracy(r) for r in results]),
        }
        left.bar(place, np.mean(scores), 0.6, color=colour)
        if kind == "layer":
            weights, names = results[0].observations["alpha"][1][-1][0], _layers(results[0])
            numbers["weights of client 1"] = dict(zip(names, weights.tolist(), strict=True))
    left.set(ylabel="accuracy of client 1 (%)", ylim=(max(0, left.dataLim.y1 - 40), 101))
    left.set_xticks((0, 1), ("layer-wise", "model-wise"))
    image = right.imshow(weights, aspect="auto", cmap="Blues")
    right.set(yticks=range(len(names)), yticklabels=names, xlabel="client")
    right.set_title("weights of client 1, seed 0")
    figure.colorbar(image, ax=right)
    return numbers, figure


def figure5() -> tuple[dict[str, Any], Figure]:
    """Weights of client 0; client 1 has the same four classes, client 2 three of them."""
    classes = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 4), (4, 5, 6, 7)]
    classes += [(5, 6, 7, 8), (6, 7, 8, 9), (4, 5, 8, 9), (4, 6, 7, 9)]
    results = runs(_listed(classes), "figure5", ROUNDS.value)
    alphas = np.stack([np.stack(r.observations["alpha"][1])[:, 0] for r in results])
    rounds, names = results[0].observations["alpha"][0], _layers(results[0])
    periods = {"first": 0, "middle": len(rounds) // 2, "last": len(rounds) - 1}
    groups = {"itself": [0], "same classes": [1], "three shared": [2], "others": [3, 4, 5, 6, 7]}
    numbers: dict[str, Any] = {}
    figure = Figure(figsize=(12, 3.4))
    for axis, (period, e) in zip(figure.subplots(1, 3, sharey=True), periods.items(), strict=True):
        for g, (group, ids) in enumerate(groups.items()):
            values = alphas[:, e][:, :, ids].mean(axis=(0, 2))
            numbers[f"{period}, round {rounds[e]}: {group}"] = dict(
                zip(names, values.tolist(), strict=True)
            )
            axis.bar(np.arange(len(names)) + g / 5, values, 0.2, label=group)
        axis.set(title=f"{period} period, round {rounds[e]}")
        axis.set_xticks(np.arange(len(names)) + 0.3, names)
    figure.axes[0].set_ylabel("weight, mean over the group")
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, ncols=len(groups), loc="upper center", fontsize=9)
    figure.subplots_adjust(top=0.8)
    return numbers, figure


def agreement(alpha: np.ndarray, overlap: np.ndarray) -> tuple[float, float, float]:
    """Measures how alpha [N, N] orders clients.

    Returns the rank correlation with the overlap off the diagonal, the share of rows whose largest
    weight is the client's own, and the mean own weight.
    """
    off = ~np.eye(len(alpha), dtype=bool)
    correlation = spearmanr(alpha[off], overlap[off]).statistic
    own_is_largest = float(np.mean(np.argmax(alpha, 1) == np.arange(len(alpha))))
    return float(correlation), own_is_largest, float(np.mean(np.diag(alpha)))


def figure6() -> tuple[dict[str, Any], Figure]:
    """Trains eight clients whose neighbours share three of their four classes, and plots alpha."""
    classes = [tuple((i + c) % 10 for c in range(4)) for i in range(7)] + [(7, 8, 9, 0)]
    overlap = np.array([[len({*a} & {*b}) for b in classes] for a in classes])
    results = runs(_listed(classes), "figure6", ROUNDS.value)
    alphas = np.stack([r.observations["alpha"][1][-1] for r in results])
    names = _layers(results[0])
    numbers = {**study.accuracies(results), "curve": [plateau(r) for r in results]}
    figure = Figure(figsize=(3 * len(names), 3), layout="constrained")
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    for j, (axis, name) in enumerate(zip(axes, names, strict=True)):
        measures = zip(*(agreement(a[:, j], overlap) for a in alphas), strict=True)
        measure_names = ("rank_correlation", "own_is_largest", "own_weight")
        numbers[name] = {
            measure: mean_std(values)
            for measure, values in zip(measure_names, measures, strict=True)
        }
        # As a multiple of 1/N: near-uniform weights would all read 0.125.
        image = axis.imshow(alphas[:, :, j].mean(0) * len(classes), cmap="viridis")
        axis.set(title=name, xlabel="client")
        figure.colorbar(image, ax=axis, shrink=0.7, format="%.4f")
    axes[0].set_ylabel("client")
    figure.suptitle("alpha of each layer, as a multiple of 1/N")
    return numbers, figure


def figure7() -> tuple[dict[str, Any], Figure]:
    """Weights of client 0 in all layers on the paper's first split, means over seeds."""
    results = runs(_config(10), "figure7", ROUNDS.value)
    alpha = np.mean([result.observations["alpha"][1][-1][0] for result in results], 0)
    names = _layers(results[0])
    figure = Figure(figsize=(8, 3.4))
    axis = figure.subplots()
    for j, name in enumerate(names):
        axis.bar(np.arange(10) + j / (len(names) + 1), alpha[j], 1 / (len(names) + 1), label=name)
    axis.set(xlabel="client", ylabel="weight for client 0", xticks=range(10))
    axis.legend(frameon=False, ncols=len(names), fontsize=8)
    return {name: alpha[j].tolist() for j, name in enumerate(names)}, figure


RATES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


def rates() -> tuple[dict[str, Any], Figure]:
    """Accuracy and models mixed per layer by eta; a seed also sets the split."""
    numbers: dict[str, Any] = {}
    for split in ("dominant2", "classes4"):
        rows: dict[str, dict[str, Any]] = {n: {"algorithm": n} for n in ("local", "fedavg")}
        rows |= {f"eta {rate:g}": {"pfedla": {"rate": rate}} for rate in RATES}
        rows["eta 0.5, k = 1"] = {"pfedla": {"rate": 0.5, "k": 1}}
        numbers[split] = {}
        for name, changes in rows.items():
            results = []
            for seed in range(SEEDS.value):
                config = presets.get_config(f"{DATASET.value}-{split}-n10")
                config.update(changes)
                config.partition_seed = seed
                results.append(run(config, f"rates-{split}-{name}", seed))
            numbers[split][name] = rate_numbers([r.metrics[-1] for r in results])
    return numbers, draw_rates(numbers)


def rate_numbers(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns one row of `rates` from the last lines of the metrics of all seeds."""
    row: dict[str, Any] = {
        when: mean_std([accuracy_of(line[when]) for line in lines]) for when in ("before", "after")
    }
    if any("peers" in line.get("diagnostics", {}) for line in lines):
        layers = lines[0]["diagnostics"]["peers"]
        row["peers"] = {
            n: float(np.mean([x["diagnostics"]["peers"][n] for x in lines])) for n in layers
        }
        row["moving"] = float(
            np.mean([line["diagnostics"].get("moving", np.nan) for line in lines])
        )
    return row


def draw_rates(numbers: dict[str, Any]) -> Figure:
    """Draws accuracy above, and models mixed per layer below, against eta; one column per split."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots(2, len(numbers), squeeze=False, sharex=True, sharey="row")
    for (split, rows), (above, below) in zip(numbers.items(), axes.T, strict=True):
        swept = {float(n.split()[1]): row for n, row in rows.items() if re.fullmatch(r"eta \S+", n)}
        for when, style in (("before", "o-"), ("after", "s--")):
            means = [row[when]["mean"] for row in swept.values()]
            spread = [row[when]["std"] or 0 for row in swept.values()]
            above.errorbar([*swept], means, spread, fmt=style, color=BLUE, label=f"pFedLA, {when}")
        for name, colour in (("fedavg", "black"), ("local", ORANGE)):
            if name in rows:
                level = rows[name]["before"]["mean"]
                above.axhline(level, color=colour, ls=":", label=f"{name}, before")
        for layer, colour in zip(next(iter(swept.values()))["peers"], COLOURS, strict=False):
            values = [row["peers"][layer] for row in swept.values()]
            below.plot([*swept], values, "o-", color=colour, label=layer)
        above.set(title=split, xscale="log")
        below.set(xlabel="eta")
    axes[0, 0].set_ylabel("accuracy (%)")
    axes[1, 0].set_ylabel("models mixed")
    for axis in axes[:, -1]:
        axis.legend(frameon=False, fontsize=8)
    return figure


def retained() -> tuple[dict[str, Any], Figure]:
    """Accuracy and MiB, both directions, with 0 to 3 retained layers."""
    numbers: dict[str, Any] = {}
    for k in range(4):
        config = settings_of_retained(k, DATASET.value)
        numbers[f"k={k}"] = _accuracy_and_bytes(runs(config, f"table3-k{k}", ROUNDS.value))
    return numbers, _against_bytes(numbers)


def compression() -> tuple[dict[str, Any], Figure]:
    """Accuracy and MiB of HeurpFedLA, k = 1, with compressed uploads."""
    settings: dict[str, dict[str, Any]] = {
        "whole": {},
        "8 bits": {"upload_bits": 8},
        "4 bits": {"upload_bits": 4},
        "top 10 %": {"upload_top_k": 0.1},
        "top 10 %, 8 bits": {"upload_top_k": 0.1, "upload_bits": 8},
    }
    numbers: dict[str, Any] = {}
    for name, changes in settings.items():
        config = _config(10, k=1)
        config.update(changes)
        numbers[name] = _accuracy_and_bytes(runs(config, f"compression-{name}", ROUNDS.value))
    return numbers, _against_bytes(numbers)


def _accuracy_and_bytes(results: Sequence[runner.Result]) -> dict[str, Any]:
    sizes = [moved(r) / 2**20 for r in results]
    return {**study.accuracies(results), "mebibytes": mean_std(sizes)}


def _against_bytes(numbers: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(6, 3.8))
    axis = figure.subplots()
    for when, marker, colour in (("before", "o", BLUE), ("after", "s", ORANGE)):
        x = [row["mebibytes"]["mean"] for row in numbers.values()]
        y = [row[when]["mean"] for row in numbers.values()]
        axis.plot(x, y, marker, color=colour, label=f"{when} local training")
    for name, row in numbers.items():
        place = (row["mebibytes"]["mean"], row["before"]["mean"])
        axis.annotate(name, place, xytext=(4, -12), textcoords="offset points", fontsize=8)
    axis.set(xlabel="MiB moved, both directions", ylabel="accuracy (%)")
    axis.margins(0.15)
    axis.legend(frameon=False)
    return figure


_CLASSES = ("partition", "listed.*")
_OWN_SETTINGS: dict[str, tuple[str, ...]] = {  # settings that each study varies or needs
    "figure1": _CLASSES,
    "figure5": _CLASSES,
    "figure6": (*_CLASSES, "evaluate_after"),
    "figure7": ("partition",),
    "retained": ("pfedla.k", "evaluate_after"),
    "rates": (
        "pfedla.rate",
        "pfedla.k",
        "partition",
        "partition_seed",
        "classes.per_client",
        "dominant.dominant",
        "evaluate_after",
    ),
    "compression": ("upload_bits", "upload_top_k", "pfedla.k", "evaluate_after"),
    "calibration": (
        "partition",
        "partition_seed",
        "classes.examples",
        "dominant.examples",
        "dominant.ratio",
        "lenet.batch_norm",
    ),
}
_USUAL_OPTIONS = study.StudyOptions(60, 600, dataset="cifar10")
OPTIONS = {
    name: _USUAL_OPTIONS._replace(own_settings=("clients", *settings))
    for name, settings in _OWN_SETTINGS.items()
}
OPTIONS["calibration"] = OPTIONS["calibration"]._replace(rounds=30, seeds=5)
STUDIES: dict[str, study.Study] = {
    "figure1": figure1,
    "figure5": figure5,
    "figure6": figure6,
    "figure7": figure7,
    "retained": retained,
    "rates": rates,
    "compression": compression,
    "calibration": calibration,
}
