"""The rules that the simulation keeps for every algorithm; one is covered by being exported."""

from collections.abc import Collection
from functools import cache
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import trees
from fedjax_pfl.simulation import memory_estimate, sweep
from fedjax_pfl.simulation.records import CompiledRounds
from fedjax_pfl.simulation.rounds import make_rounds, round_functions
from fedjax_pfl.testing import rules as contract
from fedjax_pfl.testing.rules import ALL_CLIENTS, OPTIONS, TOLERANCES, WARM_UP, make_key
from tests import cases, programs, rules, tiny
from tests.cases import NAMES
from tests.rules import TINY

# The two structures of which rules about the simulation are asked each time.
QUICK = ("fedavg", "factorized_fl")
subject = cache(rules.subject)


def asked_of(names: Collection[str], others: Collection[str], reason: str) -> Any:
    """A rule that follows from the simulation alone: asked of some methods, of others when slow."""
    slow = [pytest.param(n, marks=pytest.mark.slow(reason)) for n in others if n not in names]
    return pytest.mark.parametrize("name", [*names, *slow])


of_the_engine = asked_of(QUICK, NAMES, "follows from the simulation; two structures are asked")


def every_rule() -> Any:
    """Each method with each rule; of most methods the quick run asks the shapes only.

    Shapes are what a change of the contract breaks; a method's mathematics have tests of their own,
    and the programs that the other rules need take five seconds for each method.
    """
    slow = pytest.mark.slow("two to four programs for a method whose structure another one has")

    def asked(name: str, rule: str) -> Any:
        quick = name in cases.STRUCTURES or rule == contract.shapes_are_right.__name__
        return (name, rule) if quick else pytest.param(name, rule, marks=slow)

    each = [asked(name, rule.__name__) for name in NAMES for rule in rules.RULES]
    return pytest.mark.parametrize(("name", "rule"), each)


@every_rule()
def test_rule(name: str, rule: str):
    rules.BY_NAME[rule](subject(name))


@asked_of(
    ("fedavg", "fedfomo"),
    cases.STRUCTURES,
    "another program for what a plain loop shows up to 1e-5",
)
def test_longer_padding_is_invisible(name: str):
    """Nine more rows of padding for every client, which are other shapes to compile for."""
    one = subject(name)
    for i in ALL_CLIENTS:
        met = one.client_round(one.warm_state, TINY.data, np.int32(i), np.int32(WARM_UP))
        again = trees.row(one.third_round, i)
        chex.assert_trees_all_close(met, again, rtol=1e-6, atol=1e-6)


def spread(one: rules.Subject, mesh: jax.sharding.Mesh) -> CompiledRounds:
    """Chunks of three clients, and a client on each of eight devices, of which some are idle."""
    return make_rounds(one.algorithm, TINY.federation, **OPTIONS, mesh=mesh)


@of_the_engine
def test_vmap_and_devices_do_not_matter(name: str, mesh: jax.sharding.Mesh):
    one = subject(name)
    rounds = spread(one, mesh)
    key, there, first = rounds.place((make_key(), TINY.data, one.first_state))
    t, n = rounds.place((np.int32(0), np.int32(1)))
    most = memory_estimate.all_gather_bytes(rounds.run, key, first, there, t, n)
    run = rounds.run.lower(key, first, there, t, n).compile()
    assert programs.collectives(run.as_text()) == {"all-gather"}
    assert 0 < programs.all_gathered(run.as_text()) <= most
    state, _ = run(key, first, there, t, n)
    chex.assert_trees_all_close(jax.device_get(state), one.run(1)[0], **TOLERANCES)


@asked_of(QUICK, cases.STRUCTURES, "three more programs; spread as a round is, see above")
def test_starts_and_scores_do_not_depend_on_devices(name: str, mesh: jax.sharding.Mesh):
    one = subject(name)
    rounds = spread(one, mesh)
    key, there, state, n = rounds.place((make_key(), TINY.data, one.run(1)[0], np.int32(1)))
    chex.assert_trees_all_close(jax.device_get(rounds.init(key)), one.first_state, **TOLERANCES)
    scores = jax.device_get(rounds.evaluate(key, state, there, n))
    expected = one.rounds.evaluate(
        make_key(), one.rounds.place(one.run(1)[0]), TINY.data, np.int32(1)
    )
    chex.assert_trees_all_close(scores, jax.device_get(expected), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(scores.before.examples, tiny.TEST)
    np.testing.assert_array_equal(scores.validation.examples, tiny.VALIDATION)


@of_the_engine
def test_as_a_point_of_a_sweep(name: str):
    """The second of two, with a seed and in all real-valued settings numbers of their own."""
    one = subject(name)
    points = sweep.Points(jnp.stack([jax.random.key(8), make_key()]), jnp.arange(2))

    def plain(now: Any) -> Any:
        return round_functions(cases.make(name, TINY.federation, now), TINY.federation, **OPTIONS)

    real = {key: (value / 2, value) for key, value in cases.real(name).items()}
    rounds = sweep.make_rounds(plain, real, None, width=1)
    t, n = np.int32(0), np.int32(1)
    states, _ = jax.device_get(rounds.run(points, rounds.init(points), TINY.data, t, n))
    wanted, _ = one.run(1)
    chex.assert_trees_all_close(trees.row(states, 1), wanted, **TOLERANCES)
    if real:  # and not those of the first
        first, second = (jax.tree.leaves(trees.row(states, i)) for i in (0, 1))
        assert any((a != b).any() for a, b in zip(first, second, strict=True))
