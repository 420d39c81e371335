"""Distances between updates on similar, relabelled and foreign data (figures 1b, 1c and 4).

Four learners start from the same model. They train on one part of the data (the reference), on
another part, on that part with permuted labels, and on foreign data. MNIST and CIFAR-10 are foreign
to each other; for digits it is digits with their pixels in a fixed random order.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments.papers.study import DATA_DIR, DATASET, ROUNDS, SEEDS, SET, mean_std
from fedjax_pfl import data
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import ClientData, Split
from fedjax_pfl.core.task import classification
from fedjax_pfl.networks import LeNet, SmallCNN
from fedjax_pfl.networks.factorized import Factorized

DATA_KINDS = ("another part", "permuted labels", "foreign data")
COLOURS = ("#999999", "#d55e00", "#0072b2")
PERIOD = 3  # epochs between two averages, as in figure 1c


def images(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns training images as float32 in [-1, 1], MNIST in CIFAR-10's shape, and labels."""
    source = data.load(name, DATA_DIR.value)
    x = source.x_train.astype(np.float32)
    x = x / x.max() * 2 - 1
    if name == "mnist":
        x = np.repeat(np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)), constant_values=-1), 3, 3)
    return x, source.y_train


def learners(seed: int) -> list[ClientData]:
    """Returns the four learners' data, with a fifth as validation split."""
    rng = np.random.default_rng(seed)
    if DATASET.value not in ("digits", "mnist", "cifar10"):
        raise UsageError("distance needs foreign data; choose digits, mnist or cifar10")
    x, y = images(DATASET.value)
    if DATASET.value == "digits":
        foreign_x, foreign_y = x.reshape(len(x), -1)[:, rng.permutation(64)].reshape(x.shape), y
    else:
        foreign_x, foreign_y = images("cifar10" if DATASET.value == "mnist" else "mnist")
    size = min(2000, len(x) // 2)
    rows = rng.permutation(len(x))
    first, second = rows[:size], rows[size : 2 * size]
    foreign = rng.permutation(len(foreign_x))[:size]
    permutation = rng.permutation(10).astype(np.int32)
    parts = (
        (x[first], y[first]),
        (x[second], y[second]),
        (x[second], permutation[y[second]]),
        (foreign_x[foreign], foreign_y[foreign]),
    )
    cut = size * 4 // 5

    def client_data(x: np.ndarray, y: np.ndarray) -> ClientData:
        splits = (_rows(0, cut), _rows(cut, size))
        return ClientData(jnp.asarray(x), jnp.asarray(y), *splits, None, None, None, None)

    return [client_data(*part) for part in parts]


def _rows(first: int, end: int) -> Split:
    return Split(jnp.arange(first, end, dtype=jnp.int32), jnp.int32(end - first))


def distance(a: Any, b: Any) -> float:
    """Returns ‖a/‖a‖ − b/‖b‖‖, from 0 for the same direction to 2 for opposite directions."""
    a, b = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(t)]) for t in (a, b))
    return float(np.linalg.norm(a / np.linalg.norm(a) - b / np.linalg.norm(b)))


def _is_part(head: str, kind: str, layer: str, leaf: str) -> bool:
    """Returns True if a leaf is compared: not of the head, and of this kind or any ("all")."""
    return layer != head and kind in (leaf, "all")


def _one_seed(net: Any, seed: int, epochs: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Returns distances of each epoch's updates from the reference's, and accuracy curves.

    The curves are the reference's accuracy while its body is averaged with another learner's.
    """
    task, datasets = classification(), learners(seed)
    training = local_training.sgd(learning_rate=0.01, momentum=0.9, batch_size=64, epochs=1)

    @jax.jit
    def epoch(variables: Any, data: ClientData, key: jax.Array) -> Any:
        params, statistics = local_training.split_variables(variables)
        gradient = local_training.gradient(net, task, data)
        params, statistics, _, _ = local_training.fit(
            training, gradient, params, statistics, (), ClientContext(0, data, jnp.int32(0), key)
        )
        return {"params": params, **statistics}

    @jax.jit
    def score(variables: Any, data: ClientData) -> jax.Array:
        scores = local_training.evaluate(net.apply, variables, data, data.validation, task)
        return scores.metrics["accuracy"] / scores.examples.astype(jnp.float32)

    key = jax.random.key(seed)
    start = net.init(key, datasets[0].x[:1])
    factorised = isinstance(net, Factorized)
    all_updates: list[list[Any]] = []
    for learner in datasets:
        variables, updates = dict(start), []
        for e in range(epochs):
            trained = epoch(variables, learner, jax.random.fold_in(key, e))
            update = jax.tree.map(jnp.subtract, trained["params"], variables["params"])
            updates.append(jax.device_get(update))
            variables = trained
        all_updates.append(updates)
    distances: dict[str, list[float]] = {}
    for kind in ("u", "v") if factorised else ("all",):
        is_part = partial(_is_part, net.head, kind)
        parts = [[trees.divide(u, is_part)[0] for u in updates] for updates in all_updates]
        for updates, name in zip(parts[1:], DATA_KINDS, strict=True):
            distances[f"{kind}: {name}"] = list(map(distance, parts[0], updates))
    if factorised:
        return distances, {}

    def averaged(peer_data: ClientData | None) -> list[float]:
        """Returns the reference's accuracy with its body averaged with a peer's periodically."""
        model, peer, curve = dict(start), dict(start), []
        for e in range(epochs):
            step = jax.random.fold_in(key, e)
            model = epoch(model, datasets[0], step)
            if peer_data is not None:
                peer = epoch(peer, peer_data, step)
            if peer_data is not None and (e + 1) % PERIOD == 0:
                (head, body), (peer_head, peer_body) = (
                    trees.split(v, {net.head}) for v in (model, peer)
                )
                mean = jax.tree.map(lambda a, b: (a + b) / 2, body, peer_body)
                model, peer = trees.join(mean, head), trees.join(mean, peer_head)
            curve.append(100 * float(score(model, datasets[0])))
        return curve

    curves = {"alone": averaged(None)}
    curves |= {name: averaged(peer) for name, peer in zip(DATA_KINDS, datasets[1:], strict=True)}
    return distances, curves


def study() -> tuple[dict[str, Any], Figure]:
    """Plots distances and accuracies over epochs, one for each of --rounds."""
    if SET.value:
        raise UsageError(f"distance has no settings to change; leave --set={SET.value[0]} out")
    small = DATASET.value == "digits"
    network = (SmallCNN if small else LeNet)(batch_norm=True)
    shape = (8, 8, 1) if small else (32, 32, 3)
    measured: dict[str, Any] = {}
    figure = Figure(figsize=(14, 3.6), layout="constrained")
    axes = figure.subplots(1, 4)
    epochs = range(1, ROUNDS.value + 1)
    for net in (network, Factorized(network, shape)):
        seeds = [_one_seed(net, seed, ROUNDS.value) for seed in range(SEEDS.value)]
        for line in seeds[0][0]:
            kind, name = line.split(": ")
            curve = np.mean([distances[line] for distances, _ in seeds], 0)
            over_epochs = mean_std([float(np.mean(d[line])) for d, _ in seeds])
            measured[line] = {"epochs": curve.tolist(), "mean": over_epochs}
            axis = axes[["all", "u", "v"].index(kind)]
            axis.plot(epochs, curve, color=COLOURS[DATA_KINDS.index(name)], label=name)
            axis.set(
                title={"all": "plain network"}.get(kind, f"factorised: {kind}"), xlabel="epoch"
            )
        for i, name in enumerate(seeds[0][1]):
            curve = np.mean([curves[name] for _, curves in seeds], 0)
            measured[f"accuracy, mean with {name}"] = curve.tolist()
            axes[3].plot(epochs, curve, color=("#000000", *COLOURS)[i], label=name)
    axes[0].set(ylabel="distance of normalised updates")
    axes[0].legend(frameon=False, fontsize=8)
    axes[3].set(
        title=f"bodies averaged every {PERIOD} epochs", xlabel="epoch", ylabel="accuracy (%)"
    )
    axes[3].legend(frameon=False, fontsize=8)
    return measured, figure
