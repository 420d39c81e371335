"""Studies of the FedMN paper: flags that they refuse."""

from types import SimpleNamespace

import pytest

from experiments.papers.fedmn import studies as fedmn
from tests.commands import message


def test_numbers_of_blocks_without_a_layout_are_refused(monkeypatch):
    """The paper names the layouts of eight blocks. Six numbers need more than five markers."""
    assert fedmn.layouts(8) == [(1, 2, 5), (1, 3, 4), (1, 4, 3), (1, 5, 2)]
    result = SimpleNamespace(
        metrics=[{"bytes_down": 4e6, "bytes_up": 4e6, "before": {"accuracy_mean": 0.5}}]
    )
    monkeypatch.setattr(fedmn, "DATASET", SimpleNamespace(value="digits"))
    monkeypatch.setattr(fedmn, "ROUNDS", SimpleNamespace(value=20))
    monkeypatch.setattr(fedmn.study, "runs", lambda config, name: [result])
    monkeypatch.setattr(fedmn.study, "value_of", lambda *_: ["5", "6", "7", "8", "9", "10"])
    assert {"FedAvg-5", "FedMN-1x2x2", "FedAvg-10"} < set(fedmn.figure2()[0])
    for text in ("4", "eight"):
        monkeypatch.setattr(fedmn.study, "value_of", lambda *_, text=text: [text])
        assert message(fedmn.figure2) == f"--blocks has {text!r}; give whole numbers from 5"


def test_groups_with_other_labels_need_classes(monkeypatch):
    for name, value in {"DATASET": "diabetes", "DATA_DIR": None}.items():
        monkeypatch.setattr(fedmn, name, SimpleNamespace(value=value))
    assert message(fedmn.conflict) == (
        "tables and studies show accuracy, and 'diabetes' has none: its targets are real numbers; "
        "choose a dataset with classes"
    )


def test_the_picture_of_routes_has_one_seed(monkeypatch):
    """The file would say that its numbers are of three seeds."""
    monkeypatch.setattr(fedmn, "SEEDS", SimpleNamespace(value=3))
    monkeypatch.setattr(fedmn, "run", lambda *_: pytest.fail("a run has started"))
    assert message(fedmn.paths) == "paths draws the routes of one run; leave --seeds=3 out"
