"""The figures of the Factorized-FL paper. Its table: experiments.reproduce.

python -m experiments.studies factorized_fl figure6 --dataset=mnist --setting=permuted-noniid-w16

--setting is a preset's words without the dataset: iid, noniid, permuted-iid, permuted-noniid or
domains, and wN for a ResNet9 with N kernels in its first layer. Accuracy is after local training.

Each runs 20 rounds on digits with 10 clients. --paper uses the paper's data, 20 clients, and its 50
rounds (100 between domains), with all methods and values of the figure. Other flags override it.

figure6     accuracy over rounds, and over bytes; --methods=local,fedavg,beta chooses
similarity  figures 7a to 7f: cosines of u and of v over rounds, and how often clients are matched
components  figure 7g: without matching, without μ, random and worst matching with three peers,
            and each client alone
rank, tau, layout  figures 7h, 7i and the first part of 7k
architectures  figure 7k: other networks, plain and factorised
single      figure 7j: one client over 20 epochs, factorised against plain, and its parameters
sparsity    pruned entries of μ over rounds, for several λ
distance    figures 1b, 1c and 4: distances between updates of models on the same, relabelled and
            foreign data; of whole models, u and v
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import flags
from matplotlib.figure import Figure
from ml_collections import ConfigDict
from scipy.cluster.hierarchy import fcluster, linkage
from sklearn.metrics import adjusted_rand_score

from experiments.papers import study as common
from experiments.papers.factorized_fl import gradient_distances
from experiments.papers.factorized_fl.tables import ROWS, TABLES
from experiments.papers.study import CLIENTS, DATASET, PAPER, ROUNDS, mean_std
from experiments.papers.table import curve, moved, plateau
from fedjax_pfl.algorithms.factorized_fl.pruning import collect_mu, prune
from fedjax_pfl.core import trees
from fedjax_pfl.presets import factorized_fl as presets
from fedjax_pfl.runs import runner

SETTING = flags.DEFINE_string("setting", "permuted-noniid", "Setting of the preset.")
_COLOURS = "000000 999999 e69f00 56b4e9 009e73 f0e442 0072b2 cc79a7 d55e00 8c564b 17becf"
COLOURS = [f"#{colour}" for colour in _COLOURS.split()]  # one per method
METHODS = (*ROWS, *TABLES["table1"].variants)


def config(*parts: str, **changes: Any) -> ConfigDict:
    """Returns the settings of a preset, with changed settings of Factorized-FL."""
    name = "-".join([DATASET.value, SETTING.value, f"n{CLIENTS.value}", *parts])
    settings = presets.get_config(name)
    settings.factorized_fl.update(changes)
    return settings


def runs(settings: ConfigDict, name: str) -> list[runner.Result]:
    """Runs the settings once per seed."""
    settings.rounds = ROUNDS.value
    return common.runs(settings, f"{name}-{SETTING.value}-n{CLIENTS.value}")


def numbers(results: list[runner.Result]) -> dict[str, Any]:
    """Summarises the runs of one row over seeds."""
    return {
        **common.accuracies(results),
        "gigabytes": mean_std([moved(r) / 1e9 for r in results]),
        "curve": [plateau(r, "after") for r in results],
    }


def _method(name: str) -> list[runner.Result]:
    settings = config(name)
    settings.update(ROWS.get(name, {}))  # the library's variants have no row
    return runs(settings, f"table1-{name}")


def figure6() -> tuple[dict[str, Any], Figure]:
    """Plots accuracy over rounds and over bytes, one curve per method."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    measured: dict[str, Any] = {}
    for name in common.select_methods(METHODS, ("local", "fedavg", "alpha", "beta")):
        results = _method(name)
        mean_curve = np.mean([curve(result, "after") for result in results], 0)
        lines = results[0].metrics
        rounds = [m["round"] for m in lines]
        gigabytes = [(m["bytes_down"] + m["bytes_up"]) / 1e9 for m in lines]
        over = {"round": rounds, "after": mean_curve.tolist(), "gigabytes": gigabytes}
        measured[name] = {**numbers(results), "over rounds": over}
        colour = COLOURS[METHODS.index(name)]
        left.plot(rounds, mean_curve, color=colour, label=name)
        if gigabytes[-1]:
            right.plot(gigabytes, mean_curve, color=colour)
        else:  # a method without traffic is a level
            right.axhline(mean_curve[-1], color=colour, linestyle=":")
    left.set(xlabel="round", ylabel="accuracy after local training (%)")
    right.set(xlabel="gigabytes, both directions", xscale="log")
    figure.legend(frameon=False, ncols=5, loc="outside upper center")
    return measured, figure


def _bars(rows: Mapping[str, Any]) -> Figure:
    after = {name: {"after": row["after"]} for name, row in rows.items()}
    return common.bars(after, "accuracy after local training (%)")


def _compare(study: str, variants: Mapping[str, ConfigDict]) -> tuple[dict[str, Any], Figure]:
    measured = {
        name: numbers(runs(settings, f"{study}-{name}")) for name, settings in variants.items()
    }
    return measured, _bars(measured)


def components() -> tuple[dict[str, Any], Figure]:
    """Removes the parts of beta, one at a time. Three peers, as in the paper."""
    variants = {
        "fedavg": config("fedavg"),
        "factorized, no matching": config(matching="none"),
        "the same without μ": config(matching="none", bias=False),
        "factorized, alone": config(tau=2.0, minimum=1),  # no cosine reaches 2
        "worst of three": config(matching="worst", peers=3),
        "random three": config(matching="random", peers=3),
        "alpha": config(share="u"),
        "beta": config(),
    }
    short = ("fedavg", "factorized, no matching", "random three", "beta")
    return _compare("components", {name: variants[name] for name in common.scope(short, variants)})


def rank() -> tuple[dict[str, Any], Figure]:
    """Varies γ, the rank. Rank 1 is the method."""
    values = common.scope((1, 4), (1, 2, 4, 8))
    return _compare("rank", {f"rank {r}": config(rank=r) for r in values})


def tau() -> tuple[dict[str, Any], Figure]:
    """Varies τ, with `minimum` 1, because a larger one overrides it."""
    values = common.scope((-1.0, 0.5, 0.95), (-1.0, 0.0, 0.5, 0.8, 0.95))
    return _compare("tau", {f"τ = {v:g}": config(tau=v, minimum=1) for v in values})


def layout() -> tuple[dict[str, Any], Figure]:
    """Varies how a kernel is reshaped to the matrix that u and v factorise."""
    return _compare("layout", {v: config(layout=v) for v in ("kernel", "mixed", "oihw")})


def architectures() -> tuple[dict[str, Any], Figure]:
    """Compares plain FedAvg with beta on networks of different layers."""
    convolutions = "small" if DATASET.value == "digits" else "lenet"
    networks: dict[str, tuple[str, dict[str, Any]]] = {
        "dense": ("mlp", {}),
        "convolutional": (convolutions, {"batch_norm": False}),
        "with BatchNorm": (convolutions, {"batch_norm": True}),
    }
    if DATASET.value != "digits":  # 8x8 images are too small for ResNet9
        networks["with skip connections"] = ("resnet9", {})
    variants = {}
    for name, (model, model_settings) in networks.items():
        for method in ("fedavg", "beta"):
            settings = variants[f"{name}: {method}"] = config(method)
            settings.model = model
            settings[model].update(model_settings)
    return _compare("architectures", variants)


def sparsity() -> tuple[dict[str, Any], Figure]:
    """Varies λ: pruned entries of μ over rounds, and accuracy."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axis = figure.subplots()
    measured = {}
    for value in common.scope((5e-4, 5e-2), (5e-5, 5e-4, 5e-3, 5e-2)):
        results = runs(config(sparsity=value), f"sparsity-{value:g}")
        zeros = [np.mean(r.observations["zeros_in_mu"][1], 1) for r in results]
        rounds = results[0].observations["zeros_in_mu"][0]
        share = 100 * np.mean(zeros, 0)
        measured[f"{value:g}"] = {"round": rounds, "zeros": share.tolist(), **numbers(results)}
        axis.plot(rounds, share, label=f"λ = {value:g}")
    axis.set(xlabel="round", ylabel="entries of μ that are pruned (%)", ylim=(0, 102))
    axis.legend(frameon=False)
    return measured, figure


def grouping(similarity: np.ndarray, truth: np.ndarray) -> float:
    """Returns the adjusted Rand index of complete linkage on 1 − similarity [N, N].

    The tree is cut into the number of clusters in `truth` [N].
    """
    distance = np.clip(1 - similarity, 0, None)
    upper = distance[np.triu_indices(len(distance), 1)]
    measured = fcluster(linkage(upper, "complete"), len(np.unique(truth)), "maxclust")
    return float(adjusted_rand_score(truth, measured))


def frequency(weights: np.ndarray) -> np.ndarray:
    """Counts how often each client was mixed into each, [N, N].

    `weights` [R, N, N] has ω after every round. The last one is not used by any round.
    """
    return (weights[:-1] > 0).sum(0)


def similarity() -> tuple[dict[str, Any], Figure]:
    """Shows cosines of u and v before the classifier, and how often clients are matched.

    Mean cosines and Rand indices are means over seeds; the rest is of seed 0.
    """
    settings = config()
    settings.eval_every = 1
    (result, *_) = results = runs(settings, "similarity")
    rounds, observations = result.observations["v"][0], result.observations
    truth = None
    if "domains" in SETTING.value:
        truth = np.arange(CLIENTS.value) * 5 // CLIENTS.value
    picked = sorted({0, len(rounds) // 2, len(rounds) - 1})
    figure = Figure(figsize=(13, 6), layout="constrained")
    axes = figure.subplots(2, 4)
    for row, name in enumerate(("u", "v")):
        least = float(np.min(observations[name][1]))  # all cosines may be close to 1
        for column, e in enumerate(picked):
            cosines = observations[name][1][e]
            image = axes[row, column].imshow(cosines, vmin=least, vmax=1, cmap="Blues")
            axes[row, column].set(title=f"{name}, round {rounds[e]}")
        figure.colorbar(image, ax=axes[row, :3])
    matched = frequency(np.asarray(observations["weights"][1]))
    image = axes[0, 3].imshow(matched, cmap="Blues", vmin=0)
    axes[0, 3].set(title=f"times matched in {len(rounds)} rounds")
    figure.colorbar(image, ax=axes[0, 3])
    figure.suptitle("cosines and matches of clients, seed 0")
    measured: dict[str, Any] = {"round": list(map(int, rounds)), "times matched": matched.tolist()}
    for name in ("u", "v"):
        off = ~np.eye(CLIENTS.value, dtype=bool)
        means = [[m[off].mean() for m in r.observations[name][1]] for r in results]
        measured[f"mean cosine of {name}"] = np.mean(means, 0).tolist()
        if truth is not None:
            by_seed = [[grouping(m, truth) for m in r.observations[name][1]] for r in results]
            measured[f"adjusted Rand index of {name}"] = np.mean(by_seed, 0).tolist()
            axes[1, 3].plot(rounds, np.mean(by_seed, 0), label=name)
    if truth is None:
        axes[1, 3].axis("off")
    else:
        axes[1, 3].set(xlabel="round", ylabel="adjusted Rand index", ylim=(-0.1, 1.05))
        axes[1, 3].legend(frameon=False)
    return {**measured, **numbers(results)}, figure


def parameters(result: runner.Result) -> int:
    """Counts the parameters of the first client's model without pruned entries of μ."""
    state = result.state
    if result.phases[-1].config.algorithm != "factorized_fl":
        return int(trees.size(state.server))
    model = trees.row((state.rows, state.clients.personal), 0)
    model = prune(model, result.phases[-1].config.factorized_fl.sparsity)
    zeros = sum(int((np.asarray(mu) == 0).sum()) for mu in collect_mu(model))
    return int(trees.size(model)) - zeros


def single() -> tuple[dict[str, Any], Figure]:
    """Trains client 0 alone, one epoch per round, and counts its parameters."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axis = figure.subplots()
    measured = {}
    for name, word in (("plain", "fedavg"), ("factorised", "beta")):
        settings = config(word, minimum=1)
        settings.update(local_epochs=1, clients_per_round=1, eval_every=1)
        settings.held_out = CLIENTS.value - 1
        results = runs(settings, f"single-{name}")
        mean_curve = np.mean([curve(result) for result in results], 0)
        size = parameters(results[0])
        measured[name] = {"before": mean_curve.tolist(), "parameters": size}
        epochs = range(1, len(mean_curve) + 1)
        axis.plot(epochs, mean_curve, label=f"{name}, {size:,} parameters")
    axis.set(xlabel="epoch", ylabel="accuracy (%)")
    axis.legend(frameon=False)
    return measured, figure


# The paper's data of each figure; of the others CIFAR-100's domains.
DATA = {
    "figure6": ("cifar10", "permuted-noniid"),
    "single": ("cifar10", "iid"),
    "distance": ("mnist", "iid"),
}


def as_published(name: str, study: common.Study) -> common.Study:
    """Makes --paper choose the paper's data, clients and rounds where no flag does."""

    def with_paper() -> tuple[dict[str, Any], Figure | None]:
        if PAPER.value:
            dataset, setting = DATA.get(name, ("cifar100", "domains"))
            flags.set_default(DATASET, dataset)
            flags.set_default(SETTING, setting)
            flags.set_default(CLIENTS, 20)
            if "domains" in SETTING.value:
                flags.set_default(ROUNDS, 100)
        return study()

    return with_paper


_OWN_SETTINGS: dict[str, tuple[str, ...]] = {  # settings that each study varies or needs
    "figure6": ("*.share",),
    "similarity": ("eval_every",),
    "components": (
        "factorized_fl.matching",
        "factorized_fl.bias",
        "factorized_fl.tau",
        "factorized_fl.minimum",
        "factorized_fl.peers",
        "factorized_fl.share",
    ),
    "rank": ("factorized_fl.rank",),
    "tau": ("factorized_fl.tau", "factorized_fl.minimum"),
    "layout": ("factorized_fl.layout",),
    "architectures": ("model", "*.batch_norm", "*.share"),
    "single": (
        "local_epochs",
        "clients_per_round",
        "eval_every",
        "held_out",
        "factorized_fl.minimum",
    ),
    "sparsity": ("factorized_fl.sparsity",),
}
_USUAL_OPTIONS = common.StudyOptions(20, 50, ("clients", "setting"))
OPTIONS = {
    name: _USUAL_OPTIONS._replace(
        own_settings=("partition", "permute_labels", "evaluate_after", *settings)
    )
    for name, settings in _OWN_SETTINGS.items()
}
OPTIONS["figure6"] = OPTIONS["figure6"]._replace(flags=("clients", "methods", "setting"))
OPTIONS["single"] = OPTIONS["single"]._replace(paper_rounds=20)
OPTIONS["distance"] = common.StudyOptions(20, 50)
_FIGURES: dict[str, common.Study] = {
    "figure6": figure6,
    "similarity": similarity,
    "components": components,
    "rank": rank,
    "tau": tau,
    "layout": layout,
    "architectures": architectures,
    "single": single,
    "sparsity": sparsity,
    "distance": gradient_distances.study,
}
STUDIES = {name: as_published(name, study) for name, study in _FIGURES.items()}
