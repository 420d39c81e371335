"""Accuracy after many rounds: the same split and first parameters, batches drawn by each by itself.

Ten clients hold four classes of the embedded digits each, ten examples of each class to train on
and thirty-three to test, and no example is with two of them. Of each seed there is one split and
one set of first parameters; what differs beside the method is the order of batches.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.libraries import ours, rivals
from experiments.libraries.methods import EPOCHS, METHODS
from experiments.libraries.ours import CLASSES, Arrays, Net
from fedjax_pfl.core import local_training
from fedjax_pfl.core.scores import ACCURACY
from fedjax_pfl.report import text_tables
from fedjax_pfl.simulation.rounds import make_rounds

CLIENTS, OWN, TRAIN, TEST, BATCH, RATE = 10, 4, 10, 33, 20, 0.1
STAGES = ("before", "after")
Accuracies = dict[str, list[float]]  # by stage, of each seed the mean over clients
Found = dict[str, Any]  # rounds, seeds, commits; ours by method; theirs by library and method


def work(norm: bool, seed: int) -> Arrays:
    """As of `ours.work`, with test_x and test_y beside."""
    from sklearn.datasets import load_digits

    source, rng = load_digits(), np.random.default_rng(seed)
    x, y = (source.data / 16).astype(np.float32), source.target
    each = TRAIN + TEST
    holders = {c: [(c - j) % CLIENTS for j in range(OWN)] for c in range(CLASSES)}
    places: dict[int, dict[str, list[int]]] = {i: {"": [], "test_": []} for i in range(CLIENTS)}
    for c, owners in holders.items():
        drawn = rng.permutation(np.flatnonzero(y == c))[: each * OWN].reshape(OWN, each)
        for i, rows in zip(owners, drawn, strict=True):
            places[i][""] += rows[:TRAIN].tolist()
            places[i]["test_"] += rows[TRAIN:].tolist()
    found: Arrays = {}
    for prefix in ("", "test_"):
        rows = np.array([places[i][prefix] for i in range(CLIENTS)])
        found |= {f"{prefix}x": x[rows], f"{prefix}y": y[rows]}
    first = dict(Net(norm).init(jax.random.key(seed), jnp.zeros((1, x.shape[1]))))
    return found | {f"start/{n}": np.asarray(v) for n, v in ours.named(first["params"]).items()}


def rounds(name: str, norm: bool, seeds: Sequence[int], many: int) -> Accuracies:
    """Ours, of each seed: as served, and after local training."""
    training = local_training.sgd(learning_rate=RATE, batch_size=BATCH, epochs=EPOCHS)
    given = [work(norm, seed) for seed in seeds]
    made, _, _, federation = ours.made(name, given[0], training)
    engine = make_rounds(made, federation, cohort=CLIENTS, max_rounds=many)
    found: Accuracies = {stage: [] for stage in STAGES}
    for seed, one in zip(seeds, given, strict=True):
        _, begun, data, _ = ours.made(name, one, training)
        key = jax.random.key(seed)
        state = engine.place(jax.jit(begun.init)(key))
        state, _ = engine.run(key, state, data, jnp.int32(0), jnp.int32(many))
        scores = jax.device_get(engine.evaluate(key, state, data, jnp.int32(many)))
        for stage in STAGES:
            of_stage = getattr(scores, stage)
            shares = ACCURACY.finish(of_stage.metrics[ACCURACY.name], of_stage.examples)
            found[stage].append(float(np.mean(shares)))
    return found


def apart(mine: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether the means are further apart than either's deviation over seeds."""
    spread = max(np.std(mine, ddof=1), np.std(theirs, ddof=1))
    return bool(abs(np.mean(mine) - np.mean(theirs)) > spread)


def table(found: Found) -> text_tables.Table:
    """A row for each method; an asterisk where theirs is apart from ours."""
    sides = list(found["theirs"])
    heads = [f"{stage}: {who}" for stage in STAGES for who in ("ours", *map(_name, sides))]
    rows = []
    for name in METHODS:
        if name not in found["ours"]:
            continue
        row, mine = [name], found["ours"][name]
        for stage in STAGES:
            row.append(_cell(mine[stage]))
            for side in sides:
                there = found["theirs"][side].get(name)
                mark = " *" if there and apart(mine[stage], there[stage]) else ""
                row.append(_cell(there[stage]) + mark if there else "")
        rows.append(row)
    return text_tables.Table("", heads, rows)


def _name(side: str) -> str:
    return rivals.NAMES[side]


def _cell(values: Sequence[float]) -> str:
    return f"{100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=1):.1f}"


def asterisks(found: Found) -> list[tuple[str, str, list[str]]]:
    """Of which method in which library which stages are apart."""
    return [
        (name, side, stages)
        for side, each in found["theirs"].items()
        for name, there in each.items()
        if (stages := [s for s in STAGES if apart(found["ours"][name][s], there[s])])
    ]


def reasons(found: Found) -> list[str]:
    """Why what is apart is."""
    return [
        f"{name} in {_name(side)}, {' and '.join(stages)}: {getattr(METHODS[name], side).accuracy}"
        for name, side, stages in asterisks(found)
    ]
