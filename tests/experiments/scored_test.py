"""Tests of accuracies compared with a library: the split, the table, and resuming from a file."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import agree
from experiments.libraries import scored
from experiments.libraries.methods import METHODS, Rival
from fedjax_pfl.core.errors import UsageError

RESULTS = Path(__file__).parents[2] / "experiments" / "results" / "accuracies.json"


def test_clients_share_no_examples():
    """A client has four classes, ten training examples of each; another seed splits differently."""
    with_norm, second_seed = scored.work(True, 0), scored.work(False, 1)
    images = np.concatenate([with_norm["x"], with_norm["test_x"]], 1).reshape(-1, 64)
    assert len(np.unique(images, axis=0)) == len(images) == 10 * 4 * 43
    for part, per_class in (("y", 10), ("test_y", 33)):
        for labels in with_norm[part]:
            counts = np.bincount(labels, minlength=10)
            assert sorted(counts) == [0] * 6 + [per_class] * 4
    assert (np.unique(with_norm["y"][3]) == np.unique(with_norm["test_y"][3])).all()
    assert not (with_norm["x"] == second_seed["x"]).all()
    assert set(with_norm) - set(second_seed) == {"start/bn1.weight", "start/bn1.bias"}


RECORD = {
    "rounds": 50, "seeds": 3, "commits": {"pfllib": "abc"},
    "library": {"fedavg": {"before": [0.8, 0.82, 0.84], "after": [0.9, 0.9, 0.93]},
             "ditto": {"before": [0.5, 0.5, 0.5], "after": [0.6, 0.6, 0.6]}},
    "rivals": {"pfllib": {"fedavg": {"before": [0.81, 0.83, 0.85], "after": [0.8, 0.8, 0.8]}}},
}  # fmt: skip


def test_asterisk_for_differences_beyond_the_deviations(monkeypatch):
    """Means are 0.82 and 0.83 with deviations of 0.02 before, 0.91 and 0.8 after."""
    rival_method = METHODS["fedavg"]._replace(pfllib=Rival({}, accuracy="it was tired"))
    monkeypatch.setitem(METHODS, "fedavg", rival_method)
    table = scored.table(RECORD)
    assert table.heads == ["before: ours", "before: PFLlib", "after: ours", "after: PFLlib"]
    rows = [row for row in table.rows if row[0] == "fedavg"]
    assert rows == [["fedavg", "82.0 ± 2.0", "83.0 ± 2.0", "91.0 ± 1.7", "80.0 ± 0.0 *"]]
    assert [row[2] for row in table.rows if row[0] == "ditto"] == [""]
    assert scored.reasons(RECORD) == ["fedavg in PFLlib, after: it was tired"]


def test_one_seed_is_refused():
    """One seed has no deviation to compare a difference with."""
    command = [sys.executable, "-m", "experiments.agree", "--rounds=2", "--seeds=1"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.splitlines()[-1] == "error: flag --seeds=1: 1 is not integer >= 2"


def test_methods_in_the_file_are_not_run_again(tmp_path, monkeypatch):
    out, measured = tmp_path / "scores.json", []
    out.write_text(json.dumps({**RECORD, "commits": {"pfllib": "unknown"}}))

    def rival_accuracies(side, names, seeds, rounds):
        for name in names:
            measured.append(name)
            yield name, RECORD["library"]["ditto"]

    monkeypatch.setattr(agree, "rival_accuracies", rival_accuracies)
    monkeypatch.setattr(scored, "rounds", lambda *_: pytest.fail("our scores exist"))
    side = agree.Side("pfllib", ["python"], str(tmp_path / "nothing"), 1.0)
    agree.accuracies([side], ["fedavg", "ditto"], 3, 50, str(out))
    assert measured == ["ditto"]
    assert set(json.loads(out.read_text())["rivals"]["pfllib"]) == {"fedavg", "ditto"}
    with pytest.raises(UsageError, match=r"scores.json has rounds 50, not 20; name another$"):
        agree.accuracies([side], ["fedavg"], 3, 20, str(out))


def test_recorded_asterisks_have_a_reason():
    """Every asterisk has a reason, and both libraries have three seeds of every method."""
    record = json.loads(RESULTS.read_text())
    assert (record["rounds"], record["seeds"]) == (50, 3)
    for side, methods in record["rivals"].items():
        for name, rival_scores in methods.items():
            for stages in (rival_scores, record["library"][name]):
                assert {len(stages[s]) for s in scored.STAGES} == {3}, (side, name)
    for name, side, stages in scored.asterisks(record):
        assert len(getattr(METHODS[name], side).accuracy) > 30, (name, side, stages)
