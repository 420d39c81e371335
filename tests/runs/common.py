"""A tiny run, and helpers that stop, resume and compare runs.

Compiled rounds are cached, so each configuration compiles once per process.
"""

import contextlib
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.runs import runner
from tests.commands import message

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
    "provenance.json",
    "plan.json",
    "metrics.jsonl",
    "clients.csv",
    "confusion.json",
    "traffic.json",
    "checkpoints",
    "figures",
    "report.html",
}
MODEL = 4 * (4 * 4 + 4 + 4 * 3 + 3)  # bytes of the network
_undisturbed = {}


def undisturbed(config):
    """Returns the result of an uninterrupted run, cached by configuration."""
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


def other_lines(stderr):
    """Returns all lines except those of evaluations and of compiling."""
    progress = re.compile(r"round \d+ of \d+|compiling$")
    return [line for line in stderr.splitlines() if not progress.match(line)]


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def assert_same_run(result, expected, directory=None):
    assert_same_bits(result.state, expected.state)
    assert_same_bits(result.best, expected.best)
    assert result.ledger == expected.ledger
    assert result.clients == expected.clients
    assert untimed(result.metrics) == untimed(expected.metrics)
    if directory:
        assert untimed(read_metrics(directory)) == untimed(expected.metrics)
        assert {p.name for p in directory.iterdir()} == FILES


class Killed(BaseException):
    """Stands for a kill, or for Ctrl-C, which pytest handles itself."""


@contextlib.contextmanager
def kill(owner, name, condition, *, after=False):
    """Raises Killed at the first call whose arguments meet the condition.

    Args:
      owner: The module or class of the function.
      name: Name of the function.
      condition: Function of the arguments.
      after: Call the function first.
    """
    function = getattr(owner, name)

    def stop(*arguments):
        is_last = condition(*arguments)
        if after or not is_last:
            function(*arguments)
        if is_last:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, stop)
        with pytest.raises(Killed):
            yield


def at_call(number):
    """Returns a condition for `kill` that is met by this call, counted from 1."""
    calls = itertools.count(1)
    return lambda *_: next(calls) == number


def at_step(step):
    """Returns a condition for `kill` on the saving of this round."""
    return lambda store, saved, *_: saved == step


def assert_resumes(config, directory, resumed_at):
    """Runs to the end and compares with an uninterrupted run."""
    result = runner.run(config, directory)
    assert result.resumed_at == resumed_at
    assert_same_run(result, undisturbed(config), directory)


def refusal(config, directory, **components):
    """Returns the line that refuses a run, and checks that no file changes."""
    old = contents(directory.parent) if directory.parent.is_dir() else None
    line = message(lambda: runner.run(config, directory, **components))
    assert old is None or contents(directory.parent) == old
    return line


def state_after(experiment, number):
    """Returns the state after a number of rounds, with a call for each."""
    rounds = experiment.phases[0].rounds
    key, data = rounds.place((jax.random.key(0), experiment.data))
    state, single = rounds.init(key), rounds.place(jnp.int32(1))
    for t in range(number):
        state, _ = rounds.run(key, state, data, rounds.place(jnp.int32(t)), single)
    return state
