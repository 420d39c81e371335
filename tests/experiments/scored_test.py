"""Accuracies beside a library's: the split, what is apart, and going on from a file."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments import agree
from experiments.libraries import scored
from experiments.libraries.methods import METHODS, Theirs
from fedjax_pfl.core.errors import UsageError

RESULTS = Path(__file__).parents[2] / "experiments" / "results" / "accuracies.json"


def test_no_example_is_with_two():
    """Four classes each, ten of each to train on; another seed is another split."""
    one, other = scored.work(True, 0), scored.work(False, 1)
    images = np.concatenate([one["x"], one["test_x"]], 1).reshape(-1, 64)
    assert len(np.unique(images, axis=0)) == len(images) == 10 * 4 * 43
    for part, many in (("y", 10), ("test_y", 33)):
        for labels in one[part]:
            counts = np.bincount(labels, minlength=10)
            assert sorted(counts) == [0] * 6 + [many] * 4
    assert (np.unique(one["y"][3]) == np.unique(one["test_y"][3])).all()
    assert not (one["x"] == other["x"]).all()
    assert set(one) - set(other) == {"start/bn1.weight", "start/bn1.bias"}


FOUND = {
    "rounds": 50, "seeds": 3, "commits": {"pfllib": "abc"},
    "ours": {"fedavg": {"before": [0.8, 0.82, 0.84], "after": [0.9, 0.9, 0.93]},
             "ditto": {"before": [0.5, 0.5, 0.5], "after": [0.6, 0.6, 0.6]}},
    "theirs": {"pfllib": {"fedavg": {"before": [0.81, 0.83, 0.85], "after": [0.8, 0.8, 0.8]}}},
}  # fmt: skip


def test_what_is_apart_by_more_than_the_spread(monkeypatch):
    """Means .82 and .83 with deviations of .02; then .91 and .8."""
    theirs = METHODS["fedavg"]._replace(pfllib=Theirs({}, accuracy="it was tired"))
    monkeypatch.setitem(METHODS, "fedavg", theirs)
    table = scored.table(FOUND)
    assert table.heads == ["before: ours", "before: PFLlib", "after: ours", "after: PFLlib"]
    rows = [row for row in table.rows if row[0] == "fedavg"]
    assert rows == [["fedavg", "82.0 ± 2.0", "83.0 ± 2.0", "91.0 ± 1.7", "80.0 ± 0.0 *"]]
    assert [row[2] for row in table.rows if row[0] == "ditto"] == [""]
    assert scored.reasons(FOUND) == ["fedavg in PFLlib, after: it was tired"]


def test_goes_on_from_what_a_file_has(tmp_path, monkeypatch):
    out, asked = tmp_path / "found.json", []
    out.write_text(json.dumps({**FOUND, "commits": {"pfllib": "unknown"}}))

    def there(side, names, seeds, rounds):
        for name in names:
            asked.append(name)
            yield name, FOUND["ours"]["ditto"]

    monkeypatch.setattr(agree, "rival_accuracies", there)
    monkeypatch.setattr(scored, "rounds", lambda *_: pytest.fail("ours is there"))
    side = agree.Side("pfllib", ["python"], str(tmp_path / "nothing"), 1.0)
    agree.accuracies([side], ["fedavg", "ditto"], 3, 50, str(out))
    assert asked == ["ditto"]
    assert set(json.loads(out.read_text())["theirs"]["pfllib"]) == {"fedavg", "ditto"}
    with pytest.raises(UsageError, match=r"found.json has rounds 50, not 20; name another$"):
        agree.accuracies([side], ["fedavg"], 3, 20, str(out))


def test_what_is_written_down_is_explained():
    """A reason for each asterisk; three seeds of each; ours of all that are compared."""
    whole = json.loads(RESULTS.read_text())
    assert (whole["rounds"], whole["seeds"]) == (50, 3)
    for side, each in whole["theirs"].items():
        for name, one in each.items():
            for stages in (one, whole["ours"][name]):
                assert {len(stages[s]) for s in scored.STAGES} == {3}, (side, name)
    for name, side, stages in scored.asterisks(whole):
        assert len(getattr(METHODS[name], side).accuracy) > 30, (name, side, stages)
