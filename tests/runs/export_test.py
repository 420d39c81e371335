"""Tests that exported personal models have the scores of the run's evaluation."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from fedjax_pfl import algorithms, networks
from fedjax_pfl.algorithms.fedproto import Nearest
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import client_data, load, take
from fedjax_pfl.networks.zero_head import ZeroHead
from fedjax_pfl.runs import export, network_json, runner
from fedjax_pfl.runs.build import build
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation import ledger
from tests import cases, tiny

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

BASE = {
    "dataset": "synthetic",
    "synthetic": {"shape": (4, 4, 1), "classes": 3, "examples": 90, "test_examples": 0},
    "partition": "iid",
    "clients": 3,
    "rounds": 2,
    "eval_every": 2,
    "batch_size": 16,
    "learning_rate": 0.1,
    "model": "mlp",
    "mlp": {"hidden": (5,)},
    "evaluate_after": False,
    "devices": 1,
}
NORM = {"model": "small", "small": {"kernels": (2, 3), "dense": (4,), "batch_norm": True}}
FEDMN = {"layout": (2, 2), "width": 4, "hidden": 4, "x_size": 3, "y_size": 2}
METHODS = {
    "fedbn": NORM,  # client-side statistics of BatchNorm
    "fedem": {"fedem": {"components": 2}, "permute_labels": True},
    "fedmn": {"fedmn": FEDMN},
    "factorized_fl": {"factorized_fl": {"rank": 2, "sparsity": 0.1}},
    "pfedhn": {
        "groups": ({"mlp": {"hidden": (4,)}}, {"mlp": {"hidden": (6, 3)}}),
        "pfedhn": {"width": 4, "depth": 1},
    },
    "pfedla": {"pfedla": {"hidden": 4, "embedding": 4}},  # small, to mix weights
    "pfedpara": {},
    "pfedme": {},  # trains before it serves
    "knn_per": {"knn_per": {"neighbours": 3}},  # has features of training examples
    "fedproto": {},  # has prototypes, some of them integers
}


def make_result(rounds, algorithm, **changes):
    """Returns a result whose state is the initial state with noise."""
    settings = configuration.complete({**BASE, "algorithm": algorithm, **changes})
    built, rng = build(settings), np.random.default_rng(0)
    state = jax.device_get(built.phases[0].rounds.init(jax.random.key(5)))

    def noisy(leaf):
        if leaf.dtype.kind != "f":
            return leaf
        moved = (leaf + 0.3 * rng.normal(size=leaf.shape)).astype(leaf.dtype)
        return np.where(leaf > 0, np.abs(moved), moved)  # a variance stays above 0

    state = jax.tree.map(noisy, state)
    return runner.Result(
        config=json.loads(json.dumps(configuration.resolve(settings))),
        metrics=[{"round": rounds, "best_round": None}],
        clients=[],
        ledger=ledger.empty(3),
        round=rounds,
        phase=0,
        state=state,
        best=None,
        phases=built.phases,
        data=built.data,
        federation=built.federation,
        directory=None,
        observations={},
        resumed_at=None,
        confusion={},
    )


def scores_of_run(result, state):
    """Returns test accuracies and losses of all clients from the evaluation of the run."""
    phase, t = result.phases[-1], jnp.int32(result.metrics[-1]["round"])
    key, state, data, t = phase.rounds.place((phase.key, state, result.data, t))
    scores = jax.device_get(phase.rounds.evaluate(key, state, data, t)).before
    return np.stack([scores.metrics["accuracy"], scores.loss], -1) / scores.examples[:, None]


def scores_of_file(path, result):
    """Returns the accuracy and loss of one client's exported model, and its outputs."""
    model, variables = export.load(path)
    examples = examples_of(result, export.describe(path)["client"])

    @jax.jit
    def score(variables, examples):
        outputs = model.apply(variables, examples.x)
        accuracy = cases.TASK.metrics[0].update(outputs, examples.y, None)
        return accuracy, cases.TASK.loss(outputs, examples.y, None), outputs

    accuracy, loss, outputs = score(variables, examples)
    return [np.mean(accuracy), np.mean(loss)], outputs


@jax.jit
def _take(data, i, rows):
    return take(client_data(data, i), rows, jnp.ones(len(rows), bool))


def examples_of(result, i):
    """Returns the test examples of a client as inputs of its model."""
    rows = np.asarray(result.data.test.rows)[i][: int(result.data.test.size[i])]
    return _take(result.data, np.int32(i), rows)


@pytest.mark.parametrize("name", METHODS)
def test_exported_models_have_the_scores_of_the_run(name, tmp_path):
    result = make_result(7, name, **METHODS[name])
    paths = export.write_models(result, tmp_path, [0, 1])
    assert [p.name for p in paths] == ["client-0.safetensors", "client-1.safetensors"]
    for expected, path in zip(scores_of_run(result, result.state), paths, strict=False):
        scores, outputs = scores_of_file(path, result)
        np.testing.assert_allclose(scores, expected, rtol=2e-6)
        assert np.ptp(outputs) > 0.01
        facts = export.describe(path)
        assert (facts["algorithm"], facts["round"]) == (name, 7)
    first, second = ([leaf.tobytes() for leaf in load_file(path).values()] for path in paths)
    if name == "fedmn":
        gates = load_file(paths[0])["gates"]
        assert gates.any()
        assert not gates.all()
    else:
        assert first != second  # personal models


def test_names_and_metadata_of_a_file(tmp_path):
    result = make_result(1, "fedavg", dataset="digits", partition="classes", permute_labels=True)
    (path,) = export.write_models(result, tmp_path / "a" / "b", [1])
    assert path == tmp_path / "a" / "b" / "client-1.safetensors"
    flat = load_file(path)
    assert set(flat) == {f"params/fc{i}/{leaf}" for i in (1, 2) for leaf in ("kernel", "bias")}
    np.testing.assert_array_equal(
        flat["params/fc1/kernel"], result.state.server["params"]["fc1"]["kernel"]
    )
    facts = export.describe(path)
    assert facts == {
        "format": 1,
        "algorithm": "fedavg",
        "dataset": "digits",
        "client": 1,
        "round": 1,
        "seed": 0,
        "input_shape": [8, 8, 1],
        "outputs": 10,
        "classes": None,
        "input_dtype": "float32",
        "each": [],
        "model": {"kind": "mlp", "outputs": 10, "hidden": [5]},
        "layout": "flax",
        "scale": np.asarray(result.data.scale).tolist(),
        "shift": np.asarray(result.data.shift).tolist(),
        "target_mean": None,
        "target_deviation": None,
        "label_map": np.asarray(result.data.label_map[1]).tolist(),
    }
    # Scale and shift convert stored examples to inputs exactly.
    rows = result.data.test.rows[1][:4]
    inputs = result.data.x[rows].astype(np.float32) * np.float32(facts["scale"])
    inputs += np.float32(facts["shift"])
    np.testing.assert_array_equal(inputs, examples_of(result, 1).x[:4])
    labels = np.asarray(facts["label_map"])[result.data.y[rows]]
    np.testing.assert_array_equal(labels, examples_of(result, 1).y[:4])


def test_models_of_a_run_that_a_callback_ended_in_its_first_phase(tmp_path):
    phases = ({"rounds": 9}, {"algorithm": "fedper"})
    result = make_result(7, "fedavg", phases=phases)._replace(metrics=[])
    (path,) = export.write_models(result, tmp_path, [1])
    facts = export.describe(path)
    assert (facts["algorithm"], facts["round"]) == ("fedavg", 7)
    chex.assert_trees_all_equal(jax.device_get(export.load(path)[1]), result.state.server)


def test_models_in_the_layout_of_pytorch(tmp_path):
    result = make_result(1, "fedbn", **NORM)
    (ours,) = export.write_models(result, tmp_path / "flax", [2])
    (theirs,) = export.write_models(result, tmp_path / "torch", [2], torch=True)
    chex.assert_trees_all_equal(export.load(ours)[1], export.load(theirs)[1])
    arrays, kernels = load_file(theirs), load_file(ours)
    kernel = kernels["params/conv2/kernel"]  # [height, width, in, out]
    np.testing.assert_array_equal(arrays["conv2.weight"], kernel.transpose(3, 2, 0, 1))
    mean = kernels["batch_stats/norm1/mean"]
    np.testing.assert_array_equal(arrays["norm1.running_mean"], mean)
    assert export.describe(theirs) == {**export.describe(ours), "layout": "torch"}


def test_names_of_pytorch_tell_layers_of_equal_shapes_apart(tmp_path):
    """Blocks of MobileNet have several norms of equal shapes."""
    sizes = {"shape": (8, 8, 1), "classes": 3, "examples": 30, "test_examples": 0}
    options = {"synthetic": sizes, "mlp": {}, "mobilenet": {"width": 0.25}}
    result = make_result(1, "fedavg", model="mobilenet", **options)
    (path,) = export.write_models(result, tmp_path / "torch", [2], torch=True)
    chex.assert_trees_all_equal(jax.device_get(export.load(path)[1]), result.state.server)


@pytest.mark.parametrize(
    ("method", "line"),
    [
        ("factorized_fl", "it is no convolution, dense layer or norm"),
        ("fedproto", "Nearest combines a network with other arrays"),
    ],
)
def test_networks_that_pytorch_has_no_layers_for_are_refused_before_writing(method, line, tmp_path):
    result = make_result(1, method, **METHODS[method])
    with pytest.raises(UsageError, match=line):
        export.write_models(result, tmp_path / "models", torch=True)
    assert not (tmp_path / "models").exists()


def test_metadata_converts_raw_numbers_of_a_table(tmp_path):
    result = make_result(1, "fedavg", dataset="wine")
    (path,) = export.write_models(result, tmp_path / "models", [0])
    facts, raw = export.describe(path), load("wine").x_train.astype(np.float64)
    inputs = (raw * facts["scale"] + facts["shift"]).astype(np.float32)
    np.testing.assert_allclose(np.sort(inputs, 0), np.sort(result.data.x, 0), atol=2e-6)


def test_metadata_converts_rows_of_clients_that_are_normalised_on_their_own(tmp_path):
    """The clients' numbers differ by a hundred; targets are normalised over the federation."""
    rng, owners = np.random.default_rng(0), np.arange(60) % 3
    x = rng.normal(size=60) + 100 * owners
    y = 1000 * rng.normal(size=60)
    rows = "".join(f"{owners[i]},{float(x[i])!r},{float(y[i])!r}\n" for i in range(60))
    (tmp_path / "t.csv").write_text(f"who,x,price\n{rows}")
    table = {"owner": "who", "label": "price", "label_kind": "number", "normalise": "client"}
    settings = {"dataset": f"csv:{tmp_path / 't.csv'}", "csv": table, "partition": "natural"}
    result = make_result(1, "fedavg", model="mlp", **settings)
    for i, path in enumerate(export.write_models(result, tmp_path / "models")):
        facts = export.describe(path)
        parts = (result.data.train, result.data.test)
        used = np.concatenate([part.rows[i, : part.size[i]] for part in parts])
        inputs = x[owners == i, None] * facts["scale"] + facts["shift"]
        np.testing.assert_allclose(np.sort(inputs, 0), np.sort(result.data.x[used], 0), atol=1e-5)
        targets = result.data.y[used] * facts["target_deviation"] + facts["target_mean"]
        np.testing.assert_allclose(np.sort(targets[:, 0]), np.sort(y[owners == i]), rtol=1e-5)


@pytest.mark.parametrize("name", algorithms.METHODS)
def test_the_network_of_every_method_is_restored_from_json(name):
    federation = tiny.federated()[1]._replace(input_shape=(8, 8, 1))
    network = networks.SmallCNN(outputs=3, kernels=(2, 4), batch_norm=True)
    case = cases.CASES[name]
    algorithm = getattr(algorithms, name)(network, cases.training(), federation, **case.settings)
    network = algorithm.predict.__self__
    encoded = json.loads(json.dumps(network_json.to_json(network)))
    decoded = network_json.from_json(network_json.lists_to_tuples(encoded), {}, None)
    assert (type(decoded), decoded) == (type(network), network)


@pytest.mark.parametrize("wrap", [ZeroHead, lambda network: networks.Pretrained(network, {})])
def test_the_initialisation_of_a_network_is_not_in_its_json(wrap):
    network = networks.MLP(outputs=3, hidden=(4,))
    for kind in (lambda inner: inner, Nearest):
        expected = network_json.to_json(kind(network))
        assert network_json.to_json(kind(wrap(network))) == expected


def test_how_convolutions_are_computed_is_not_in_the_json_of_a_network():
    """A model that a GPU trained is loaded on a CPU."""
    encoded = network_json.to_json(Nearest(networks.LeNet(outputs=3, conv="fused")))
    decoded = network_json.from_json(network_json.lists_to_tuples(encoded), {}, None)
    assert decoded == Nearest(networks.LeNet(outputs=3))
