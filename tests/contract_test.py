"""Rules that the simulation keeps for every method."""

from collections.abc import Collection
from functools import cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.algorithms import fedavg
from fedjax_pfl.core import trees
from fedjax_pfl.networks import MLP
from fedjax_pfl.simulation import memory_estimate, sweep
from fedjax_pfl.simulation.records import CompiledRounds
from fedjax_pfl.simulation.rounds import make_rounds, round_functions
from fedjax_pfl.testing import example
from fedjax_pfl.testing import rules as contract
from fedjax_pfl.testing.rules import ALL_CLIENTS, OPTIONS, TOLERANCES, WARM_UP, make_key
from tests import cases, programs, rules, tiny
from tests.cases import NAMES
from tests.rules import TINY

QUICK = ("fedavg",)  # for rules about the simulation
make_subject = cache(rules.subject)


def methods(quick: Collection[str], slow: Collection[str], reason: str) -> Any:
    """Parametrises a test by methods, and marks the slow ones."""
    marked = [pytest.param(n, marks=pytest.mark.slow(reason)) for n in slow if n not in quick]
    return pytest.mark.parametrize("name", [*quick, *marked])


def methods_and_rules() -> Any:
    """Pairs every method with every rule; most pairs are slow, except shapes."""
    slow = pytest.mark.slow("two to four programs for each of many methods")

    def parameters(name: str, rule: str) -> Any:
        quick = name in (*QUICK, "factorized_fl") or rule == contract.shapes_are_right.__name__
        return (name, rule) if quick else pytest.param(name, rule, marks=slow)

    pairs = [parameters(name, rule.__name__) for name in NAMES for rule in rules.RULES]
    return pytest.mark.parametrize(("name", "rule"), pairs)


@methods_and_rules()
def test_rule(name: str, rule: str):
    rules.BY_NAME[rule](make_subject(name))


@methods(QUICK, cases.STRUCTURES, "the plain loop shows it up to 1e-5")
def test_longer_padding_is_invisible(name: str):
    """Compares with nine more columns of padding, which compile to another program."""
    subject = make_subject(name)
    for i in ALL_CLIENTS:
        results = subject.client_round(
            subject.warm_state, TINY.data, np.int32(i), np.int32(WARM_UP)
        )
        padded = trees.row(subject.third_round, i)
        chex.assert_trees_all_close(results, padded, rtol=1e-6, atol=1e-6)


def sharded_rounds(subject: rules.Subject, mesh: jax.sharding.Mesh) -> CompiledRounds:
    """Returns rounds in chunks of three clients on eight devices, some of them idle."""
    return make_rounds(subject.algorithm, TINY.federation, **OPTIONS, mesh=mesh)


@methods(QUICK, NAMES, "follows from the simulation")
def test_a_round_on_eight_devices_equals_one_device(name: str, mesh: jax.sharding.Mesh):
    subject = make_subject(name)
    rounds = sharded_rounds(subject, mesh)
    key, data, first = rounds.place((make_key(), TINY.data, subject.first_state))
    t, n = rounds.place((np.int32(0), np.int32(1)))
    largest = memory_estimate.all_gather_bytes(rounds.run, key, first, data, t, n)
    run = rounds.run.lower(key, first, data, t, n).compile()
    assert programs.collectives(run.as_text()) == {"all-gather"}
    assert 0 < programs.all_gathered(run.as_text()) <= largest
    state, _ = run(key, first, data, t, n)
    chex.assert_trees_all_close(jax.device_get(state), subject.run(1)[0], **TOLERANCES)


@methods(QUICK, cases.STRUCTURES, "three more programs, sharded like a round")
def test_init_and_scores_on_eight_devices_equal_one_device(name: str, mesh: jax.sharding.Mesh):
    subject = make_subject(name)
    rounds = sharded_rounds(subject, mesh)
    after = subject.run(1)[0]
    key, data, state, n = rounds.place((make_key(), TINY.data, after, np.int32(1)))
    initial = jax.device_get(rounds.init(key))
    chex.assert_trees_all_close(initial, subject.first_state, **TOLERANCES)
    scores = jax.device_get(rounds.evaluate(key, state, data, n))
    single = subject.rounds
    expected = single.evaluate(make_key(), single.place(after), TINY.data, np.int32(1))
    chex.assert_trees_all_close(scores, jax.device_get(expected), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(scores.before.examples, tiny.TEST)
    np.testing.assert_array_equal(scores.validation.examples, tiny.VALIDATION)


@methods(QUICK, NAMES, "follows from the simulation")
def test_a_point_of_a_sweep_equals_a_run(name: str):
    """Sweeps the seed and all real-valued settings, and compares the second of two points."""
    subject = make_subject(name)
    points = sweep.Points(jnp.stack([jax.random.key(8), make_key()]), jnp.arange(2))

    def functions(settings: Any) -> Any:
        method = cases.make(name, TINY.federation, settings)
        return round_functions(method, TINY.federation, **OPTIONS)

    real = {key: (value / 2, value) for key, value in cases.real(name).items()}
    rounds = sweep.make_rounds(functions, real, None, width=1)
    t, n = np.int32(0), np.int32(1)
    states, _ = jax.device_get(rounds.run(points, rounds.init(points), TINY.data, t, n))
    chex.assert_trees_all_close(trees.row(states, 1), subject.run(1)[0], **TOLERANCES)
    if real:
        first, second = (jax.tree.leaves(trees.row(states, i)) for i in (0, 1))
        assert any((a != b).any() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("rule", [contract.padding_is_invisible, contract.equals_a_plain_loop])
def test_a_client_with_a_single_example(rule: Any):
    """Tests a network without BatchNorm, which would magnify rounding."""
    counts = np.array([12, 7, 9, 12, 1, 10])  # two clients have a last batch of one example
    network = MLP(tiny.CLASSES, (tiny.HIDDEN,))
    subject = contract.Subject(
        name="fedavg",
        make=partial(fedavg, network, example.training()),
        world=contract.make_world(partial(example.vectors, counts=counts)),
    )
    rule(subject)
