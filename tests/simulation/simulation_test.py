"""Tests of the training loop against runs with the same settings, and of its logs."""

import math

import chex
import jax
import numpy as np
import optax
import pytest

import fedjax_pfl as pfl
from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.core.algorithm import Algorithm
from fedjax_pfl.simulation.simulation import Simulation
from fedjax_pfl.simulation.stores import to_arrays
from tests.commands import message

X = np.zeros((2, 2))
TORCH = type("Net", (), {"__module__": "torch.nn.modules"})

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
def run():
    return pfl.run(SETTINGS)


def assert_equal(a, b):
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("store", ["device", "host"])
def test_the_loop_equals_a_run(store, method, data, run):
    loop = simulation(method, data, store=store)
    state, bytes_up, arrived = loop.init(), 0, 0
    for t in range(4):
        state, log = loop.run_round(state, t)
        bytes_up += log.bytes_up
        arrived += int(log.arrived.sum())
    scores = loop.evaluate(state, 4)
    last = run.metrics[-1]
    assert float(scores.before.accuracy.mean()) == last["before"]["accuracy_mean"]
    assert float(scores.after.accuracy.mean()) == last["after"]["accuracy_mean"]
    assert float(scores.before.loss.mean()) == last["before"]["loss"]
    assert bytes_up == run.ledger.total_up
    assert arrived == sum(run.ledger.client_updates)
    if store == "device":
        assert_equal(state, run.state)


def test_a_call_of_several_rounds_equals_single_rounds(method, data):
    loop = simulation(method, data)
    final, logs = loop.run_rounds(loop.init(), 0, 3)
    state = loop.init()
    for t in range(3):
        state, log = loop.run_round(state, t)
        np.testing.assert_array_equal(log.ids, logs[t].ids)
        np.testing.assert_array_equal(log.metrics["loss"], logs[t].metrics["loss"])
        assert log.bytes_down_by_layer == logs[t].bytes_down_by_layer
    assert_equal(state, final)


def test_the_log_of_a_round_counts_its_bytes_and_clients(method, data):
    loop = Simulation(method, data, clients_per_round=3, devices=1)
    _, log = loop.run_round(loop.init(), 0)
    assert log.ids.shape == (3,)
    assert list(log.ids) == sorted(set(log.ids))
    assert log.arrived.all()
    body = 4 * (64 * 8 + 8)  # FedPer does not upload the last layer
    assert (log.bytes_up, log.bytes_down) == (3 * body, 3 * body)
    assert log.bytes_up_by_layer == {"fc1": 3 * body}
    assert log.loss == pytest.approx(float(log.metrics["loss"].mean()))
    assert math.isnan(log._replace(arrived=np.zeros(3, bool)).loss)


@pytest.mark.parametrize(
    ("deadline", "late", "seconds"),
    [(None, [], 10), (6.5, [3], 6.5), (2.5, [0, 1, 2, 3], 2.5)],
)
def test_simulated_seconds_by_hand(deadline, late, seconds, method, data):
    """Two epochs of one batch, and a second for each transfer: 3, 4, 6 and 10 seconds."""
    times = {"step_seconds": [0.5, 1, 2, 4], "bandwidth": 4.0 * (64 * 8 + 8)}
    loop = Simulation(method, data, devices=1, deadline=deadline, **times)
    state, log = loop.run_round(loop.init(), 0)
    assert log.seconds == seconds
    assert log.ids[log.late].tolist() == late
    assert log.ids[~log.arrived].tolist() == late
    if not late:
        plain = Simulation(method, data, devices=1)
        plain_state, plain_log = plain.run_round(plain.init(), 0)
        assert_equal(state, plain_state)
        assert (plain_log.seconds, plain_log.late) == (None, None)
        equal = Simulation(method, data, devices=1, step_seconds=0.25)
        assert equal.run_round(equal.init(), 0)[1].seconds == 0.5


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


@pytest.mark.parametrize("store", ["device", "host", "disk"])
def test_a_state_that_a_round_has_used_up_is_refused(store, method, data, tmp_path):
    """A copy stays; off the device, it is a file."""
    loop = simulation(method, data, store=store)
    state, copied = loop.init(), loop.init()
    copy = jax.device_get(copied)
    pfl.save(tmp_path / "copy.npz", copied)
    new, log = loop.run_round(state, 0)
    loop.run_round(copied, 0)
    calls = [
        (loop.run_round, state, 1),
        (loop.evaluate, state, 1),
        (loop.observe, state),
        (loop.init, state),
        (pfl.save, tmp_path / "state.npz", state),
    ]
    if store == "device":
        calls.append((loop.personal_model, state, 0))
    else:
        calls += [(loop.run_round, copy, 1), (loop.evaluate, copy, 0)]
        copy = pfl.restore(tmp_path / "copy.npz", like=new)
    again, again_log = loop.run_round(copy, 0)
    assert_equal((to_arrays(again), again_log.loss), (to_arrays(new), log.loss))
    for function, *arguments in calls:
        assert "was used up by run_round" in message(function, *arguments)
    loop.evaluate(new, 1)


@pytest.mark.slow("a program for each store")
@pytest.mark.parametrize("store", ["device", "host"])
def test_a_used_up_state_without_server_arrays_is_refused(store, data):
    method = pfl.local(pfl.networks.MLP(outputs=10, hidden=()), pfl.local_sgd(), data.federation)
    loop = simulation(method, data, store=store)
    state = loop.init()
    loop.run_round(state, 0)
    assert "was used up by run_round" in message(loop.run_round, state, 1)


def test_rounds_of_two_states_may_alternate(method, data):
    """A store that fetches the next cohort must not take it from the other state."""
    losses = {}
    for store in ("device", "host"):
        loop = simulation(method, data, store=store)
        first, _ = loop.run_rounds(loop.init(), 0, 3)
        second, _ = loop.run_round(loop.init(), 2)
        logs = []
        for t in range(3, 8):
            first, log = loop.run_round(first, t)
            second, other_log = loop.run_round(second, t)
            logs += [log, other_log]
        losses[store] = [log.metrics["loss"] for log in logs]
    np.testing.assert_allclose(losses["host"], losses["device"], rtol=1e-5)


@pytest.mark.slow("two programs")
def test_two_simulations_may_train_one_state(method, data):
    """A store that fetches the next cohort must see what the other simulation has written."""
    losses = {}
    for store in ("device", "host"):
        loops = [simulation(method, data, store=store) for _ in range(2)]
        state, logs = loops[0].init(), []
        for t in range(3):
            for loop in loops:
                state, log = loop.run_round(state, t)
                logs.append(log)
        losses[store] = [log.metrics["loss"] for log in logs]
    np.testing.assert_allclose(losses["host"], losses["device"], rtol=1e-5)


@pytest.mark.slow("two phases")
def test_a_phase_in_another_store_starts_with_the_rows_of_the_last(data):
    training = pfl.local_sgd(learning_rate=0.05)
    network = pfl.networks.MLP(outputs=10, hidden=())
    method = pfl.fedcac(network, training, data.federation)
    on_device, on_host = (
        Simulation(method, data, store=store, devices=1) for store in ("device", "host")
    )
    state, _ = on_device.run_round(on_device.init(), 0)
    assert_equal(to_arrays(on_host.init(state)), state)


@pytest.mark.slow("programs for each pair of stores")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("host", "device"),
        ("device", "host"),
        ("sharded", "host"),
        ("sharded", "device"),
        ("host", "sharded"),
    ],
)
def test_a_state_of_another_store_trains_on(first, second, method, data):
    """A round in one store and a round in another equal two rounds."""

    def make(store):
        devices = 2 if store == "sharded" else 1
        return Simulation(method, data, clients_per_round=2, seed=3, store=store, devices=devices)

    state, _ = make(first).run_round(make(first).init(), 0)
    state, _ = make(second).run_round(state, 1)
    loop = make("device")
    expected, _ = loop.run_rounds(loop.init(), 0, 2)
    chex.assert_trees_all_close(to_arrays(state), to_arrays(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.slow("programs for two numbers of devices")
@pytest.mark.parametrize(("first", "second"), [(1, 4), (4, 1), (2, 4)])
def test_a_spread_state_trains_on_with_other_devices(first, second, method, data):
    """Equals two rounds with the second number of devices, also from a copy in NumPy."""
    loops = [
        Simulation(method, data, clients_per_round=2, seed=3, store="sharded", devices=devices)
        for devices in (first, second)
    ]
    state, _ = loops[0].run_round(loops[0].init(), 0)
    copy = jax.device_get(state)
    scores = [loop.evaluate(state, 1).before.loss for loop in loops]
    np.testing.assert_allclose(*scores, rtol=1e-5)
    chex.assert_trees_all_equal_shapes(loops[1].init(state), loops[1].init())
    expected = to_arrays(loops[1].run_rounds(loops[1].init(), 0, 2)[0])
    for start in (state, copy):
        result, _ = loops[1].run_round(start, 1)
        chex.assert_trees_all_close(to_arrays(result), expected, rtol=1e-5, atol=1e-6)


def test_diagnostics_of_a_state(data):
    training = pfl.local_sgd(learning_rate=0.05)
    network = pfl.networks.MLP(outputs=10, hidden=())
    method = pfl.pfedla(network, training, data.federation)
    traces = []

    def observe(state):
        traces.append(state)
        return method.observe(state)

    loop = Simulation(method._replace(observe=observe), data, devices=1)
    state = loop.init()
    diagnostics = [loop.observe(state) for _ in range(2)][1]
    assert len(traces) == 1  # compiled once
    np.testing.assert_allclose(diagnostics["alpha"], np.full((4, 1, 4), 0.25), rtol=1e-6)


def test_clients_without_examples_have_no_score(method, data):
    size = np.array(data.examples.test.size)
    size[2] = 0
    examples = data.examples._replace(test=data.examples.test._replace(size=size))
    loop = Simulation(method, data._replace(examples=examples), devices=1, evaluate_after=False)
    scores = loop.evaluate(loop.init(), 0)
    assert np.isnan(scores.before.accuracy).tolist() == [False, False, True, False]
    assert scores.before.examples[2] == 0
    assert scores.after is None


@pytest.mark.parametrize(
    ("function", "arguments", "settings", "line"),
    [
        (Simulation, (), {"store": "cloud"}, "store is 'cloud'; choose device, sharded, host, dis"),
        (Simulation, (), {"clients_per_round": 5}, "clients_per_round is 5, and there are 4 activ"),
        (Simulation, (), {"clients_per_round": 0}, "clients_per_round is 0; it must be an integer"),
        (Simulation, (), {"clients_per_round": 2.5}, "clients_per_round is 2.5; it must be an int"),
        (Simulation, (), {"devices": -1}, "devices is -1; it must be an integer, at least 1"),
        (Simulation, (), {"chunk": 0}, "chunk is 0; it must be an integer, at least 1"),
        (Simulation, (), {"dropout": float("nan")}, "dropout is nan; it is a probability, 0 to 1"),
        (Simulation, (), {"dropout": "0.1"}, "dropout is '0.1'; it is a probability, 0 to 1"),
        (Simulation, (), {"seed": 1.0}, "seed is 1.0; it must be an integer from 0 to 2^32 - 1"),
        (Simulation, (), {"seed": -1}, "seed is -1; it must be an integer from 0 to 2^32 - 1"),
        (Simulation, (), {"seed": 2**32}, "seed is 4294967296; it must be an integer from 0 to 2"),
        (Simulation, (), {"max_update_norm": "1"}, "max_update_norm is '1'; it must be a number"),
        (Simulation, (), {"max_update_norm": -1}, "max_update_norm is -1; it must be above 0"),
        (Simulation, (), {"store": "disk", "folder": "no/folder"}, "folder no/folder does not"),
        (Simulation, (), {"store": "disk", "folder": 3}, "folder 3 does not exist; create it"),
        (Simulation, (), {"deadline": 5.0}, "deadline needs step_seconds; add it"),
        (Simulation, (), {"step_seconds": [1.0, 2.0]}, "step_seconds has shape [2]; give one nu"),
        (Simulation, (), {"step_seconds": "slow"}, "step_seconds is 'slow'; it must be a number"),
        (Simulation, (), {"step_seconds": 1, "bandwidth": 0}, "bandwidth is 0; it must be a numb"),
        (Simulation, (), {"step_seconds": 1, "deadline": [1] * 4}, "deadline has shape [4]; give"),
        (Simulation.run_rounds, (None, 0, 0), {}, "n is 0; it must be an integer, at least"),
        (Simulation.personal_model, (None, 4), {}, "client is 4; choose 0 to 3"),
        (
            Simulation.personal_model,
            (None, 0),
            {"store": "sharded", "devices": 2},
            "personal_model needs store='device', and store is 'sharded'",
        ),
    ],
)
def test_invalid_arguments_of_a_simulation(function, arguments, settings, line, method, data):
    def call():
        simulation = Simulation(method, data, **{"devices": 1, **settings})
        if function is not Simulation:
            function(simulation, *arguments)

    assert line in message(call)


def test_a_network_with_the_wrong_number_of_outputs_is_refused(data):
    outputs = data.federation.outputs
    network = pfl.networks.MLP(outputs=outputs + 1)
    line = message(lambda: Simulation(pfl.fedavg(network, pfl.local_sgd(), data.federation), data))
    assert f"[2, {outputs + 1}] for 2 examples; it must return [2, {outputs}]" in line


@pytest.mark.parametrize("factory", [pfl.fedper, pfl.pfedla])  # state on clients, on the server
@pytest.mark.parametrize("clients", [3, 5])
def test_a_method_for_another_number_of_clients_is_refused(clients, factory, data):
    other = pfl.partition(
        pfl.datasets.digits(), "classes", clients=clients, per_client=4, examples=40
    )
    network = pfl.networks.MLP(outputs=10, hidden=(8,))
    method = factory(network, pfl.local_sgd(), other.federation)
    line = message(lambda: Simulation(method, data))
    assert f"init returns float32[{clients}, " in line
    assert "its first axis must be the 4 clients" in line


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (lambda: Simulation(pfl.fedavg, None), "takes an Algorithm, got function"),
        (
            lambda: Simulation(Algorithm(*(6 * [None])), pfl.datasets.digits()),
            "Simulation takes PartitionedData, got Dataset; make it with partition(dataset, NAME, ",
        ),
        (lambda: pfl.partition((X, X), "iid", clients=2), "partition takes a Dataset, got tuple"),
        (
            lambda: pfl.partition(pfl.datasets.digits(), "iid", clients=2, task="regression"),
            "task is 'regression'; leave it out, or give a Task",
        ),
        (lambda: pfl.arrays(X, np.array(["a", "b"])), "y holds text; number the classes first"),
        (lambda: pfl.run({}, model=TORCH), "model=Net is a PyTorch module, and clients train in"),
        (lambda: pfl.local_sgd(epochs=1, steps=1), "epochs or steps, not both"),
        (lambda: pfl.local_sgd(epochs=0), "epochs is 0; it must be an integer, at least 1"),
        (lambda: pfl.local_sgd(epochs=1.5), "epochs is 1.5; it must be an integer, at least 1"),
        (lambda: pfl.local_sgd(steps=0), "steps is 0; it must be an integer, at least 1"),
        (lambda: pfl.local_sgd(batch_size=0), "batch_size is 0; it must be an integer, at least"),
        (lambda: pfl.local_sgd(clip_norm=-1), "clip_norm is -1; it must be above 0"),
        (lambda: pfl.local_sgd("0.1"), "learning_rate is '0.1'; it must be a number"),
        (lambda: pfl.local_sgd(momentum="0.9"), "momentum is '0.9'; it must be a number"),
        (lambda: pfl.local_sgd(learning_rate=-1), "learning_rate is -1; it must be at least 0"),
        (lambda: pfl.local_sgd(momentum=-0.9), "momentum is -0.9; it must be at least 0"),
        (lambda: pfl.local_training(0.1), "optimizer cannot be used"),
        (lambda: pfl.local_training(optax.lbfgs()), "it must need gradients and parameters only"),
    ],
)
def test_invalid_arguments_of_other_functions(function, line):
    assert line in message(function)


def test_reprs_are_one_short_line(method, data, run):
    assert repr(data) == "PartitionedData(4 clients, 112 training examples, 48 test examples)"
    assert repr(pfl.datasets.digits()) == "Dataset('digits': 1,797 examples of shape [8, 8, 1])"
    assert repr(run).startswith("Result(fedper, 4 rounds, accuracy 0.")
    assert repr(run).endswith(" after local training)")
    assert repr(Simulation(method, data)) == "Simulation(4 clients, 4 per round, store='device')"


def test_every_method_is_exported():
    assert set(METHODS) <= set(pfl.__all__)
