"""Tests that `Simulation.personal_model` returns the model that `evaluate` scores."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from fedjax_pfl.core import local_training
from fedjax_pfl.core.examples import Split, client_data
from fedjax_pfl.simulation import summaries
from fedjax_pfl.simulation.simulation import Simulation
from tests import cases, rules

pytestmark = pytest.mark.slow("programs of many methods")


def make(subject: rules.Subject, **settings) -> Simulation:
    """Returns a simulation with examples in NumPy, as `partition` makes them."""
    examples = jax.device_get(subject.world.data)
    data = SimpleNamespace(examples=examples, federation=subject.world.federation)
    return Simulation(subject.algorithm, data, evaluate_after=False, **settings)


@pytest.mark.parametrize("name", cases.NAMES)
def test_a_personal_model_has_the_scores_of_the_evaluation(name: str):
    subject, client = rules.subject(name), 1
    data, task = subject.world.data, subject.world.federation.task
    simulation = make(subject, devices=1)
    state, _ = simulation.run_round(simulation.init(), 0)
    expected = simulation.evaluate(state, 1).before
    model = simulation.personal_model(state, client, 1)
    test = Split(data.test.rows[client], data.test.size[client])
    examples = jax.device_put(client_data(data, client))
    scores = local_training.evaluate(subject.algorithm.predict, model, examples, test, task)
    stacked = jax.tree.map(lambda leaf: np.asarray(leaf)[None], scores)
    for metric, (value,) in summaries.per_client(stacked, task).items():
        np.testing.assert_allclose(value, getattr(expected, metric)[client], rtol=1e-4)


@pytest.mark.parametrize("settings", [{"store": "host", "devices": 1}, {"devices": 2}])
def test_a_state_of_another_simulation_has_the_same_model(settings):
    subject = rules.subject("fedper")
    simulation, other = make(subject, devices=1), make(subject, **settings)
    expected = simulation.personal_model(simulation.init(), 1)
    model = simulation.personal_model(other.init(), 1)
    for leaf, other_leaf in zip(*map(jax.tree.leaves, (model, expected)), strict=True):
        np.testing.assert_array_equal(leaf, other_leaf)
