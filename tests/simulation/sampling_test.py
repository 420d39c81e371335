"""Tests of sampling in turn: how often and how far apart a client takes part."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.simulation.rounds import round_functions
from fedjax_pfl.simulation.simulation import Simulation
from tests import cases, tiny
from tests.simulation.rounds_test import counting, federation_of

ROUNDS = 60


@pytest.mark.parametrize(("clients", "cohort"), [(6, 2), (7, 3), (8, 6), (9, 4), (11, 1), (5, 5)])
def test_participations_are_far_apart_and_few(clients: int, cohort: int):
    """Client 0 is not active. Starts also at a round whose positions exceed 32 bits."""
    federation = federation_of(clients + 1, np.arange(clients + 1) > 0)
    functions = round_functions(counting(clients + 1), federation, cohort=cohort, sampling="cyclic")
    sample = jax.jit(jax.vmap(lambda key, t: functions.sample_slots(key, t)[0].ids, (None, 0)))
    separation = clients // cohort
    for first in (0, 2**31 - ROUNDS):
        ids = np.asarray(sample(jax.random.key(0), first + jnp.arange(ROUNDS)))
        assert (np.diff(ids) > 0).all()  # sorted and distinct
        for t in range(ROUNDS - separation + 1):
            window = ids[t : t + separation]
            assert len(np.unique(window)) == window.size
        for rounds in range(1, ROUNDS + 1):
            times = np.bincount(ids[:rounds].ravel(), minlength=clients + 1)
            assert times[0] == 0
            assert times.max() <= -(-rounds * cohort // clients) + (first > 0)
            assert first > 0 or times.max() == -(-rounds * cohort // clients)
            assert times[1:].min() >= rounds * cohort // clients - (first > 0)
    other = np.asarray(sample(jax.random.key(1), first + jnp.arange(ROUNDS)))
    assert (other != ids).any() == (cohort < clients)


@pytest.mark.slow("programs of four stores")
def test_every_store_samples_alike():
    examples, federation = tiny.federated()
    data = SimpleNamespace(examples=examples, federation=federation)
    method = cases.make("fedavg", federation)
    sampled = []
    for store in ("device", "sharded", "host", "disk"):
        loop = Simulation(
            method, data, clients_per_round=4, sampling="cyclic", store=store, devices=2
        )
        state = loop.init()
        for t in range(2):
            state, log = loop.run_round(state, t)
            sampled.append(log.ids.tolist())
    assert sampled == sampled[:2] * 4
    assert len({*sampled[0], *sampled[1]}) == tiny.CLIENTS
    with pytest.raises(UsageError, match="sampling is 'cycle'; choose random or cyclic"):
        Simulation(method, data, sampling="cycle")
