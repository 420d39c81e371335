"""A tiny run, and what runs are compared by.

Compiled rounds are kept between tests, so that each configuration compiles once in a process.
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.runs import runner


def but_evaluations(stderr):
    """Returns the lines of stderr except those of evaluations and of compiling."""
    return [
        line for line in stderr.splitlines() if not re.match(r"round \d+ of \d+|compiling$", line)
    ]


BASE = {
    "dataset": "synthetic",
    "synthetic": {"shape": (2, 2, 1), "classes": 3, "examples": 60, "test_examples": 0},
    "partition": "iid",
    "validation_fraction": 0.2,
    "model": "mlp",
    "mlp": {"hidden": (4,)},
    "clients": 3,
    "clients_per_round": 2,
    "rounds": 6,
    "eval_every": 2,
    "checkpoint_every": 1,
    "local_epochs": 1,
    "batch_size": 8,
    "learning_rate": 0.1,
    "momentum": 0.9,
    "keep_optimizer": True,
    "dropout": 0.4,
    "devices": 2,
}
PHASES = {**BASE, "eval_every": 1, "phases": ({"rounds": 2}, {"algorithm": "local", "rounds": 2})}
FILES = {
    "config.json",
    "made.json",
    "plan.json",
    "metrics.jsonl",
    "clients.csv",
    "traffic.json",
    "checkpoints",
    "figures",
    "report.html",
}
MODEL = 4 * (4 * 4 + 4 + 4 * 3 + 3)  # bytes of the network
_undisturbed = {}


def undisturbed(config):
    """A run that nothing happened to."""
    key = json.dumps(config, sort_keys=True)
    if key not in _undisturbed:
        _undisturbed[key] = runner.run(config)
    return _undisturbed[key]


def untimed(metrics):
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in metrics]


def read_metrics(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def contents(directory):
    return {p: p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert x.tobytes() == y.tobytes()


def assert_same_run(got, wanted, directory=None):
    assert_same_bits(got.state, wanted.state)
    assert_same_bits(got.best, wanted.best)
    assert got.ledger == wanted.ledger
    assert got.clients == wanted.clients
    assert untimed(got.metrics) == untimed(wanted.metrics)
    if directory:
        assert untimed(read_metrics(directory)) == untimed(wanted.metrics)
        assert {p.name for p in directory.iterdir()} == FILES


def after_rounds(made, number):
    """The state after a number of rounds, one call each."""
    rounds = made.phases[0].rounds
    key, data = rounds.place((jax.random.key(0), made.data))
    state, one = rounds.init(key), rounds.place(jnp.int32(1))
    for t in range(number):
        state, _ = rounds.run(key, state, data, rounds.place(jnp.int32(t)), one)
    return state
