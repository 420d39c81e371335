"""Accuracy after many rounds in this and other libraries, from the same split and initial model.

Ten clients hold four classes of the embedded digits each, with ten training and thirty-three test
examples per class; no two clients share an example. Each seed has its split and initial parameters;
besides the method, only the order of batches differs.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.libraries import reference_work, rivals
from experiments.libraries.methods import EPOCHS, METHODS
from experiments.libraries.reference_work import CLASSES, Arrays, Net
from fedjax_pfl.core import local_training
from fedjax_pfl.core.metrics import ACCURACY
from fedjax_pfl.report import text_tables
from fedjax_pfl.simulation.rounds import make_rounds

CLIENTS, CLASSES_PER_CLIENT, TRAIN, TEST, BATCH, RATE = 10, 4, 10, 33, 20, 0.1
STAGES = ("before", "after")
Accuracies = dict[str, list[float]]  # by stage: mean over clients for each seed
Results = dict[str, Any]  # rounds, seeds, commits; library by method; rivals by name, then method


def work(norm: bool, seed: int) -> Arrays:
    """Like `reference_work.work`, with test_x and test_y."""
    from sklearn.datasets import load_digits

    source, rng = load_digits(), np.random.default_rng(seed)
    x, y = (source.data / 16).astype(np.float32), source.target
    per_class = TRAIN + TEST
    holders = {c: [(c - j) % CLIENTS for j in range(CLASSES_PER_CLIENT)] for c in range(CLASSES)}
    rows_by_client: dict[int, dict[str, list[int]]] = {
        i: {"": [], "test_": []} for i in range(CLIENTS)
    }
    for c, owners in holders.items():
        indices = rng.permutation(np.flatnonzero(y == c))[: per_class * CLASSES_PER_CLIENT].reshape(
            CLASSES_PER_CLIENT, per_class
        )
        for i, rows in zip(owners, indices, strict=True):
            rows_by_client[i][""] += rows[:TRAIN].tolist()
            rows_by_client[i]["test_"] += rows[TRAIN:].tolist()
    arrays: Arrays = {}
    for prefix in ("", "test_"):
        rows = np.array([rows_by_client[i][prefix] for i in range(CLIENTS)])
        arrays |= {f"{prefix}x": x[rows], f"{prefix}y": y[rows]}
    variables = dict(Net(norm).init(jax.random.key(seed), jnp.zeros((1, x.shape[1]))))
    initial = reference_work.to_pytorch(variables["params"])
    return arrays | {f"start/{n}": np.asarray(v) for n, v in initial.items()}


def inputs(name: str, seed: int) -> Arrays:
    """Returns the work of a method for a rival, with all initial parameters of the method."""
    arrays = work(METHODS[name].norm, seed)
    return {**arrays, **reference_work.added_parameters(name, arrays)}


def rounds(name: str, norm: bool, seeds: Sequence[int], count: int) -> Accuracies:
    """Returns our accuracy for each seed, before and after local training."""
    training = local_training.sgd(learning_rate=RATE, batch_size=BATCH, epochs=EPOCHS)
    works = [work(norm, seed) for seed in seeds]
    count += METHODS[name].first_rounds
    algorithm, _, _, federation = reference_work.make_method(name, works[0], training)
    compiled_rounds = make_rounds(algorithm, federation, cohort=CLIENTS, max_rounds=count)
    accuracies: Accuracies = {stage: [] for stage in STAGES}
    for seed, arrays in zip(seeds, works, strict=True):
        _, initialised, data, _ = reference_work.make_method(name, arrays, training)
        key = jax.random.key(seed)
        state = compiled_rounds.place(jax.jit(initialised.init)(key))
        state, _ = compiled_rounds.run(key, state, data, jnp.int32(0), jnp.int32(count))
        scores = jax.device_get(compiled_rounds.evaluate(key, state, data, jnp.int32(count)))
        for stage in STAGES:
            stage_scores = getattr(scores, stage)
            client_accuracies = ACCURACY.finish(
                stage_scores.metrics[ACCURACY.name], stage_scores.examples
            )
            accuracies[stage].append(float(np.mean(client_accuracies)))
    return accuracies


def differs(library_scores: Sequence[float], rival_scores: Sequence[float]) -> bool:
    """Returns True if the means differ by more than the larger standard deviation over seeds."""
    spread = max(np.std(library_scores, ddof=1), np.std(rival_scores, ddof=1))
    return bool(abs(np.mean(library_scores) - np.mean(rival_scores)) > spread)


def table(results: Results, stages: Sequence[str] = STAGES) -> text_tables.Table:
    """Returns a table with a row per method and an asterisk at significant differences."""
    sides = list(results["rivals"])
    heads = [f"{stage}: {library}" for stage in stages for library in ("ours", *map(_name, sides))]
    rows = []
    for name in METHODS:
        if name not in results["library"]:
            continue
        row, library_scores = [name], results["library"][name]
        for stage in stages:
            row.append(_cell(library_scores[stage]))
            for side in sides:
                rival_scores = results["rivals"][side].get(name)
                mark = (
                    " *"
                    if rival_scores and differs(library_scores[stage], rival_scores[stage])
                    else ""
                )
                row.append(_cell(rival_scores[stage]) + mark if rival_scores else "")
        rows.append(row)
    return text_tables.Table("", heads, rows)


def _name(side: str) -> str:
    return rivals.NAMES[side]


def _cell(values: Sequence[float]) -> str:
    return f"{100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=1):.1f}"


def asterisks(results: Results, stages: Sequence[str] = STAGES) -> list[tuple[str, str, list[str]]]:
    """Returns method, library and stages of all significant differences."""
    return [
        (name, side, different)
        for side, methods in results["rivals"].items()
        for name, scores in methods.items()
        if (different := [s for s in stages if differs(results["library"][name][s], scores[s])])
    ]


def reasons(results: Results, stages: Sequence[str] = STAGES) -> list[str]:
    """Returns the known reason for each significant difference."""
    return [
        f"{name} in {_name(side)}, {' and '.join(marked)}: {getattr(METHODS[name], side).accuracy}"
        for name, side, marked in asterisks(results, stages)
    ]
