"""Agreement with a library: with a stand-in that is NumPy, written out, and speaks the protocol."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import agree
from experiments.libraries import ours, rivals
from experiments.libraries.methods import METHODS, Theirs

# FedAvg by NumPy; its `faster` is how much faster than the others the second client trains.
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
found = {}


def note(t):
    for where in ("server", *range(len(work["x"]))):
        found.update({f"{t}/{where}/{name}": value for name, value in w.items()})


def trained(w, x, y, rate):
    for _ in range(spec["epochs"]):
        h = np.maximum(x @ w["fc1.weight"].T + w["fc1.bias"], 0)
        logits = h @ w["fc2.weight"].T + w["fc2.bias"]
        p = np.exp(logits - logits.max(1, keepdims=True))
        by = (p / p.sum(1, keepdims=True) - np.eye(10)[y]) / len(y)
        back = (by @ w["fc2.weight"]) * (h > 0)
        grads = {"fc1.weight": back.T @ x, "fc1.bias": back.sum(0),
                 "fc2.weight": by.T @ h, "fc2.bias": by.sum(0)}
        w = {name: value - rate * grads[name] for name, value in w.items()}
    return w


note(0)
for t in range(spec["rounds"]):
    rates = spec["rate"] * np.array([1, spec["settings"].get("faster", 1), 1, 1])
    each = [trained(w, x, y, rate) for x, y, rate in zip(work["x"], work["y"], rates)]
    w = {name: np.mean([one[name] for one in each], 0) for name in w}
    note(t + 1)
np.savez(spec["out"], **found)
print(json.dumps({"seconds": 1.0}), flush=True)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    (tmp_path / "agree_pfllib.py").write_text(STAND_IN)
    monkeypatch.setattr(rivals, "ADAPTERS", tmp_path)
    side = agree.Side("pfllib", [sys.executable], str(tmp_path), 120.0)
    return lambda name: agree.compare_parameters(side, name)


@pytest.mark.slow("a program of ours; what a comparison makes of numbers is tested below")
def test_ours_is_fedavg_written_out_in_numpy(stand_in):
    same = stand_in("fedavg")
    assert same["verdict"] == "same"
    assert 0 < max(same["after all"].values()) < 1e-5


def test_what_is_the_same_and_what_is_not(stand_in, monkeypatch, tmp_path):
    """Beside the stand-in's own numbers, in the place of ours."""
    side = agree.Side("pfllib", [sys.executable], str(tmp_path), 120.0)
    more = {"rounds": ours.ROUNDS, "rate": ours.RATE}
    (mine,) = agree.rival_results(side, [agree.Run("fedavg", ours.work(False), more)])
    monkeypatch.setattr(ours, "rounds", lambda name, given: mine)
    other = METHODS["fedavg"]._replace(pfllib=Theirs({"faster": 1.01}, why="it hurries"))
    monkeypatch.setitem(METHODS, "fedavg", other)
    differs = stand_in("fedavg")
    assert (differs["verdict"], differs["why"]) == ("differs", "it hurries")
    assert 1e-4 < differs["after 1"]["server"] < 1e-2
    lacks = stand_in("ditto")
    assert lacks == {"verdict": "not run", "why": "its adapter does not run it"}
    found = {"pfllib": {"fedavg": differs, "ditto": lacks}}
    table = agree.table(found)
    assert [row[:2] for row in table.rows] == [["fedavg", "differs"], ["ditto", "not run"]]
    assert agree.reasons(found)[0] == "fedavg in PFLlib: it hurries"


def test_a_gap_by_hand():
    """Over names that both have: server moved by 4 and is 1 apart; of clients nothing is shared."""
    start = {"0/server/a": np.zeros(2), "0/server/b": np.zeros(1), "0/1/c": np.zeros(1)}
    theirs = {
        **start,
        "2/server/a": np.array([4.0, 0.0]),
        "2/server/b": np.ones(1),
        "2/1/c": np.ones(1),
    }
    gap = agree.gap({"2/server/a": np.array([4.0, 1.0])}, theirs, 2)
    assert gap == agree.Gap(0.25, None)
    assert gap.worst == 0.25
    assert agree.Gap(None, None).worst == float("inf")


def test_names_and_shapes_are_those_of_pytorch():
    work = ours.work(True)
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


def test_what_is_written_down_is_explained():
    """Of methods that are compared all that differ say why, and nothing has not been run."""
    path = Path(__file__).parents[2] / "experiments" / "results" / "agreement.json"
    whole = json.loads(path.read_text())
    for key, each in whole["methods"].items():
        for name, one in each.items():
            assert one["verdict"] in ("same", "differs"), (key, name)
            assert one["verdict"] == "same" or len(one["why"]) > 40, (key, name)
            assert one.get("why", "") in ("", getattr(METHODS[name], key).why)
    assert sum(one["verdict"] == "same" for one in whole["methods"]["pfllib"].values()) >= 10
