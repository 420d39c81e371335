"""Tests `experiments.agree` with a stand-in library: FedAvg in NumPy."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import agree
from experiments.libraries import reference_work, rivals
from experiments.libraries.methods import METHODS, Rival

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
