"""Mistakes in the arguments of a training loop that no later step would notice."""

import numpy as np
import pytest

import fedjax_pfl as pfl
from fedjax_pfl.core import trees
from fedjax_pfl.core.metrics import ACCURACY, PERPLEXITY
from fedjax_pfl.core.task import classification
from fedjax_pfl.simulation.simulation import Simulation, _round_number
from tests.commands import message


def partition(task=None):
    rng = np.random.default_rng(0)
    dataset = pfl.arrays(np.float32(rng.normal(size=(30, 4))), rng.integers(0, 3, 30))
    return pfl.partition(dataset, "iid", clients=3, task=task)


def fedamp(data):
    training = pfl.local_sgd(learning_rate=0.05, steps=1)
    return pfl.fedamp(pfl.networks.MLP(outputs=3, hidden=(4,)), training, data.federation)


def test_the_number_of_a_round_is_a_whole_number():
    """0.9 would be round 0 again, and −1 would have keys of its own."""
    assert [_round_number(t) for t in (0, np.int32(3), np.array(4))] == [0, 3, 4]
    for t in (0.9, 2.0, -1, np.float32(1), "1", None):
        assert (
            message(_round_number, t) == f"t is {t!r}; it must be the number of a round: 0, 1, ..."
        )
    data = partition()
    simulation = Simulation(fedamp(data), data, devices=1)
    for call in (
        lambda: simulation.run_round(None, 0.5),
        lambda: simulation.run_rounds(None, 0.5, 2),
        lambda: simulation.evaluate(None, 0.5),
        lambda: simulation.personal_model(None, 0, t=0.5),
    ):
        assert message(call).startswith("t is 0.5")
    assert message(simulation.run_rounds, None, 0, 2.0).startswith(
        "n is 2.0; it must be an integer"
    )


@pytest.mark.parametrize("name", ["loss", "examples", "top-2", "class", "_x"])
def test_metrics_have_names_of_columns(name):
    """Scores of the metric would be replaced by the loss or by the number of examples."""
    task = classification(3)._replace(metrics=(ACCURACY, PERPLEXITY._replace(name=name)))
    data = partition(task)
    line = message(Simulation, fedamp(data), data)
    assert line.startswith(f"the task has a metric called {name!r}; use a letter and then letters")


@pytest.mark.parametrize("store", ["device", "host"])
def test_a_folder_is_for_the_disk(store):
    data = partition()
    line = message(lambda: Simulation(fedamp(data), data, store=store, folder="."))
    assert line == "folder is for store='disk'; leave it out"


def test_offloaded_rows_are_read_by_the_functions_for_them_only():
    """Others would see the rows that are waiting to be written, and return other numbers."""
    data = partition()
    method = fedamp(data)._replace(
        observe=lambda state: {"norm": trees.squared_norm(state.rows["params"])}
    )
    Simulation(method, data, devices=1)
    assert "observe reads" in message(lambda: Simulation(method, data, devices=1, store="host"))
