"""Tests `experiments.agree` with a stand-in library: FedAvg in NumPy."""

import json
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from absl import flags

from experiments import agree
from experiments.libraries import reference_work, rivals
from experiments.libraries.methods import EPOCHS, METHODS, Rival
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.core.examples import client_data
from tests.commands import Flags, message

pytestmark = pytest.mark.slow("programs of the reference work")

# FedAvg in NumPy. `faster` multiplies the learning rate of the second client.
STAND_IN = """
import json, sys
import numpy as np

spec = json.loads(sys.argv[1])["runs"][0]
if spec["algorithm"] != "fedavg":
    print(json.dumps({"lacks": "its adapter does not run it"}), flush=True)
    sys.exit()
print(json.dumps({"ready": {}}), flush=True)
sys.stdin.readline()
work = dict(np.load(spec["work"]))
w = {name[6:]: np.float64(work[name]) for name in work if name.startswith("start/")}
parameters = {}


def save(t):
    for owner in ("server", *range(len(work["x"]))):
        parameters.update({f"{t}/{owner}/{name}": value for name, value in w.items()})


def train(w, x, y, rate):
    for _ in range(spec["epochs"]):
        h = np.maximum(x @ w["fc1.weight"].T + w["fc1.bias"], 0)
        logits = h @ w["fc2.weight"].T + w["fc2.bias"]
        p = np.exp(logits - logits.max(1, keepdims=True))
        dlogits = (p / p.sum(1, keepdims=True) - np.eye(10)[y]) / len(y)
        dhidden = (dlogits @ w["fc2.weight"]) * (h > 0)
        grads = {"fc1.weight": dhidden.T @ x, "fc1.bias": dhidden.sum(0),
                 "fc2.weight": dlogits.T @ h, "fc2.bias": dlogits.sum(0)}
        w = {name: value - rate * grads[name] for name, value in w.items()}
    return w


save(0)
for t in range(spec["rounds"]):
    rates = spec["rate"] * np.array([1, spec["settings"].get("faster", 1), 1, 1])
    models = [train(w, x, y, rate) for x, y, rate in zip(work["x"], work["y"], rates)]
    w = {name: np.mean([model[name] for model in models], 0) for name in w}
    save(t + 1)
np.savez(spec["out"], **parameters)
print(json.dumps({"seconds": 1.0}), flush=True)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    (tmp_path / "agree_pfllib.py").write_text(STAND_IN)
    monkeypatch.setattr(rivals, "ADAPTERS", tmp_path)
    side = agree.Side("pfllib", [sys.executable], str(tmp_path), 120.0)
    return lambda name: agree.compare_parameters(side, name)


@pytest.mark.slow("trains FedAvg; the comparison itself is tested below")
def test_fedavg_equals_the_numpy_program(stand_in):
    result = stand_in("fedavg")
    assert result["verdict"] == "same"
    assert 0 < max(result["after all"].values()) < 1e-5


def test_verdicts_of_a_faster_and_of_a_missing_method(stand_in, monkeypatch, tmp_path):
    """The stand-in's numbers replace the library's: all differences come from its settings."""
    side = agree.Side("pfllib", [sys.executable], str(tmp_path), 120.0)
    settings = {"rounds": reference_work.ROUNDS, "rate": reference_work.RATE}
    (rival_result,) = agree.rival_results(
        side, [agree.Run("fedavg", reference_work.work(False), settings)]
    )
    monkeypatch.setattr(reference_work, "rounds", lambda name, inputs: rival_result)
    faster = METHODS["fedavg"]._replace(pfllib=Rival({"faster": 1.01}, why="it hurries"))
    monkeypatch.setitem(METHODS, "fedavg", faster)
    differs = stand_in("fedavg")
    assert (differs["verdict"], differs["why"]) == ("differs", "it hurries")
    assert 1e-4 < differs["after 1"]["server"] < 1e-2
    lacks = stand_in("ditto")
    assert lacks == {"verdict": "not run", "why": "its adapter does not run it"}
    results = {"pfllib": {"fedavg": differs, "ditto": lacks}}
    table = agree.table(results)
    assert [row[:2] for row in table.rows] == [["fedavg", "differs"], ["ditto", "not run"]]
    assert agree.reasons(results)[0] == "fedavg in PFLlib: it hurries"


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Calls the command with comparisons that take no time; returns those made and the file."""

    def call(*methods, commit="abc", verdict="same", **options):
        compared = []

        def compare_parameters(side, name):
            compared.append(name)
            return {"verdict": verdict}

        values = {"methods": list(methods), "rounds": 0, "limit": 1.0, "pfllib": "checkout"}
        values |= {"out": str(tmp_path / "out.json")} | options
        monkeypatch.setattr(flags, "FLAGS", Flags(**values))
        monkeypatch.setattr(rivals, "checkout", lambda key, path: path)
        monkeypatch.setattr(rivals, "commit", lambda path: commit)
        monkeypatch.setattr(agree, "compare_parameters", compare_parameters)
        agree.main(["agree"])
        return compared, json.loads((tmp_path / "out.json").read_text())

    return call


def test_results_of_earlier_calls_stay(call, tmp_path):
    """Only methods without a verdict are compared, and the file is written after each of them."""
    same, not_run = {"verdict": "same"}, {"verdict": "not run"}
    assert call("fedavg") == (
        ["fedavg"],
        {"commits": {"pfllib": "abc"}, "methods": {"pfllib": {"fedavg": same}}},
    )
    call("ditto", verdict="not run")
    verdicts = {"fedavg": same, "ditto": not_run}
    assert call("fedavg", verdict="differs")[1]["methods"] == {"pfllib": verdicts}
    compared, written = call("fedavg", "ditto")
    assert compared == ["ditto"]
    assert written["methods"] == {"pfllib": {"fedavg": same, "ditto": same}}
    file = tmp_path / "out.json"
    assert message(partial(call, "moon", commit="abd")) == (
        f"{file} has commits {{'pfllib': 'abc'}}, not {{'pfllib': 'abd'}}; name another"
    )
    assert message(partial(call, "moon", rounds=5, seeds=3)) == (
        f"{file} has results by parameters; name another"
    )
    file.write_text(json.dumps({"rounds": 5, "commits": {"pfllib": "abc"}, "library": {}}))
    assert message(call, "moon") == f"{file} has results by accuracies; name another"
    for damaged in ('{"commits": ', "[1]"):
        file.write_text(damaged)
        assert message(call, "moon").startswith(f"{file} has no results (")


def test_seeds_need_rounds(call):
    assert message(partial(call, "fedavg", seeds=3)) == (
        "--seeds has no effect without --rounds; leave it out"
    )


def test_a_method_without_a_rival_is_refused(call):
    line = "--methods has 'flute', which is compared with --fl_bench only"
    assert message(call, "fedavg", "flute") == line


def test_a_python_needs_its_checkout(call):
    line = "--fl_bench_python has no effect without --fl_bench; leave it out"
    assert message(partial(call, "fedavg", fl_bench_python="python")) == line


def test_gap_on_worked_numbers():
    """Only shared names count: the rival's server moved by 4 and differs by 1; no client name."""
    start = {"0/server/a": np.zeros(2), "0/server/b": np.zeros(1), "0/1/c": np.zeros(1)}
    rival = {
        **start,
        "2/server/a": np.array([4.0, 0.0]),
        "2/server/b": np.ones(1),
        "2/1/c": np.ones(1),
    }
    gap = agree.gap({"2/server/a": np.array([4.0, 1.0])}, rival, 2)
    assert gap == agree.Gap(0.25, None)
    assert gap.worst == 0.25
    assert agree.Gap(None, None).worst == float("inf")
    still = rival | {"2/server/a": np.zeros(2), "2/server/b": np.zeros(1)}
    assert agree.gap({"2/server/b": np.ones(1)}, still, 2) == agree.Gap(float("inf"), None)
    assert agree.gap({"2/server/b": np.zeros(1)}, still, 2) == agree.Gap(None, None)


def test_parameters_that_are_not_numbers_differ():
    small, nan = agree.Gap(1e-8, 1e-8), float("nan")
    rival = Rival({}, why="it divides by zero")
    assert agree.verdict(small, small, rival)["verdict"] == "same"
    for gap in (agree.Gap(1e-8, nan), agree.Gap(nan, 1e-8), agree.Gap(None, None)):
        assert agree.verdict(small, gap, rival)["verdict"] == "differs"
        assert agree.verdict(gap, small, rival)["verdict"] == "differs"


def test_parameters_have_the_names_and_shapes_of_pytorch():
    work = reference_work.work(True)
    shapes = {name[6:]: value.shape for name, value in work.items() if name.startswith("start/")}
    assert shapes == {
        "fc1.weight": (16, 64),
        "fc1.bias": (16,),
        "bn1.weight": (16,),
        "bn1.bias": (16,),
        "fc2.weight": (10, 16),
        "fc2.bias": (10,),
    }
    assert all(len(np.unique(y)) <= 4 for y in work["y"])


def _gradients(x, y, w1, b1, w2, b2):
    """Returns the gradient of the mean cross-entropy of the network in each of its arrays."""
    h = np.maximum(x @ w1.T + b1, 0)
    p = np.exp(h @ w2.T + b2)
    dlogits = (p / p.sum(1, keepdims=True) - np.eye(10)[y]) / len(y)
    dhidden = (dlogits @ w2) * (h > 0)
    return dhidden.T @ x, dhidden.sum(0), dlogits.T @ h, dlogits.sum(0)


def test_floco_uses_the_points_that_other_libraries_get():
    """Two rounds in NumPy: each endpoint descends by its share of the mixed head's gradient."""
    work = reference_work.work(False)
    numbers = reference_work.added_parameters("floco", work)["added/points"].astype(np.float64)
    points = numbers / numbers.sum(-1, keepdims=True)
    names = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
    start = [np.float64(work[f"start/{name}"]) for name in names]
    model = [*start[:2], *(np.stack([head] * points.shape[-1]) for head in start[2:])]
    for t in range(2):
        clients = []
        for i, (x, y) in enumerate(zip(work["x"], work["y"], strict=True)):
            w1, b1, w2, b2 = model
            for alpha in points[t, i]:
                mixed = np.tensordot(alpha, w2, 1), np.tensordot(alpha, b2, 1)
                steps = [reference_work.RATE * g for g in _gradients(x, y, w1, b1, *mixed)]
                w1, b1 = w1 - steps[0], b1 - steps[1]
                w2, b2 = w2 - np.multiply.outer(alpha, steps[2]), b2 - np.outer(alpha, steps[3])
            clients.append((w1, b1, w2, b2))
        model = [np.mean(values, 0) for values in zip(*clients, strict=True)]
    results = reference_work.rounds("floco", work)
    np.testing.assert_allclose(results["2/server/fc1.weight"], model[0], atol=1e-5)
    np.testing.assert_allclose(
        results["2/server/fc2.weight"], model[2].transpose(1, 2, 0), atol=1e-5
    )
    np.testing.assert_allclose(results["2/3/fc2.bias"], model[3].mean(0), atol=1e-5)


def test_initial_values_of_pefll_generate_the_models_of_clients():
    """A client's model, computed in NumPy with the arrays that other libraries get."""
    work = reference_work.work(False)
    added = reference_work.added_parameters("pefll", work)
    arrays = {name.removeprefix("added/"): np.float64(value) for name, value in added.items()}

    def linear(v, name):
        return v @ arrays[f"{name}.weight"].T + arrays.get(f"{name}.bias", 0)

    x, y = work["x"][2], work["y"][2]
    z = linear(x, "embedding.fc1") + linear(np.sqrt(10) * np.eye(10)[y], "embedding.labels")
    for name in ("fc2", "fc3"):
        z = linear(np.maximum(z, 0), f"embedding.{name}")
    v = linear(z.mean(0), "hypernetwork.layer1")
    for k in (2, 3, 4):
        v = linear(np.maximum(v, 0), f"hypernetwork.layer{k}")
    training = local_training.sgd(learning_rate=0.1, batch_size=30, epochs=EPOCHS)
    algorithm, initialised, data, _ = reference_work.make_method("pefll", work, training)
    state = initialised.init(jax.random.key(0))
    ctx = ClientContext(2, client_data(data, 2), 0, jax.random.key(0))
    served = jax.jit(algorithm.personalize)(state._replace(clients=()), state.clients, ctx)
    for name, value in reference_work.to_pytorch(served["params"]).items():
        generated = linear(v, f"hypernetwork.head_{name.replace('.', '_')}").reshape(value.shape)
        np.testing.assert_allclose(value, generated, atol=1e-5)


def test_recorded_differences_have_a_reason():
    """Every method in agreement.json was run, and every difference has a reason."""
    path = Path(__file__).parents[2] / "experiments" / "results" / "agreement.json"
    record = json.loads(path.read_text())
    for key, methods in record["methods"].items():
        for name, result in methods.items():
            assert result["verdict"] in ("same", "differs"), (key, name)
            assert result["verdict"] == "same" or len(result["why"]) > 40, (key, name)
            assert result.get("why", "") in ("", getattr(METHODS[name], key).why)
    assert sum(result["verdict"] == "same" for result in record["methods"]["pfllib"].values()) >= 10
