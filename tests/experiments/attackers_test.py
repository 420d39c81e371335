"""Tests of the measurements of attackers."""

import json
from types import SimpleNamespace

import numpy as np
from absl import flags

from experiments import attackers
from tests.commands import message


def test_the_weight_of_attackers_by_hand():
    """Client 2 attacks. The others give it 1 of 4, and 1 of 2 without their own weight."""
    weights = np.array([[9.0, 3, 1], [2, 0, 2], [5, 5, 0]])
    is_attacker = np.array([False, False, True])
    assert attackers.attackers_weight(weights, is_attacker) == (1 / 4 + 2 / 4) / 2
    layers = np.stack([weights - 1, weights + 1], 1)
    assert attackers.attackers_weight(layers, is_attacker) == (1 / 4 + 2 / 4) / 2
    alone = np.diag([1.0, 1, 1]) - np.eye(3)[[1, 0, 2]]  # negative weights count as 0
    assert attackers.attackers_weight(alone, is_attacker) == 0


def test_results_are_drawn_only_if_all_are_there(tmp_path, monkeypatch):
    path = tmp_path / "attackers-digits.json"
    record = json.loads((attackers.RESULTS / path.name).read_text())
    assert attackers.missing_runs(record) == []
    del record["FedPer"]["sign_flip"]["0.2"]
    assert attackers.missing_runs(record) == [("sign_flip", 0.2, "FedPer")]
    path.write_text(json.dumps(record))
    monkeypatch.setattr(attackers, "RESULTS", tmp_path)
    options = SimpleNamespace(draw=True, dataset="digits", data_dir=None)
    monkeypatch.setattr(flags, "FLAGS", options)
    line = message(attackers.main, ["script"])
    assert line == "attackers-digits.json lacks 1 of the results; leave out --draw"


def test_a_diverged_client_leaves_no_accuracy(monkeypatch):
    """The mean of the remaining clients would be another number."""
    scores = [{"accuracy_mean": 0.9, "accuracy_worst10": 0.8, "not_finite": n} for n in (0, 1)]
    results = {seed: SimpleNamespace(metrics=[{"before": s}]) for seed, s in enumerate(scores)}
    monkeypatch.setattr(attackers.runner, "run_all", lambda config: results)
    measured = attackers.measure({"dataset": "digits"}, "FedPer", "sign_flip", 0.2)
    np.testing.assert_allclose(measured["accuracy"], [0.9, np.nan], rtol=1e-12)
    np.testing.assert_allclose(measured["worst10"], [0.8, np.nan], rtol=1e-12)
