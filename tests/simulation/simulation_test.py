"""The training loop against whole runs of the same settings, and its own numbers."""

import math

import jax
import numpy as np
import pytest

import fedjax_pfl as pfl
from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.simulation.simulation import Simulation

SETTINGS = {
    "algorithm": "fedper",
    "dataset": "digits",
    "partition": "classes",
    "classes": {"per_client": 4, "examples": 40},
    "model": "mlp",
    "mlp": {"hidden": (8,)},
    "clients": 4,
    "clients_per_round": 2,
    "dropout": 0.3,
    "local_epochs": 2,
    "learning_rate": 0.05,
    "rounds": 4,
    "eval_every": 2,
    "devices": 1,
    "seed": 3,
}


@pytest.fixture(scope="module")
def data():
    digits = pfl.datasets.digits()
    return pfl.partition(digits, "classes", clients=4, per_client=4, examples=40)


@pytest.fixture(scope="module")
def method(data):
    training = pfl.local_sgd(learning_rate=0.05, epochs=2)
    return pfl.fedper(pfl.networks.MLP(outputs=10, hidden=(8,)), training, data.federation)


def simulation(method, data, **settings):
    return Simulation(method, data, clients_per_round=2, dropout=0.3, seed=3, devices=1, **settings)


@pytest.fixture(scope="module")
def whole_run():
    return pfl.run(SETTINGS)


@pytest.mark.parametrize("store", ["device", "host"])
def test_the_loop_gives_what_a_run_of_the_same_settings_gives(store, method, data, whole_run):
    loop = simulation(method, data, store=store)
    state, bytes_up, arrived = loop.init(), 0, 0
    for t in range(4):
        state, log = loop.run_round(state, t)
        bytes_up += log.bytes_up
        arrived += int(log.arrived.sum())
    scores = loop.evaluate(state, 4)
    last = whole_run.metrics[-1]
    assert float(scores.before.accuracy.mean()) == last["before"]["accuracy_mean"]
    assert float(scores.after.accuracy.mean()) == last["after"]["accuracy_mean"]
    assert float(scores.before.loss.mean()) == last["before"]["loss"]
    assert bytes_up == whole_run.ledger.total_up
    assert arrived == sum(whole_run.ledger.visits)
    if store == "device":
        for ours, theirs in zip(*map(jax.tree.leaves, (state, whole_run.state)), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_many_rounds_in_one_call_give_what_single_rounds_give(method, data):
    loop = simulation(method, data)
    together, logs = loop.run_rounds(loop.init(), 0, 3)
    state = loop.init()
    for t in range(3):
        state, log = loop.run_round(state, t)
        np.testing.assert_array_equal(log.ids, logs[t].ids)
        np.testing.assert_array_equal(log.metrics["loss"], logs[t].metrics["loss"])
        assert log.bytes_down_by_layer == logs[t].bytes_down_by_layer
    for one, other in zip(*map(jax.tree.leaves, (state, together)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_log_of_a_round_counts_its_bytes_and_clients(method, data):
    loop = Simulation(method, data, clients_per_round=3, devices=1)
    _, log = loop.run_round(loop.init(), 0)
    assert list(log.ids) == sorted(set(log.ids))
    assert len(log.ids) == 3
    assert log.arrived.all()
    body = 4 * (64 * 8 + 8)  # FedPer keeps the last layer at the client
    assert (log.bytes_up, log.bytes_down) == (3 * body, 3 * body)
    assert log.bytes_up_by_layer == {"fc1": 3 * body}
    assert log.loss == pytest.approx(float(log.metrics["loss"].mean()))
    missing = log._replace(arrived=np.zeros(3, bool))
    assert math.isnan(missing.loss)


def test_a_state_may_be_changed_between_rounds(method, data):
    loop = Simulation(method, data, devices=1)
    state = loop.init()
    constant = jax.tree.map(lambda leaf: np.full_like(leaf, 0.01), jax.device_get(state.server))
    state = state._replace(server=constant)
    model = loop.personal_model(state, client=1)
    assert np.all(model["params"]["fc1"]["kernel"] == np.float32(0.01))
    assert not np.all(model["params"]["fc2"]["kernel"] == np.float32(0.01))
    state, _ = loop.run_round(state, 0)
    assert not np.any(state.server["params"]["fc1"]["bias"] == np.float32(0.01))


def test_what_a_method_shows_of_its_state(data):
    training = pfl.local_sgd(learning_rate=0.05)
    network = pfl.networks.MLP(outputs=10, hidden=())
    loop = Simulation(pfl.pfedla(network, training, data.federation), data, devices=1)
    shown = loop.observe(loop.init())
    np.testing.assert_allclose(shown["alpha"], np.full((4, 1, 4), 0.25), rtol=1e-6)


def test_clients_without_examples_have_no_score(method, data):
    size = np.array(data.examples.test.size)
    size[2] = 0
    examples = data.examples._replace(test=data.examples.test._replace(size=size))
    loop = Simulation(method, data._replace(examples=examples), devices=1, evaluate_after=False)
    scores = loop.evaluate(loop.init(), 0)
    assert np.isnan(scores.before.accuracy).tolist() == [False, False, True, False]
    assert scores.before.examples[2] == 0
    assert scores.after is None


def test_mistakes_are_reported_in_one_line_before_anything_is_compiled(method, data):
    for settings, line in (
        ({"store": "cloud"}, "store is 'cloud'; choose device, sharded, host, disk"),
        ({"clients_per_round": 5}, "clients_per_round is 5, and there are 4 active clients"),
    ):
        with pytest.raises(UsageError, match=line):
            Simulation(method, data, **settings)
    with pytest.raises(UsageError, match="takes an Algorithm, got function"):
        Simulation(pfl.fedavg, data)
    loop = Simulation(method, data, devices=1)
    with pytest.raises(UsageError, match="n must be at least 1, got 0"):
        loop.run_rounds(None, 0, 0)
    with pytest.raises(UsageError, match="client is 4; choose 0 to 3"):
        loop.personal_model(loop.init(), 4)
    with pytest.raises(UsageError, match="partition takes a Dataset, got tuple"):
        pfl.partition((np.zeros((3, 2)), np.zeros(3)), "iid", clients=2)
    with pytest.raises(UsageError, match="y holds text; number the classes first"):
        pfl.arrays(np.zeros((2, 2)), np.array(["cat", "dog"]))
    torch_module = type("Net", (), {"__module__": "torch.nn.modules"})
    with pytest.raises(UsageError, match="model=Net is a PyTorch module, and clients train in"):
        pfl.run({"dataset": "digits"}, model=torch_module)
    sharded = Simulation(method, data, store="sharded", devices=2)
    with pytest.raises(UsageError, match="needs store='device', and store is 'sharded'"):
        sharded.personal_model(None, 0)
    with pytest.raises(UsageError, match="epochs or steps, not both"):
        pfl.local_sgd(epochs=1, steps=1)
    for settings in ({"epochs": 0}, {"steps": 0}):
        with pytest.raises(UsageError, match="0; it must be at least 1"):
            pfl.local_sgd(**settings)


def test_reprs_are_one_short_line(method, data, whole_run):
    assert repr(data) == "PartitionedData(4 clients, 112 training examples, 48 test examples)"
    assert repr(pfl.datasets.digits()) == "Dataset('digits': 1,797 examples of shape [8, 8, 1])"
    assert repr(whole_run).startswith("Result(fedper, 4 rounds, accuracy 0.")
    assert repr(whole_run).endswith(" after local training)")
    assert repr(Simulation(method, data)) == "Simulation(4 clients, 4 per round, store='device')"


def test_every_method_is_exported():
    assert set(METHODS) <= set(pfl.__all__)
