"""How far updates of models on like, relabelled and foreign data lie apart (figures 1b, 1c, 4).

Four learners start from one model: one on a part of the data (the reference), one on another part,
one on that part with its labels permuted, and one on foreign data: MNIST and CIFAR-10 for each
other, digits with their pixels in one random order for digits.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments.launch import DATA_DIR
from experiments.papers.study import DATASET, ROUNDS, SEEDS, mean_std
from fedjax_pfl import data
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Visit
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import ClientData, Split
from fedjax_pfl.core.task import classification
from fedjax_pfl.networks import LeNet, SmallCNN
from fedjax_pfl.networks.factorized import Factorized

OTHERS = ("another part", "permuted labels", "foreign data")
COLOURS = ("#999999", "#d55e00", "#0072b2")
EVERY = 3  # epochs between two means, as in figure 1c


def images(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Training images as float32 [-1, 1], MNIST in CIFAR-10's shape."""
    source = data.load(name, DATA_DIR.value)
    x = source.x_train.astype(np.float32)
    x = x / x.max() * 2 - 1
    if name == "mnist":
        x = np.repeat(np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)), constant_values=-1), 3, 3)
    return x, source.y_train


def learners(seed: int) -> list[ClientData]:
    """The four: a fifth of each one's examples is kept to test on, as its validation split."""
    rng = np.random.default_rng(seed)
    if DATASET.value not in ("digits", "mnist", "cifar10"):
        raise UsageError("distance knows foreign data for digits, mnist and cifar10; choose one")
    x, y = images(DATASET.value)
    if DATASET.value == "digits":
        strange, labels = x.reshape(len(x), -1)[:, rng.permutation(64)].reshape(x.shape), y
    else:
        strange, labels = images("cifar10" if DATASET.value == "mnist" else "mnist")
    size = min(2000, len(x) // 2)
    rows = rng.permutation(len(x))
    one, other = rows[:size], rows[size : 2 * size]
    foreign = rng.permutation(len(strange))[:size]
    renamed = rng.permutation(10).astype(np.int32)
    parts = (
        (x[one], y[one]),
        (x[other], y[other]),
        (x[other], renamed[y[other]]),
        (strange[foreign], labels[foreign]),
    )
    cut = size * 4 // 5

    def whole(x: np.ndarray, y: np.ndarray) -> ClientData:
        splits = (_rows(0, cut), _rows(cut, size))
        return ClientData(jnp.asarray(x), jnp.asarray(y), *splits, None, None, None, None)

    return [whole(*part) for part in parts]


def _rows(first: int, end: int) -> Split:
    return Split(jnp.arange(first, end, dtype=jnp.int32), jnp.int32(end - first))


def apart(one: Any, other: Any) -> float:
    """‖a/‖a‖ − b/‖b‖‖, from 0 for the same direction to 2 for the opposite one."""
    a, b = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(t)]) for t in (one, other))
    return float(np.linalg.norm(a / np.linalg.norm(a) - b / np.linalg.norm(b)))


def _is_part(head: str, kind: str, layer: str, leaf: str) -> bool:
    """Whether a leaf is compared: of any layer but the head, of one kind or of "all"."""
    return layer != head and kind in (leaf, "all")


def _one_seed(net: Any, seed: int, epochs: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Distances of each epoch's updates from the reference's, and accuracy when means are taken."""
    task, people = classification(), learners(seed)
    training = local_training.sgd(learning_rate=0.01, momentum=0.9, batch_size=64, epochs=1)

    @jax.jit
    def epoch(variables: Any, own: ClientData, key: jax.Array) -> Any:
        params, rest = local_training.split_variables(variables)
        gradient = local_training.gradient(net, task, own)
        params, rest, _, _ = local_training.fit(
            training, gradient, params, rest, (), Visit(0, own, jnp.int32(0), key)
        )
        return {"params": params, **rest}

    @jax.jit
    def score(variables: Any, own: ClientData) -> jax.Array:
        found = local_training.evaluate(net.apply, variables, own, own.validation, task)
        return found.metrics["accuracy"] / found.examples.astype(jnp.float32)

    key = jax.random.key(seed)
    start = net.init(key, people[0].x[:1])
    factorised = isinstance(net, Factorized)
    moved: list[list[Any]] = []
    for own in people:
        now, updates = dict(start), []
        for e in range(epochs):
            new = epoch(now, own, jax.random.fold_in(key, e))
            updates.append(jax.device_get(jax.tree.map(jnp.subtract, new["params"], now["params"])))
            now = new
        moved.append(updates)
    found: dict[str, list[float]] = {}
    for kind in ("u", "v") if factorised else ("all",):
        chosen = partial(_is_part, net.head, kind)
        parts = [[trees.divide(update, chosen)[0] for update in updates] for updates in moved]
        for other, name in zip(parts[1:], OTHERS, strict=True):
            found[f"{kind}: {name}"] = list(map(apart, parts[0], other))
    if factorised:
        return found, {}

    def averaged(other: ClientData | None) -> list[float]:
        """The reference's accuracy, its body averaged with another's now and then."""
        mine, theirs, curve = dict(start), dict(start), []
        for e in range(epochs):
            step = jax.random.fold_in(key, e)
            mine = epoch(mine, people[0], step)
            if other is not None:
                theirs = epoch(theirs, other, step)
            if other is not None and (e + 1) % EVERY == 0:
                (own, body), (others, strange) = (
                    trees.split(v, {net.head}) for v in (mine, theirs)
                )
                mean = jax.tree.map(lambda a, b: (a + b) / 2, body, strange)
                mine, theirs = trees.join(mean, own), trees.join(mean, others)
            curve.append(100 * float(score(mine, people[0])))
        return curve

    curves = {"alone": averaged(None)}
    curves |= {name: averaged(other) for name, other in zip(OTHERS, people[1:], strict=True)}
    return found, curves


def study() -> tuple[dict[str, Any], Figure]:
    """Each round is an epoch."""
    small = DATASET.value == "digits"
    plain = (SmallCNN if small else LeNet)(batch_norm=True)
    shape = (8, 8, 1) if small else (32, 32, 3)
    found: dict[str, Any] = {}
    figure = Figure(figsize=(14, 3.6), layout="constrained")
    axes = figure.subplots(1, 4)
    epochs = range(1, ROUNDS.value + 1)
    for net in (plain, Factorized(plain, shape)):
        seeds = [_one_seed(net, seed, ROUNDS.value) for seed in range(SEEDS.value)]
        for line in seeds[0][0]:
            kind, name = line.split(": ")
            curve = np.mean([distances[line] for distances, _ in seeds], 0)
            over_epochs = mean_std([float(np.mean(d[line])) for d, _ in seeds])
            found[line] = {"epochs": curve.tolist(), "mean": over_epochs}
            axis = axes[["all", "u", "v"].index(kind)]
            axis.plot(epochs, curve, color=COLOURS[OTHERS.index(name)], label=name)
            axis.set(
                title={"all": "plain network"}.get(kind, f"factorised: {kind}"), xlabel="epoch"
            )
        for i, name in enumerate(seeds[0][1]):
            curve = np.mean([curves[name] for _, curves in seeds], 0)
            found[f"accuracy, mean with {name}"] = curve.tolist()
            axes[3].plot(epochs, curve, color=("#000000", *COLOURS)[i], label=name)
    axes[0].set(ylabel="distance of normalised updates")
    axes[0].legend(frameon=False, fontsize=8)
    axes[3].set(
        title=f"bodies averaged every {EVERY} epochs", xlabel="epoch", ylabel="accuracy (%)"
    )
    axes[3].legend(frameon=False, fontsize=8)
    return found, figure
