"""Four nodes give what the simulation gives: states, metrics and, to the byte, the ledger."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

from fedjax_pfl.core import groups
from fedjax_pfl.deploy import server
from fedjax_pfl.deploy.programs import Method
from fedjax_pfl.simulation import ledger
from fedjax_pfl.simulation.rounds import make_rounds
from tests import cases, tiny
from tests.deploy.loopback import dropped, loopback, stacked

SEED, CLIENTS, ROUNDS, COHORT, DROPOUT = 7, 4, 3, 3, 0.4
DATA, FEDERATION = tiny.federated(clients=CLIENTS)
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
# A head stays at home, and the rest is shared.
QUICK = ("fedper",)


def both(name: str, folder: Path, dropout: float) -> Any:
    """(state, ledger, scores) of the simulation and of the nodes."""
    algorithm = cases.make(name, FEDERATION)
    how = {"cohort": COHORT, "max_rounds": ROUNDS, "dropout": dropout}
    rounds = make_rounds(algorithm, FEDERATION, **how)
    key = jax.random.key(SEED)
    state, logs = rounds.run(key, rounds.init(key), DATA, np.int32(0), np.int32(ROUNDS))
    scores = jax.device_get(rounds.evaluate(key, state, DATA, np.int32(ROUNDS)))
    bytes_moved = ledger.add(ledger.empty(CLIENTS), jax.device_get(logs), ROUNDS)
    simulated = jax.device_get(state), bytes_moved, scores

    made = loopback(Method(algorithm, FEDERATION, SEED), DATA, COHORT, folder)
    server_state, moved = server.initial_state(made.server), ledger.empty(CLIENTS)
    for t in range(ROUNDS):
        server_state, logs = made.round(server_state, t, dropped(SEED, dropout, t))
        moved = ledger.add(moved, logs, 1)
    own = stacked([made.client_state(server_state, i) for i in range(CLIENTS)])
    whole = groups.unwrap_clients(algorithm, server_state.state._replace(clients=(own,)))
    return simulated, (jax.device_get(whole), moved, made.evaluate(server_state, ROUNDS))


def asked(others: Sequence[str]) -> Any:
    slow = pytest.mark.slow("one method is asked quickly")
    rest = [pytest.param(name, marks=slow) for name in others if name not in QUICK]
    return pytest.mark.parametrize("name", [*QUICK, *rest])


@asked(cases.NAMES)
def test_nodes_give_what_the_simulation_gives(name: str, tmp_path: Path):
    simulated, real = both(name, tmp_path, 0.0)
    chex.assert_trees_all_close(real[0], simulated[0], **CLOSE)
    chex.assert_trees_all_close(real[2], simulated[2], **CLOSE)
    assert real[1] == simulated[1]


@asked(cases.STRUCTURES)
def test_absent_nodes_are_what_dropout_takes(name: str, tmp_path: Path):
    simulated, real = both(name, tmp_path, DROPOUT)
    assert sum(simulated[1].dropped) > 1
    chex.assert_trees_all_close(real[0], simulated[0], **CLOSE)
    chex.assert_trees_all_close(real[2], simulated[2], **CLOSE)
    assert real[1]._replace(down={}, client_down=[]) == simulated[1]._replace(
        down={}, client_down=[]
    )
