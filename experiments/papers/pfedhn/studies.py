"""Figures of the pFedHN paper. Its tables: experiments.reproduce.

python -m experiments.studies pfedhn novel --dataset=cifar10 --rounds=1000 --seeds=3

--rounds is the number of communication steps. A study has 60 on the embedded digits, with few
values and methods. --paper sets the paper's 5,000, its dataset, clients, three seeds, values and
methods. Numbers are means over seeds.

spectral  with and without spectral normalisation (table 4; --paper: CIFAR-10, 50 clients)
novel    figures 2 and 7: clients that join after training, more and more unlike the others
         (--paper: CIFAR-10, 90 clients and 10 new ones, four values of α, four methods)
figure3  every client's head on every client's body (--paper: CIFAR-10, 10 clients)
figure4  t-SNE of the embeddings of clients that share classes in groups, drawn for seed 0
         (--paper: CIFAR-100)
figure5  numbers of local steps (--paper: CIFAR-10, 50 clients)
figure6  length of the embedding and depth of the hypernetwork (--paper: CIFAR-10, 50 clients)
fixed    learned embeddings and class shares (appendix C.5; --paper: CIFAR-10, 50 clients)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from ml_collections import ConfigDict
from sklearn.manifold import TSNE
from sklearn.metrics import silhouette_score

from experiments.papers import study
from experiments.papers.pfedhn import tables as tables
from experiments.papers.study import CLIENTS, DATASET, ROUNDS, SEEDS, mean_std
from experiments.papers.table import accuracy, best, curve, plateau
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import Split, client_data
from fedjax_pfl.core.task import classification
from fedjax_pfl.runs import runner

COARSE_CLASSES = 20  # of CIFAR-100


def _config(*parts: str, **changes: Any) -> ConfigDict:
    config = tables.settings(DATASET.value, ROUNDS.value, *parts)
    config.update(changes)
    return config


def _numbers(results: list[runner.Result]) -> dict[str, Any]:
    return {
        "best": mean_std([best(r) for r in results]),
        "best_weighted": mean_std([best(r, "accuracy_weighted") for r in results]),
        "last": mean_std([accuracy(r) for r in results]),
        "curve": [plateau(r) for r in results],
    }


def spectral() -> tuple[dict[str, Any], Figure]:
    """Trains with and without spectral normalisation of the hypernetwork."""
    numbers = {}
    for name, on in (("plain", False), ("spectral", True)):
        config = tables.spectral(on, DATASET.value, f"n{CLIENTS.value}", ROUNDS.value)
        numbers[name] = _numbers(study.runs(config, f"table4-n{CLIENTS.value}-{name}"))
    return numbers, study.bars({name: {"best": row["best"]} for name, row in numbers.items()})


def total_variation(counts: np.ndarray, novel: np.ndarray) -> np.ndarray:
    """Returns, for each novel client, ½ Σ_c |p_c − q_c| to the nearest trained client.

    `counts` [N, C] has examples by client and class; `novel` is bool [N].
    """
    shares = counts / counts.sum(1, keepdims=True)
    gaps = 0.5 * np.abs(shares[novel][:, None] - shares[~novel][None]).sum(-1)
    return gaps.min(1)


def novel() -> tuple[dict[str, Any], Figure]:
    """Trains only the embeddings of new clients; baselines fine-tune their global model."""
    clients, held_out = (20, 4) if DATASET.value == "digits" else (100, 10)
    visits = max(held_out, ROUNDS.value * held_out // (clients - held_out))  # as many for each
    # At the default rate an embedding moves by a thousandth of its length in a visit. Of 0.01, 0.1,
    # 1 and 10 this rate has the best validation accuracy of new clients on CIFAR-10.
    v_alone = {"frozen": True, "rate": 1.0}
    phases: tuple[dict[str, Any], ...] = (
        {},
        {"participants": "held_out", "rounds": visits, "pfedhn": v_alone},
    )
    methods: dict[str, tuple[str, dict[str, Any]]] = {
        "pfedhn": ("before", {"phases": phases}),
        "fedavg": ("after", {"evaluate_after": True}),
        "per_fedavg": ("after", {"evaluate_after": True}),
        "pfedme": ("after", {"evaluate_after": True}),
    }
    numbers: dict[str, Any] = {}
    for method in study.select_methods(methods, ("pfedhn", "fedavg")):
        when, changes = methods[method]
        numbers[method] = {}
        for alpha in study.scope((0.1, 1.0), (0.1, 0.25, 0.5, 1.0)):
            config = _config(f"n{clients}", method, held_out=held_out, **changes)
            config.partition = "dirichlet_classes"
            config.dirichlet_classes.update(alpha=0.1, novel_alpha=alpha, equal=False)
            gaps, points = [], []
            for result in study.runs(config, f"novel{alpha:g}-{method}"):
                score = np.array([100 * c[f"{when}_accuracy"] for c in result.clients])
                new = ~result.federation.active
                assert result.federation.class_counts is not None  # images have classes
                distance = total_variation(result.federation.class_counts, new)
                gaps.append(score[new].mean() - score[~new].mean())
                points += list(zip(distance.tolist(), score[new].tolist(), strict=True))
            numbers[method][f"{alpha:g}"] = {
                "gap": mean_std(gaps),
                "total_variation": float(np.mean([d for d, _ in points])),
                "clients": points,
            }
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (method, rows), colour in zip(numbers.items(), study.COLOURS, strict=False):
        place = [row["total_variation"] for row in rows.values()]
        mean = [row["gap"]["mean"] for row in rows.values()]
        order = np.argsort(place)
        left.plot(np.array(place)[order], np.array(mean)[order], "o-", color=colour, label=method)
        x, y = zip(*(point for row in rows.values() for point in row["clients"]), strict=True)
        right.scatter(x, y, s=14, color=colour, alpha=0.6)
    left.set(
        xlabel="mean total variation to the nearest trained client",
        ylabel="accuracy, novel − trained (points)",
    )
    left.legend(frameon=False)
    right.set(xlabel="total variation of each novel client", ylabel="accuracy (%)")
    return numbers, figure


def row_normalised(accuracy: np.ndarray) -> np.ndarray:
    """Scales each row to [0, 1]; a row of equal values becomes 1."""
    low = accuracy.min(1, keepdims=True)
    width = accuracy.max(1, keepdims=True) - low
    return np.where(width > 0, (accuracy - low) / np.where(width > 0, width, 1), 1.0)


def _crossed(result: runner.Result) -> np.ndarray:
    """Returns the accuracy [N, N] of head i on body j, on the test examples of client i."""
    algorithm, data = result.phases[-1].algorithm, jax.tree.map(jnp.asarray, result.data)
    state, key = result.best or result.state, jax.random.key(0)

    @jax.jit
    def score(state: Any, i: jax.Array, j: jax.Array) -> jax.Array:
        examples, client = client_data(data, i), trees.row(state.clients, i)
        ctx = ClientContext(j, examples, jnp.int32(0), key)
        variables = algorithm.personalize(state._replace(clients=()), client, ctx)
        test = Split(data.test.rows[i], data.test.size[i])
        scores = local_training.evaluate(
            algorithm.predict, variables, examples, test, classification()
        )
        return scores.metrics["accuracy"] / scores.examples

    n = range(result.federation.clients)
    return np.array([[float(score(state, jnp.int32(i), jnp.int32(j))) for j in n] for i in n])


def _spread(result: runner.Result) -> float:
    """Returns the mean distance of generated models from their mean; 0 if all are one model."""
    return float(np.mean(result.observations["spread"][1][-1]))


def figure3() -> tuple[dict[str, Any], Figure]:
    """Joins the bodies and heads of different clients of pFedHN-PC; accuracies are seed means."""
    config = _config(f"n{CLIENTS.value}", "pfedhn_pc")
    results = study.runs(config, f"figure3-n{config.clients}")
    by_seed = np.array([_crossed(result) for result in results])  # [seeds, N, N]
    accuracy = by_seed.mean(0)
    figure = Figure(figsize=(5.4, 4.4), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(row_normalised(accuracy), cmap="viridis", vmin=0, vmax=1)
    ticks = range(len(accuracy))
    axis.set(xlabel="body θ of client", ylabel="head ω of client", xticks=ticks, yticks=ticks)
    figure.colorbar(image, ax=axis, label="accuracy, normalised in each row")
    diagonal = by_seed.diagonal(axis1=1, axis2=2)  # [seeds, N]
    off = (by_seed.sum(2) - diagonal) / (len(accuracy) - 1)
    return {
        "own_body": mean_std((100 * diagonal.mean(1)).tolist()),
        "other_bodies": mean_std((100 * off.mean(1)).tolist()),
        "spread_of_bodies": mean_std([_spread(result) for result in results]),
        "own_is_best_of_row": mean_std((diagonal >= by_seed.max(2)).mean(1).tolist()),
        "accuracy": accuracy.tolist(),
    }, figure


def own_moves(values: np.ndarray) -> np.ndarray:
    """Returns how embeddings [T, N, e] moved from the first to the last evaluation, without decay.

    Decay scales all embeddings alike. That part of the change is removed.
    """
    first, last = values[0], values[-1]
    return last - np.sum(first * last) / np.sum(first * first) * first


def share_near_own_group(points: np.ndarray, group: np.ndarray) -> float:
    """Returns the share of clients whose nearest neighbour is in their own group."""
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    np.fill_diagonal(distances, np.inf)
    return float(np.mean(group[distances.argmin(1)] == group))


class Clusters(NamedTuple):
    """Groups of clients with the same classes, compared with embeddings and with their moves."""

    group: np.ndarray  # [N]; number of each client's group
    pictures: dict[str, np.ndarray]  # t-SNE of "v" and of "moves", [N, 2]
    measures: dict[str, float]


def clusters(result: runner.Result) -> Clusters:
    """Returns t-SNE pictures of a run's embeddings, and how far they show the groups of clients."""
    assert result.federation.class_counts is not None  # images have classes
    classes = result.federation.class_counts > 0
    group = np.unique(classes, axis=0, return_inverse=True)[1].ravel()
    values = np.stack(result.observations["embeddings"][1])
    vectors = {"v": values[-1], "moves": own_moves(values)}
    lengths = [float(np.linalg.norm(x, axis=1).mean()) for x in (vectors["moves"], values[0])]
    measures = {"spread_of_models": _spread(result), "length_of_moves": lengths[0] / lengths[1]}
    pictures = {}
    for name, x in vectors.items():
        tsne = TSNE(perplexity=min(30, len(x) // 4), random_state=0, init="pca")
        pictures[name] = tsne.fit_transform(x)
        measures[f"silhouette_of_{name}"] = float(silhouette_score(x, group))
        measures[f"silhouette_of_picture_of_{name}"] = float(
            silhouette_score(pictures[name], group)
        )
        measures[f"nearest_of_own_group_by_{name}"] = share_near_own_group(x, group)
    return Clusters(group, pictures, measures)


def figure4() -> tuple[dict[str, Any], Figure]:
    """Compares embeddings with coarse classes on CIFAR-100, else with pairs of classes.

    Numbers are means over seeds. The picture shows seed 0, because points of t-SNE have no mean.
    """
    if DATASET.value == "cifar100":
        if CLIENTS.value <= COARSE_CLASSES:
            raise UsageError(
                f"figure4 compares clients that share a coarse class, and {CLIENTS.value} clients "
                f"share none of the {COARSE_CLASSES}; give --clients={COARSE_CLASSES + 1} or more"
            )
        config = _config(f"n{CLIENTS.value}", partition="coarse", coarse={"per_client": 1})
    else:
        study.refuse_flag("clients", "figure4", f"with --dataset={DATASET.value}")
        config = _config("n20", partition="listed")
        config.listed.classes = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
        config.listed.examples = 80 if DATASET.value == "digits" else 600
    results = study.runs(config, f"figure4-n{config.clients}")
    by_seed = [clusters(result) for result in results]
    first = by_seed[0]
    figure = Figure(figsize=(9.4, 4.4), layout="constrained")
    titles = ("v at the end", "change of v without decay")
    for axis, points, title in zip(
        figure.subplots(1, 2), first.pictures.values(), titles, strict=True
    ):
        axis.scatter(points[:, 0], points[:, 1], c=first.group, cmap="tab20", s=30)
        axis.set(xticks=[], yticks=[], title=title)
    figure.suptitle("t-SNE of the embeddings, seed 0; a colour for each group of classes")
    return {
        **_numbers(results),
        "clients": len(first.group),
        "groups": int(first.group.max()) + 1,
        **{name: mean_std([c.measures[name] for c in by_seed]) for name in first.measures},
    }, figure


def figure5() -> tuple[dict[str, Any], Figure]:
    """Varies the number of local steps; the number of communication steps stays."""
    numbers: dict[str, Any] = {}
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axis = figure.subplots()
    for steps, colour in zip((1, 25, 50, 100, 200), study.COLOURS, strict=True):
        config = _config(f"n{CLIENTS.value}", local_steps=steps)
        results = study.runs(config, f"figure5-n{config.clients}-{steps}")
        numbers[str(steps)] = _numbers(results)
        curves = [curve(result) for result in results]
        rounds = [m["round"] for m in results[0].metrics]
        axis.plot(rounds, np.mean(curves, 0), color=colour, label=str(steps))
    axis.set(xlabel="communication step", ylabel="accuracy (%)")
    axis.legend(frameon=False, title="local steps")
    return numbers, figure


def figure6() -> tuple[dict[str, Any], Figure]:
    """Varies the embedding's length and the hypernetwork's depth, one at a time."""
    numbers: dict[str, Any] = {}
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    short: dict[str, tuple[int, ...]] = {"embedding": (5, 35), "depth": (1, 3, 5)}
    settings = study.scope(short, {"embedding": (5, 15, 25, 35), "depth": (1, 2, 3, 4, 5)})
    for axis, (name, values) in zip(
        figure.subplots(1, 2, sharey=True), settings.items(), strict=True
    ):
        numbers[name] = {}
        for value in values:
            config = _config(f"n{CLIENTS.value}", pfedhn={name: value})
            results = study.runs(config, f"figure6-n{config.clients}-{name}{value}")
            numbers[name][value] = _numbers(results)
        best = [numbers[name][value]["best"] for value in values]
        spread = None if SEEDS.value == 1 else [b["std"] for b in best]
        axis.errorbar(values, [b["mean"] for b in best], spread, marker="o", capsize=4)
        axis.set(xlabel=f"{name} of the hypernetwork", xticks=values)
    figure.axes[0].set_ylabel("accuracy (%)")
    return numbers, figure


def fixed() -> tuple[dict[str, Any], Figure]:
    """Compares learned embeddings with class shares, ten numbers per client."""
    numbers = {}
    for name, changes in (("trainable", {"embedding": 10}), ("fixed", {"fixed": True})):
        config = _config(f"n{CLIENTS.value}", partition="dirichlet_classes", pfedhn=changes)
        config.dirichlet_classes.update(alpha=0.1, equal=False)
        numbers[name] = _numbers(study.runs(config, f"fixed-n{config.clients}-{name}"))
    return numbers, study.bars({name: {"best": row["best"]} for name, row in numbers.items()})


_USUAL_OPTIONS = study.StudyOptions(60, 5000, ("clients",), "cifar10", 50, seeds=3)
OPTIONS = {
    "spectral": _USUAL_OPTIONS._replace(own_settings=("pfedhn.spectral_norm",)),
    "novel": _USUAL_OPTIONS._replace(
        flags=("methods",),
        clients=None,
        own_settings=(
            "clients",
            "held_out",
            "partition",
            "dirichlet_classes.*",
            "phases",
            "evaluate_after",
        ),
    ),
    "figure3": _USUAL_OPTIONS._replace(clients=10),
    "figure4": _USUAL_OPTIONS._replace(
        dataset="cifar100",
        clients=100,
        own_settings=("partition", "listed.*", "coarse.*", "pfedhn.fixed"),
    ),
    "figure5": _USUAL_OPTIONS._replace(own_settings=("local_steps",)),
    "figure6": _USUAL_OPTIONS._replace(own_settings=("pfedhn.embedding", "pfedhn.depth")),
    "fixed": _USUAL_OPTIONS._replace(
        own_settings=("pfedhn.embedding", "pfedhn.fixed", "partition")
    ),
}
STUDIES: dict[str, study.Study] = {
    "spectral": spectral,
    "novel": novel,
    "figure3": figure3,
    "figure4": figure4,
    "figure5": figure5,
    "figure6": figure6,
    "fixed": fixed,
}
