"""Optimisers of a caller's own and by name, in runs of a few rounds."""

import chex
import optax
import pytest

import fedjax_pfl
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import build, export
from fedjax_pfl.settings import configuration, custom
from tests.runs.common import BASE

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

TINY = {**BASE, "rounds": 2, "eval_every": 2, "evaluate_after": False, "momentum": 0.0}
del TINY["learning_rate"]
DECAY = {"optimizer": "adamw", "weight_decay": 0.1, "learning_rate": 0.01}
AT_SERVER = {"server_optimizer": "sgd", "server_learning_rate": 0.5}


def own():
    return {
        "optimizer": optax.adamw(0.01, weight_decay=0.1),
        "server_optimizer": optax.sgd(0.5, momentum=0.0),
    }


def test_by_name_and_of_ones_own(tmp_path):
    """Both are the same sums; one goes on and is exported only with the same optimisers."""
    named = fedjax_pfl.run({**TINY, **DECAY, **AT_SERVER})
    directory = tmp_path / "run"
    mine = fedjax_pfl.run(TINY, directory, **own())
    chex.assert_trees_all_close(
        mine.state.server.method, named.state.server.method, rtol=1e-5, atol=1e-6
    )
    assert mine.config["optimizer"].startswith("own-")
    assert set(mine.config) == set(named.config)
    with pytest.raises(UsageError, match=r"^[^\n]*optimizer \('own-[^\n]+$"):
        fedjax_pfl.run(TINY, directory, **{**own(), "optimizer": optax.adamw(0.02)})
    with pytest.raises(UsageError, match="with an optimizer of your own, own-"):
        export.load_result(directory)
    again = export.load_result(directory, **own())
    chex.assert_trees_all_equal(again.state, mine.state)


@pytest.mark.parametrize(
    ("brought", "line"),
    [
        ({"optimizer": "adam"}, "optimizer= must be an optax optimiser"),
        ({"server_optimizer": 3}, "server_optimizer= must be an optax optimiser"),
        ({"optimizer": optax.lbfgs()}, "optimizer= cannot be used"),
        ({"server_optimizer": optax.polyak_sgd()}, "server_optimizer= cannot be used"),
    ],
)
def test_what_is_no_optimizer_is_refused(brought, line, tmp_path):
    with pytest.raises(UsageError) as error:
        fedjax_pfl.run(TINY, tmp_path / "run", **brought)
    assert line in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_name_beside_ones_own_is_refused():
    line = "settings select optimizer='adam', and optimizer= passes another .* leave one"
    with pytest.raises(UsageError, match=line):
        custom.register({**TINY, "optimizer": "adam"}, optimizer=optax.adam(0.1))
    custom.register(TINY, optimizer=optax.adam(0.1))
    custom.register({**TINY, "optimizer": "adam"})
    with pytest.raises(UsageError, match="learning_rate counts with optimizer=sgd or adam or"):
        fedjax_pfl.run({**TINY, "learning_rate": 0.1}, optimizer=optax.adam(0.1))


def test_an_optimizer_is_known_by_what_it_is_made_of():
    def name(optimizer):
        return custom.register({}, optimizer=optimizer)[1]["optimizer"]

    decay = optax.cosine_decay_schedule
    assert name(optax.adamw(0.1)) == name(optax.adamw(0.1))
    assert name(optax.adam(decay(0.1, 5))) == name(optax.adam(decay(0.1, 5)))
    different = (
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
    assert len({name(one) for one in different}) == len(different)


def test_a_schedule_reaches_the_rate_of_a_round():
    """From 1 to .2 in four rounds, .8 in the second; or in the steps of each visit."""
    seen = []

    def spy(model, training, federation):
        seen.append(training)
        return configuration.ALGORITHMS["fedavg"](model, training, federation)

    settings = {
        **TINY,
        "rounds": 4,
        "learning_rate": 0.1,
        "learning_rate_schedule": "linear",
        "schedule_end": 0.2,
    }

    def training(**changes):
        words, given = custom.register({**settings, **changes}, algorithm=spy)
        built = build.build(configuration.complete(given, words), registry=words)
        return seen[-1], build.fixed_length_reason(built)

    over_rounds, why = training()
    assert [round(float(over_rounds.rate(t)), 6) for t in (0, 1, 4)] == [0.1, 0.08, 0.02]
    assert over_rounds.step_schedule is None
    assert why == "learning_rate_schedule is over all rounds"
    over_steps, why = training(schedule_over="steps")
    assert [round(float(over_steps.rate(t)), 6) for t in (0, 3)] == [0.1, 0.1]
    assert round(float(over_steps.step_schedule(5, 10)), 6) == 0.6
    assert why == ""
