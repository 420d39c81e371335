"""Deployed rounds give the states, metrics and ledger of the simulation."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import groups
from fedjax_pfl.core.randomness import DROP, stage_key
from fedjax_pfl.deploy import server
from fedjax_pfl.deploy.programs import Method
from fedjax_pfl.simulation import ledger
from fedjax_pfl.simulation.rounds import make_rounds
from tests import cases, tiny
from tests.deploy.loopback import loopback

SEED, CLIENTS, ROUNDS, COHORT, DROPOUT = 7, 4, 3, 3, 0.4
DATA, FEDERATION = tiny.federated(clients=CLIENTS)
# Programs of other shapes round the largest singular values differently by 1e-7, and BatchNorm
# magnifies this to the tolerances. Without them both give the same bits.
SETTINGS = {"pfedhn_pc": {"spectral_norm": False}}
# Evaluation of one client and of a block of clients rounds products of factors differently. Logits
# of some hundreds, which large steps lead to, magnify this to the tolerances.
TRAINING = {"factorized_fl": {"learning_rate": 0.02}}


def run_both(name, folder, dropout):
    """Returns (state, ledger, scores) of the simulation and of the deployed rounds."""
    changes = TRAINING.get(name, cases.NOTHING)
    algorithm = cases.make(name, FEDERATION, SETTINGS.get(name, cases.NOTHING), **changes)
    settings = {"cohort": COHORT, "max_rounds": ROUNDS, "dropout": dropout}
    rounds = make_rounds(algorithm, FEDERATION, **settings)
    key = jax.random.key(SEED)
    state, logs = rounds.run(key, rounds.init(key), DATA, np.int32(0), np.int32(ROUNDS))
    scores = jax.device_get(rounds.evaluate(key, state, DATA, np.int32(ROUNDS)))
    bytes_moved = ledger.add(ledger.empty(CLIENTS), jax.device_get(logs), ROUNDS)
    simulated = jax.device_get(state), bytes_moved, scores

    deployment = loopback(Method(algorithm, FEDERATION, SEED), DATA, COHORT, folder)
    server_state, deployed_ledger = server.initial_state(deployment.server), ledger.empty(CLIENTS)

    def is_dropped(i, t):
        """Returns True if the simulation drops a client in round `t`."""
        return bool(jax.random.uniform(stage_key(key, DROP, t, jnp.int32(i))) < dropout)

    for t in range(ROUNDS):
        absent = functools.partial(is_dropped, t=t)
        server_state, logs = deployment.round(server_state, t, absent)
        deployed_ledger = ledger.add(deployed_ledger, logs, 1)
    client_states = [deployment.client_state(server_state, i) for i in range(CLIENTS)]
    client_states = jax.tree.map(lambda *leaves: np.stack(leaves), *client_states)
    wrapped = server_state.state._replace(clients=(client_states,))
    state = jax.device_get(groups.unwrap_clients(algorithm, wrapped))
    return simulated, (state, deployed_ledger, deployment.evaluate(server_state, ROUNDS))


CASES = [(name, 0.0) for name in cases.NAMES]
CASES += [(name, DROPOUT) for name in ("fedper", *cases.STRUCTURES)]
SLOW = pytest.mark.slow("all methods; FedPer, which has a private head, is quick")


@pytest.mark.parametrize(
    ("name", "dropout"),
    [pytest.param(*c, marks=() if c == ("fedper", DROPOUT) else SLOW) for c in CASES],
)
def test_deployed_rounds_equal_the_simulation(name, dropout, tmp_path):
    """Absent nodes equal clients that the simulation drops."""
    (state, totals, scores), deployed = run_both(name, tmp_path, dropout)
    chex.assert_trees_all_close(deployed[0], state, rtol=1e-6, atol=1e-6)
    chex.assert_trees_all_close(deployed[2], scores, rtol=1e-6, atol=1e-6)
    if dropout:
        assert sum(totals.dropped) > 1
        downloads = {"down": {}, "client_down": []}
        assert deployed[1]._replace(**downloads) == totals._replace(**downloads)
    else:
        assert deployed[1] == totals
