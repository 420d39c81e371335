"""Deployed rounds give the states, metrics and ledger of the simulation."""

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
from tests.deploy.loopback import dropout_decisions, loopback, stack

SEED, CLIENTS, ROUNDS, COHORT, DROPOUT = 7, 4, 3, 3, 0.4
DATA, FEDERATION = tiny.federated(clients=CLIENTS)
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
# A head stays at home, and the rest is shared.
QUICK = ("fedper",)


def run_both(name, folder, dropout):
    """Returns (state, ledger, scores) of the simulation and of the deployed rounds."""
    algorithm = cases.make(name, FEDERATION)
    settings = {"cohort": COHORT, "max_rounds": ROUNDS, "dropout": dropout}
    rounds = make_rounds(algorithm, FEDERATION, **settings)
    key = jax.random.key(SEED)
    state, logs = rounds.run(key, rounds.init(key), DATA, np.int32(0), np.int32(ROUNDS))
    scores = jax.device_get(rounds.evaluate(key, state, DATA, np.int32(ROUNDS)))
    bytes_moved = ledger.add(ledger.empty(CLIENTS), jax.device_get(logs), ROUNDS)
    simulated = jax.device_get(state), bytes_moved, scores

    deployment = loopback(Method(algorithm, FEDERATION, SEED), DATA, COHORT, folder)
    server_state, deployed_ledger = server.initial_state(deployment.server), ledger.empty(CLIENTS)
    for t in range(ROUNDS):
        server_state, logs = deployment.round(server_state, t, dropout_decisions(SEED, dropout, t))
        deployed_ledger = ledger.add(deployed_ledger, logs, 1)
    client_states = stack([deployment.client_state(server_state, i) for i in range(CLIENTS)])
    state_of_all = groups.unwrap_clients(
        algorithm, server_state.state._replace(clients=(client_states,))
    )
    return simulated, (
        jax.device_get(state_of_all),
        deployed_ledger,
        deployment.evaluate(server_state, ROUNDS),
    )


def over_methods(names):
    slow = pytest.mark.slow("one method is asked quickly")
    slow_cases = [pytest.param(name, marks=slow) for name in names if name not in QUICK]
    return pytest.mark.parametrize("name", [*QUICK, *slow_cases])


@over_methods(cases.NAMES)
def test_deployed_rounds_equal_the_simulation(name, tmp_path):
    simulated, real = run_both(name, tmp_path, 0.0)
    chex.assert_trees_all_close(real[0], simulated[0], **CLOSE)
    chex.assert_trees_all_close(real[2], simulated[2], **CLOSE)
    assert real[1] == simulated[1]


@over_methods(cases.STRUCTURES)
def test_absent_nodes_equal_dropout_in_the_simulation(name, tmp_path):
    simulated, real = run_both(name, tmp_path, DROPOUT)
    assert sum(simulated[1].dropped) > 1
    chex.assert_trees_all_close(real[0], simulated[0], **CLOSE)
    chex.assert_trees_all_close(real[2], simulated[2], **CLOSE)
    assert real[1]._replace(down={}, client_down=[]) == simulated[1]._replace(
        down={}, client_down=[]
    )
