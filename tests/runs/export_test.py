"""Personal models as files: what comes back scores what the run's own evaluation scores."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from fedjax_pfl import algorithms, networks
from fedjax_pfl.data import client_data, load, take
from fedjax_pfl.runs import export, network_json, runner
from fedjax_pfl.runs.build import build
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation import ledger
from tests import cases, tiny

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

ROOT = Path(__file__).parents[2]
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
    "fedbn": NORM,  # BatchNorm's statistics are each client's own
    "fedem": {"fedem": {"components": 2}, "permute_labels": True},
    "fedmn": {"fedmn": FEDMN},
    "factorized_fl": {"factorized_fl": {"rank": 2, "sparsity": 0.1}},
    "pfedhn": {
        "groups": ({"mlp": {"hidden": (4,)}}, {"mlp": {"hidden": (6, 3)}}),
        "pfedhn": {"width": 4, "depth": 1},
    },
    "pfedla": {"pfedla": {"hidden": 4, "embedding": 4}},  # small, so that weights are mixed
    "pfedpara": {},
    "pfedme": {},  # what is served is trained when it is served
    "fedproto": {},  # with what no network has beside its variables, some of it no real numbers
}


def after(rounds, algorithm, **changes):
    """What a run could have been left with: its first state, and noise on it."""
    settings = configuration.complete({**BASE, "algorithm": algorithm, **changes})
    built, draw = build(settings), np.random.default_rng(0)
    state = jax.device_get(built.phases[0].rounds.init(jax.random.key(5)))

    def noisy(leaf):
        if leaf.dtype.kind != "f":
            return leaf
        moved = (leaf + 0.3 * draw.normal(size=leaf.shape)).astype(leaf.dtype)
        return np.where(leaf > 0, np.abs(moved), moved)  # a variance stays above 0

    state = jax.tree.map(noisy, state)
    plain = json.loads(json.dumps(configuration.resolve(settings)))
    line = {"round": rounds, "best_round": None}
    return runner.Result(
        plain,
        [line],
        [],
        ledger.empty(3),
        state,
        None,
        built.phases,
        built.data,
        built.federation,
        None,
        {},
        None,
    )


def in_the_run(result, state):
    """Clients' accuracies and losses on their test examples, by the run's evaluation itself."""
    phase, t = result.phases[-1], jnp.int32(result.metrics[-1]["round"])
    key, state, data, t = phase.rounds.place((phase.key, state, result.data, t))
    found = jax.device_get(phase.rounds.evaluate(key, state, data, t)).before
    return np.stack([found.metrics["accuracy"], found.loss], -1) / found.examples[:, None]


def by_file(path, result):
    """The same of one client by its file, and its predictions."""
    model, variables = export.load(path)
    own = examples_of(result, export.describe(path)["client"])

    @jax.jit
    def scored(variables, own):
        outputs = model.apply(variables, own.x)
        return (
            cases.TASK.metrics[0].update(outputs, own.y, None),
            cases.TASK.loss(outputs, own.y, None),
            outputs,
        )

    *each, outputs = scored(variables, own)
    return [np.mean(one) for one in each], outputs


@jax.jit
def _taken(data, i, rows):
    return take(client_data(data, i), rows, jnp.ones(len(rows), bool))


def examples_of(result, i):
    """A client's test examples, as its model sees them."""
    rows = np.asarray(result.data.test.rows)[i][: int(result.data.test.size[i])]
    return _taken(result.data, np.int32(i), rows)


@pytest.mark.parametrize("name", METHODS)
def test_files_score_what_the_run_scores(name, tmp_path):
    result = after(7, name, **METHODS[name])
    paths = export.write_models(result, tmp_path, [0, 1])
    assert [p.name for p in paths] == ["client-0.safetensors", "client-1.safetensors"]
    for wanted, path in zip(in_the_run(result, result.state), paths, strict=False):
        scores, outputs = by_file(path, result)
        np.testing.assert_allclose(scores, wanted, rtol=2e-6)
        assert np.ptp(outputs) > 0.01
        facts = export.describe(path)
        assert (facts["algorithm"], facts["round"]) == (name, 7)
    one, other = (b"".join(leaf.tobytes() for leaf in load_file(path).values()) for path in paths)
    if name == "fedmn":
        gates = load_file(paths[0])["gates"]
        assert gates.any()
        assert not gates.all()
    else:
        assert one != other  # they are personal


def test_names_and_facts_of_one_file(tmp_path):
    result = after(1, "fedavg", dataset="digits", partition="classes", permute_labels=True)
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
        "scale": np.asarray(result.data.scale).tolist(),
        "shift": np.asarray(result.data.shift).tolist(),
        "label_map": np.asarray(result.data.label_map[1]).tolist(),
    }
    # An example as it is stored becomes what the model takes, exactly.
    rows = result.data.test.rows[1][:4]
    ours = result.data.x[rows].astype(np.float32) * np.float32(facts["scale"])
    ours += np.float32(facts["shift"])
    np.testing.assert_array_equal(ours, examples_of(result, 1).x[:4])
    labels = np.asarray(facts["label_map"])[result.data.y[rows]]
    np.testing.assert_array_equal(labels, examples_of(result, 1).y[:4])


def test_a_file_says_how_raw_numbers_of_a_table_go_in(tmp_path):
    result = after(1, "fedavg", dataset="wine")
    (path,) = export.write_models(result, tmp_path / "models", [0])
    facts, raw = export.describe(path), load("wine").x_train.astype(np.float64)
    given = (raw * facts["scale"] + facts["shift"]).astype(np.float32)
    np.testing.assert_allclose(np.sort(given, 0), np.sort(result.data.x, 0), atol=2e-6)


@pytest.mark.parametrize("name", algorithms.METHODS)
def test_what_every_method_predicts_with_can_be_written_down(name):
    federation = tiny.federated()[1]._replace(input_shape=(8, 8, 1))
    network = networks.SmallCNN(outputs=3, kernels=(2, 4), batch_norm=True)
    case = cases.CASES[name]
    made = getattr(algorithms, name)(network, cases.training(), federation, **case.settings)
    net = made.predict.__self__
    plain = json.loads(json.dumps(network_json.to_json(net)))
    again = network_json.from_json(network_json.lists_to_tuples(plain), {}, None)
    assert (type(again), again) == (type(net), net)
