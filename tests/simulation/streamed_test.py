"""Programs with clients and examples on the host or on disk, compared with those on the device."""

from functools import cache
from typing import Any

import chex
import jax
import numpy as np
import pytest

from fedjax_pfl.core.algorithm import State
from fedjax_pfl.simulation import ledger, streamed
from fedjax_pfl.simulation.rounds import round_functions
from fedjax_pfl.simulation.stores import to_arrays
from fedjax_pfl.simulation.streamed import StreamedProgram
from fedjax_pfl.testing import rules as contract
from tests import cases, rules, tiny

pytestmark = pytest.mark.slow("programs for every store")

ROUNDS = 3
TOLERANCES = {"rtol": 1e-5, "atol": 1e-5}
DIFFERENT_PER_CLIENT = ("psi",)  # parts of the rows whose initial values differ between clients


@cache
def subject(name: str) -> tuple[rules.Subject, StreamedProgram]:
    on_device = rules.subject(name)
    functions = round_functions(on_device.algorithm, on_device.world.federation, **contract.OPTIONS)
    return on_device, StreamedProgram(functions, contract.make_key(), on_device.world.data)


def enter(program: StreamedProgram, store: str, state: Any = None) -> State:
    """Returns the initial state, or the given NumPy arrays, in a store."""
    program.store, program.prefetched = store, None
    return program.enter(program.init() if state is None else state)


def assert_close(a: Any, b: Any) -> None:
    chex.assert_trees_all_close(jax.device_get(a), jax.device_get(b), **TOLERANCES)


@pytest.mark.parametrize("name", cases.NAMES)
def test_every_store_gives_the_results_of_the_device(name: str, monkeypatch):
    monkeypatch.setattr(streamed, "_MIN_BLOCK", 1)  # evaluates in two blocks, five and one
    on_device, program = subject(name)
    expected, expected_log = on_device.run(ROUNDS)
    state = enter(program, "host")
    assert_close(to_arrays(state), on_device.first_state)
    assert state.clients.offload == on_device.algorithm.offload
    chex.assert_trees_all_equal_shapes(to_arrays(state), on_device.first_state)
    for g, part in enumerate(("clients", *state.clients.offload)):
        assert not len(state.clients.written(g)) or part in DIFFERENT_PER_CLIENT
    program.compile(state, 0)
    logs = []
    for t in range(ROUNDS):
        before = to_arrays(state)
        state, (log,) = program.run(state, t, 1)
        logs.append(log)
        arrived = contract.arrived_clients(log)
        parts = (jax.tree.leaves(arrays.clients) for arrays in (before, to_arrays(state)))
        for old, new in zip(*parts, strict=True):
            np.testing.assert_array_equal(old[~arrived], new[~arrived])
    assert_close(to_arrays(state), expected)
    log = jax.tree.map(lambda *leaves: np.concatenate(leaves), *logs)
    assert_close(log, jax.tree.map(lambda leaf: leaf[:ROUNDS], expected_log))
    ledgers = [ledger.add(ledger.empty(tiny.CLIENTS), (x,), ROUNDS) for x in (log, expected_log)]
    assert ledgers[0] == ledgers[1]

    t, rounds = np.int32(ROUNDS), on_device.rounds
    scores = rounds.evaluate(contract.make_key(), rounds.place(expected), on_device.world.data, t)
    chex.assert_trees_all_close(
        program.evaluate(state, ROUNDS), jax.device_get(scores), rtol=1e-4, atol=1e-4
    )
    program.observe(on_device.algorithm, state)
    with jax.no_tracing():  # compiled once
        observed = program.observe(on_device.algorithm, state)
    assert_close(observed, jax.jit(on_device.algorithm.observe)(expected))

    on_disk, _ = program.run(enter(program, "disk"), 0, ROUNDS)
    chex.assert_trees_all_equal(to_arrays(on_disk), to_arrays(state))

    # Saved with one store, resumed with another.
    from_device, _ = program.run(enter(program, "disk", on_device.run(1)[0]), 1, ROUNDS - 1)
    assert_close(to_arrays(from_device), expected)
    from_host, _ = program.run(enter(program, "host"), 0, 1)
    assert_close(on_device.run(ROUNDS - 1, 1, to_arrays(from_host))[0], expected)
