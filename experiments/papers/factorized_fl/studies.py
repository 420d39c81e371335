"""The Factorized-FL paper's figures. Tables: experiments.reproduce.

python -m experiments.studies factorized_fl figure6 --dataset=mnist --setting=permuted-noniid-w16

--setting is a preset's words without the dataset: iid, noniid, permuted-iid, permuted-noniid or
domains, and wN for a ResNet9 with N kernels in its first layer. Accuracy is after local training.

Each has 20 rounds; the paper has 50, and 100 between domains (--rounds=100). --paper asks for its
50 and for all methods and values, in place of some of them.

figure6     accuracy over rounds, and over bytes; --methods=local,fedavg,beta chooses
similarity  figures 7a to 7f: who resembles whom in u and in v over rounds, and who is mixed
components  figure 7g: without matching, without μ, random and worst matching with three peers,
            and with nobody at all
rank, tau, layout  figures 7h, 7i and 7k
single      figure 7j: one client, factorised against plain, and the numbers that each has
sparsity    zeros in μ over rounds, for several λ
distance    figures 1b and 4: updates of a model on a part of the data against those on another
            part, the same with other labels, and foreign data; whole, u and v
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
from experiments.papers.factorized_fl import presets as presets
from experiments.papers.factorized_fl.tables import ROWS
from experiments.papers.study import CLIENTS, DATASET, mean_std
from experiments.papers.table import accuracy, after, moved, plateau
from fedjax_pfl.algorithms.pruning import collect_mu
from fedjax_pfl.core import trees
from fedjax_pfl.runs import runner

SETTING = flags.DEFINE_string("setting", "permuted-noniid", "Words of a preset.")
COLOURS = (
    "#000000",
    "#999999",
    "#e69f00",
    "#56b4e9",
    "#009e73",
    "#f0e442",
    "#0072b2",
    "#cc79a7",
    "#d55e00",
)


def config(*words: str, **own: Any) -> ConfigDict:
    """The preset with `own` settings of Factorized-FL."""
    made = presets.get_config("-".join([DATASET.value, SETTING.value, f"n{CLIENTS.value}", *words]))
    made.factorized_fl.update(own)
    return made


def runs(made: ConfigDict, name: str) -> list[runner.Result]:
    """One run per seed."""
    made.rounds = common.ROUNDS.value
    return common.runs(made, f"{name}-{SETTING.value}-n{CLIENTS.value}")


def numbers(results: list[runner.Result]) -> dict[str, Any]:
    """What a row shows."""
    return {
        "after": mean_std(list(map(after, results))),
        "before": mean_std([accuracy(r) for r in results]),
        "gigabytes": mean_std([moved(r) / 1e9 for r in results]),
        "curve": [plateau(r, "after") for r in results],
    }


def _method(name: str) -> list[runner.Result]:
    made = config(name)
    made.update(ROWS[name])
    return runs(made, f"table1-{name}")


def figure6() -> tuple[dict[str, Any], Figure]:
    """Curves of every method."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    found: dict[str, Any] = {}
    for name in common.chosen(ROWS, ("local", "fedavg", "alpha", "beta")):
        results = _method(name)
        curve = 100 * np.mean(
            [[m["after"]["accuracy_mean"] for m in r.metrics] for r in results], 0
        )
        lines = results[0].metrics
        rounds = [m["round"] for m in lines]
        gigabytes = [(m["bytes_down"] + m["bytes_up"]) / 1e9 for m in lines]
        over = {"round": rounds, "after": curve.tolist(), "gigabytes": gigabytes}
        found[name] = {**numbers(results), "over rounds": over}
        colour = COLOURS[list(ROWS).index(name)]
        left.plot(rounds, curve, color=colour, label=name)
        if gigabytes[-1]:
            right.plot(gigabytes, curve, color=colour)
        else:  # without traffic a method is a level to be reached
            right.axhline(curve[-1], color=colour, linestyle=":")
    left.set(xlabel="round", ylabel="accuracy after local training (%)")
    right.set(xlabel="gigabytes, both directions", xscale="log")
    figure.legend(frameon=False, ncols=5, loc="outside upper center")
    return found, figure


def _bars(rows: Mapping[str, Any]) -> Figure:
    after = {name: {"after": row["after"]} for name, row in rows.items()}
    return common.bars(after, "accuracy after local training (%)")


def _compare(study: str, variants: Mapping[str, ConfigDict]) -> tuple[dict[str, Any], Figure]:
    found = {name: numbers(runs(made, f"{study}-{name}")) for name, made in variants.items()}
    return found, _bars(found)


def components() -> tuple[dict[str, Any], Figure]:
    """Beta's parts, one at a time; peers as in the paper."""
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
    """γ: rank 1 is the method."""
    return _compare(
        "rank", {f"rank {r}": config(rank=r) for r in common.scope((1, 4), (1, 2, 4, 8))}
    )


def tau() -> tuple[dict[str, Any], Figure]:
    """τ, with one candidate at least, so that it is felt."""
    values = common.scope((-1.0, 0.5, 0.95), (-1.0, 0.0, 0.5, 0.8, 0.95))
    return _compare("tau", {f"τ = {v:g}": config(tau=v, minimum=1) for v in values})


def layout() -> tuple[dict[str, Any], Figure]:
    """How a kernel is cut into u and v."""
    return _compare("layout", {v: config(layout=v) for v in ("kernel", "mixed", "oihw")})


def sparsity() -> tuple[dict[str, Any], Figure]:
    """λ: zeros in μ over rounds, and what they cost in accuracy."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axis = figure.subplots()
    found = {}
    for value in common.scope((5e-4, 5e-2), (5e-5, 5e-4, 5e-3, 5e-2)):
        results = runs(config(sparsity=value, penalty=value), f"sparsity-{value:g}")
        zeros = [np.mean(r.observations["zeros_in_mu"][1], 1) for r in results]
        rounds = results[0].observations["zeros_in_mu"][0]
        share = 100 * np.mean(zeros, 0)
        found[f"{value:g}"] = {"round": rounds, "zeros": share.tolist(), **numbers(results)}
        axis.plot(rounds, share, label=f"λ = {value:g}")
    axis.set(xlabel="round", ylabel="entries of μ that are pruned (%)", ylim=(0, 102))
    axis.legend(frameon=False)
    return found, figure


def grouping(similarity: np.ndarray, truth: np.ndarray) -> float:
    """Adjusted Rand index of complete linkage on 1 − similarity [N, N], cut as the truth is."""
    distance = np.clip(1 - similarity, 0, None)
    upper = distance[np.triu_indices(len(distance), 1)]
    found = fcluster(linkage(upper, "complete"), len(np.unique(truth)), "maxclust")
    return float(adjusted_rand_score(truth, found))


def similarity() -> tuple[dict[str, Any], Figure]:
    """Cosines of u and v of the last factorised layer, and mean weights, over the clients."""
    (result, *_) = results = runs(config(), "similarity")
    rounds, shown = result.observations["v"][0], result.observations
    truth = None
    if "domains" in SETTING.value:
        truth = np.arange(CLIENTS.value) * 5 // CLIENTS.value
    picked = sorted({0, len(rounds) // 2, len(rounds) - 1})
    figure = Figure(figsize=(13, 6), layout="constrained")
    axes = figure.subplots(2, 4)
    for row, name in enumerate(("u", "v")):
        least = float(np.min(shown[name][1]))  # all that there is to see may lie close to 1
        for column, e in enumerate(picked):
            image = axes[row, column].imshow(shown[name][1][e], vmin=least, vmax=1, cmap="Blues")
            axes[row, column].set(title=f"{name}, round {rounds[e]}")
        figure.colorbar(image, ax=axes[row, :3])
    image = axes[0, 3].imshow(np.mean(shown["weights"][1], 0), cmap="Blues", vmin=0)
    axes[0, 3].set(title="ω, mean over evaluations")
    figure.colorbar(image, ax=axes[0, 3])
    found: dict[str, Any] = {"round": list(map(int, rounds))}
    for name in ("u", "v"):
        off = ~np.eye(CLIENTS.value, dtype=bool)
        found[f"mean cosine of {name}"] = [float(m[off].mean()) for m in shown[name][1]]
        if truth is not None:
            by_seed = [[grouping(m, truth) for m in r.observations[name][1]] for r in results]
            found[f"adjusted Rand index of {name}"] = np.mean(by_seed, 0).tolist()
            axes[1, 3].plot(rounds, np.mean(by_seed, 0), label=name)
    if truth is None:
        axes[1, 3].axis("off")
    else:
        axes[1, 3].set(xlabel="round", ylabel="adjusted Rand index", ylim=(-0.1, 1.05))
        axes[1, 3].legend(frameon=False)
    return {**found, **numbers(results)}, figure


def single() -> tuple[dict[str, Any], Figure]:
    """Client 0 alone: one epoch in each round; and how many numbers its model is made of."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axis = figure.subplots()
    found = {}
    for name, word in (("plain", "fedavg"), ("factorised", "beta")):
        made = config(word, minimum=1)
        made.update(local_epochs=1, clients_per_round=1, held_out=CLIENTS.value - 1, eval_every=1)
        results = runs(made, f"single-{name}")
        curve = 100 * np.array([[m["before"]["accuracy_mean"] for m in r.metrics] for r in results])
        state = results[0].state
        model = {"params": state.server["params"]} if name == "plain" else trees.row(state.rows, 0)
        zeros = sum(int((np.asarray(mu) == 0).sum()) for mu in collect_mu(model))
        found[name] = {"before": curve.mean(0).tolist(), "numbers": trees.size(model) - zeros}
        axis.plot(
            range(1, curve.shape[1] + 1),
            curve.mean(0),
            label=f"{name}, {found[name]['numbers']:,} numbers",
        )
    axis.set(xlabel="epoch", ylabel="accuracy (%)")
    axis.legend(frameon=False)
    return found, figure


LENGTHS = {"": common.Length(20, 50)}
STUDIES: dict[str, common.Study] = {
    "figure6": figure6,
    "similarity": similarity,
    "components": components,
    "rank": rank,
    "tau": tau,
    "layout": layout,
    "single": single,
    "sparsity": sparsity,
    "distance": gradient_distances.study,
}
