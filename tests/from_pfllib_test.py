"""The guide for users of PFLlib and FL-bench: its code, and FedAvg on an imported partition."""

import json
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

import fedjax_pfl as pfl
from fedjax_pfl.core import tensor_file
from fedjax_pfl.data import foreign_partitions
from tests import documents, tiny
from tests.algorithms.linear import softmax

pytestmark = pytest.mark.slow("runs on imported data")

CLIENTS, SIZES = 20, (3, 5)
SHAPE = (3, 4, 4)  # channels first, as in PyTorch


def write_pfllib(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Writes a partition as PFLlib does, and returns the training examples of each client."""
    rng = np.random.default_rng(2)
    examples = []
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        for client in range(CLIENTS):
            n = SIZES[client % 2]
            x, y = rng.normal(size=(n, *SHAPE)).astype(np.float32), rng.integers(0, 10, n)
            if part == "train":
                examples.append((x, y))
            np.savez(folder / part / f"{client}.npz", data={"x": x, "y": y})
    config = {"num_clients": CLIENTS, "num_classes": 10}
    (folder / "config.json").write_text(json.dumps(config))
    return examples


def fedavg(weights: list[np.ndarray], examples: list, rate: float, rounds: int) -> list[np.ndarray]:
    """Returns PyTorch's parameters of two dense layers after rounds of one full batch."""
    for _ in range(rounds):
        sums = [np.zeros_like(w) for w in weights]
        for x, y in examples:
            w1, b1, w2, b2 = weights
            flat = x.reshape(len(x), -1).astype(np.float64)
            hidden = flat @ w1.T + b1
            z = np.maximum(hidden, 0)
            error = (softmax(z @ w2.T + b2) - np.eye(10)[y]) / len(y)
            back = error @ w2 * (hidden > 0)
            gradients = (back.T @ flat, back.sum(0), error.T @ z, error.sum(0))
            for total, w, g in zip(sums, weights, gradients, strict=True):
                total += len(y) * (w - rate * g)
        weights = [total / sum(len(y) for _, y in examples) for total in sums]
    return weights


def test_fedavg_on_an_imported_partition_with_imported_weights(tmp_path, monkeypatch, capsys):
    """Three rounds of the guide's code, against NumPy on PFLlib's files."""
    monkeypatch.chdir(tmp_path)
    examples = write_pfllib(tmp_path / "Cifar10")
    foreign_partitions.write(foreign_partitions.read(Path("Cifar10")), Path("cifar10_20"))
    network = pfl.networks.MLP(outputs=10, hidden=(16,))
    variables = network.init(jax.random.key(4), np.zeros((1, 4, 4, 3), np.float32))
    pfl.to_torch("weights.safetensors", network, variables, (4, 4, 3))
    first = read(tmp_path)

    code = documents.blocks("from_pfllib.md")[0]
    names: dict = {}
    exec(code, names)
    assert 0 <= float(capsys.readouterr().out) <= 1
    pfl.to_torch("weights.safetensors", network, names["state"].server, (4, 4, 3))
    expected = fedavg(first, examples, rate=0.1, rounds=3)
    assert max(np.abs(a - b).max() for a, b in zip(expected, first, strict=True)) > 0.01
    chex.assert_trees_all_close(read(tmp_path), expected, rtol=1e-4, atol=1e-5)


def read(folder: Path) -> list[np.ndarray]:
    """Returns the weights and biases of both layers in PyTorch's layout."""
    tensors = tensor_file.read(folder / "weights.safetensors")
    layers = sorted({name.rpartition(".")[0] for name in tensors})
    names = [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    return [np.float64(tensors[name]) for name in names]


@pytest.mark.slow("two methods' programs")
def test_the_ported_method_is_fedper():
    own = documents.module("from_pfllib.md", 1).own_fedper
    data, federation = tiny.federated()
    states = []
    for factory in (own, pfl.fedper):
        training = pfl.local_sgd(learning_rate=0.1, epochs=1, batch_size=4)
        simulation = pfl.Simulation(
            factory(tiny.Net(), training, federation), pfl.PartitionedData(data, federation)
        )
        state, logs = simulation.run_rounds(simulation.init(), 0, 2)
        states.append((state.server, simulation.personal_model(state, 1), logs[0].bytes_up))
    chex.assert_trees_all_equal(*states)
    pfl.testing.check(own, training=pfl.local_sgd(0.1, epochs=1), tell=lambda line: None)
    with pytest.raises(AssertionError, match="keep_optimizer is set, and the method does not"):
        pfl.testing.check(own, tell=lambda line: None)
