"""Tests of built-in and user-defined optimisers in short runs."""

import chex
import numpy as np
import optax
import pytest

import fedjax_pfl
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import build, export
from fedjax_pfl.settings import configuration, custom
from tests.commands import message
from tests.runs.common import BASE

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

TINY = {**BASE, "rounds": 2, "eval_every": 2, "evaluate_after": False, "momentum": 0.0}
del TINY["learning_rate"]
DECAY = {"optimizer": "adamw", "weight_decay": 0.1, "learning_rate": 0.01}
AT_SERVER = {"server_optimizer": "sgd", "server_learning_rate": 0.5}


def user_optimizers():
    return {
        "optimizer": optax.adamw(0.01, weight_decay=0.1),
        "server_optimizer": optax.sgd(0.5, momentum=0.0),
    }


def test_user_defined_optimizers_equal_built_in_ones(tmp_path):
    """Loads the result only with the same optimisers."""
    built_in = fedjax_pfl.run({**TINY, **DECAY, **AT_SERVER})
    directory = tmp_path / "run"
    mine = fedjax_pfl.run(TINY, directory, **user_optimizers())
    chex.assert_trees_all_close(
        mine.state.server.method, built_in.state.server.method, rtol=1e-5, atol=1e-6
    )
    assert mine.config["optimizer"].startswith("own-")
    assert set(mine.config) == set(built_in.config)
    changed = {**user_optimizers(), "optimizer": optax.adamw(0.02)}
    assert "optimizer ('own-" in message(lambda: fedjax_pfl.run(TINY, directory, **changed))
    assert "with an optimizer of your own, own-" in message(export.load_result, directory)
    loaded = export.load_result(directory, **user_optimizers())
    chex.assert_trees_all_equal(loaded.state, mine.state)


@pytest.mark.parametrize(
    ("optimizer", "line"),
    [
        ({"optimizer": "adam"}, "optimizer= must be an optax optimiser"),
        ({"server_optimizer": 3}, "server_optimizer= must be an optax optimiser"),
        ({"optimizer": optax.lbfgs()}, "optimizer= cannot be used"),
        ({"server_optimizer": optax.polyak_sgd()}, "server_optimizer= cannot be used"),
    ],
)
def test_invalid_optimizers_are_refused(optimizer, line, tmp_path):
    assert line in message(lambda: fedjax_pfl.run(TINY, tmp_path / "run", **optimizer))
    assert not (tmp_path / "run").exists()


def test_a_built_in_and_a_user_defined_optimizer_contradict():
    line = "settings select optimizer='adam', and optimizer= passes another .* leave one"
    with pytest.raises(UsageError, match=line):
        custom.register({**TINY, "optimizer": "adam"}, optimizer=optax.adam(0.1))
    custom.register(TINY, optimizer=optax.adam(0.1))
    custom.register({**TINY, "optimizer": "adam"})
    with pytest.raises(UsageError, match="learning_rate counts with optimizer=sgd or adam or"):
        fedjax_pfl.run({**TINY, "learning_rate": 0.1}, optimizer=optax.adam(0.1))


def test_names_of_optimizers_depend_on_their_settings():
    def name(optimizer):
        return custom.register({}, optimizer=optimizer)[1]["optimizer"]

    def optimizers():
        decay = optax.cosine_decay_schedule
        return (
            optax.adamw(0.1),
            optax.adamw(0.2),
            optax.adamw(0.1, b1=0.8),
            optax.adam(0.1),
            optax.adam(decay(0.1, 5)),
            optax.adam(decay(0.1, 6)),
            optax.sgd(0.1),
            optax.sgd(0.1, momentum=0.9),
            optax.sgd(0.1, momentum=0.9, nesterov=True),
            optax.masked(optax.sgd(0.1), True),
        )

    names = [name(optimizer) for optimizer in optimizers()]
    assert len(set(names)) == len(names)
    assert [name(optimizer) for optimizer in optimizers()] == names


def test_a_schedule_over_rounds_or_steps():
    """Decays linearly from 1 to 0.2 in four rounds, or in the steps of every round.

    The evaluation after the last round, 3, fine-tunes at the rate of that round.
    """
    trainings = []

    def recording(model, training, federation):
        trainings.append(training)
        return configuration.ALGORITHMS["fedavg"](model, training, federation)

    schedule = {"learning_rate_schedule": "linear", "schedule_end": 0.2, "learning_rate": 0.1}

    def build_with(**changes):
        settings = {**TINY, **schedule, "rounds": 4, **changes}
        registry, settings = custom.register(settings, algorithm=recording)
        built = build.build(configuration.complete(settings, registry), registry=registry)
        return trainings[-1], build.fixed_length_reason(built)

    training, reason = build_with()
    rates = [0.1, 0.08, 0.04, 0.04]
    np.testing.assert_allclose([training.rate(t) for t in (0, 1, 3, 4)], rates, rtol=1e-6)
    assert training.step_schedule is None
    assert reason == "learning_rate_schedule is over all rounds"
    training, _ = build_with(phases=({"rounds": 2}, {}))  # the last phase begins in round 2
    np.testing.assert_allclose([training.rate(t) for t in (2, 3, 5, 6)], rates, rtol=1e-6)
    training, reason = build_with(schedule_over="steps")
    np.testing.assert_allclose([training.rate(t) for t in (0, 3)], [0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(training.step_schedule(5, 10), 0.6, rtol=1e-6)
    assert reason == ""
