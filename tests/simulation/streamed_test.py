"""Clients and examples on the host, or in a file: every run is that of a device."""

from functools import cache
from typing import Any

import chex
import jax
import numpy as np
import pytest

from fedjax_pfl.core.algorithm import State
from fedjax_pfl.simulation import ledger, streamed
from fedjax_pfl.simulation.rounds import round_functions
from fedjax_pfl.simulation.stores import arrays
from fedjax_pfl.simulation.streamed import StreamedProgram
from fedjax_pfl.testing import rules as contract
from tests import cases, rules, tiny

ROUNDS = 3
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
DRAWN = ("psi",)  # for each client, so that all are written from the start
# Heads and momentum that stay; the others keep more, and have rows that all move at the server.
QUICK = ("fedper",)
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow("two programs for each"))
    for name in cases.NAMES
]


@cache
def subject(name: str) -> tuple[rules.Subject, StreamedProgram]:
    one = rules.subject(name)
    plain = round_functions(one.algorithm, one.world.federation, **contract.OPTIONS)
    return one, StreamedProgram(plain, contract.make_key(), one.world.data)


def begun(program: StreamedProgram, store: str, state: Any = None) -> State:
    """A first state, or one that goes on from NumPy arrays, in such a store."""
    program.store, program.coming = store, None
    return program.enter(program.init() if state is None else state)


def alike(one: Any, other: Any) -> None:
    chex.assert_trees_all_close(jax.device_get(one), jax.device_get(other), **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_every_store_gives_the_run_of_a_device(name: str, monkeypatch):
    monkeypatch.setattr(streamed, "_LEAST", 1)  # an evaluation is of two blocks, five and one
    one, program = subject(name)
    wanted, wanted_log = one.run(ROUNDS)
    state = begun(program, "host")
    alike(arrays(state), one.first_state)
    assert state.clients.offload == one.algorithm.offload
    chex.assert_trees_all_equal_shapes(arrays(state), one.first_state)
    for g, part in enumerate(("clients", *state.clients.offload)):
        assert not len(state.clients.written(g)) or part in DRAWN
    program.compile(state, 0)
    logs = []
    for t, n in ((0, 1), (1, 1), (2, 1)):
        before = arrays(state)
        state, (log,) = program.run(state, t, n)
        logs.append(log)
        here = contract.arrived_clients(log)
        parts = (jax.tree.leaves(one.clients) for one in (before, arrays(state)))
        for old, new in zip(*parts, strict=True):
            np.testing.assert_array_equal(old[~here], new[~here])
    alike(arrays(state), wanted)
    log = jax.tree.map(lambda *each: np.concatenate(each), *logs)
    alike(log, jax.tree.map(lambda leaf: leaf[:ROUNDS], wanted_log))
    books = [ledger.add(ledger.empty(tiny.CLIENTS), (x,), ROUNDS) for x in (log, wanted_log)]
    assert books[0] == books[1]

    t = np.int32(ROUNDS)
    scores = one.rounds.evaluate(contract.make_key(), one.rounds.place(wanted), one.world.data, t)
    chex.assert_trees_all_close(
        program.evaluate(state, ROUNDS), jax.device_get(scores), rtol=1e-4, atol=1e-4
    )
    shown = program.observe(one.algorithm, state)
    alike(shown, jax.jit(one.algorithm.observe)(wanted))

    on_disk, _ = program.run(begun(program, "disk"), 0, ROUNDS)
    chex.assert_trees_all_equal(arrays(on_disk), arrays(state))

    # Saved with one store, resumed with another.
    from_device, _ = program.run(begun(program, "disk", one.run(1)[0]), 1, ROUNDS - 1)
    alike(arrays(from_device), wanted)
    first, _ = program.run(begun(program, "host"), 0, 1)
    alike(one.run(ROUNDS - 1, 1, arrays(first))[0], wanted)
