"""Tests of the study of accuracy over epsilon."""

from types import SimpleNamespace

import pytest

import fedjax_pfl
from experiments.papers import study
from experiments.papers.methods import epsilon
from experiments.papers.table import accuracy
from fedjax_pfl.transforms.privacy.accounting import Sampling, noise_multiplier
from tests.commands import message


@pytest.fixture
def values(monkeypatch, tmp_path):
    """Sets the flags that the study reads: two rounds of the digits, FedPer, one seed."""
    monkeypatch.setattr(epsilon, "DATASET", SimpleNamespace(value="digits"))
    monkeypatch.setattr(epsilon, "ROUNDS", SimpleNamespace(value=2))
    monkeypatch.setattr(epsilon, "SEEDS", SimpleNamespace(value=1))
    monkeypatch.setattr(study, "select_methods", lambda methods: ["fedper"])
    flags = {"OUT": str(tmp_path), "SET": ["clients=6"], "DATA_DIR": None, "PAPER": False}
    for name, value in flags.items():
        monkeypatch.setattr(study, name, SimpleNamespace(value=value))
    return monkeypatch


def test_other_datasets_are_refused(values):
    values.setattr(epsilon, "DATASET", SimpleNamespace(value="iris"))
    assert message(epsilon.epsilon) == (
        "the study epsilon has no settings for 'iris'; use digits, mnist"
    )


@pytest.mark.slow("six programs; tuning and privacy have tests of their own")
def test_accuracy_over_epsilon(values):
    """The value without privacy equals the plain run; the noise multiplier is for all clients."""
    panel = epsilon.PANELS[0]
    for name, value in {"PANELS": [panel], "EPSILONS": [8.0], "CLIP_NORMS": [1.0]}.items():
        values.setattr(epsilon, name, value)
    values.setattr(epsilon, "GRID", [0.05, 0.2])
    numbers, figure = epsilon.epsilon()
    rows = numbers["client"]
    assert rows["noise multiplier"] == {"8": noise_multiplier(Sampling(6, 6), 8.0, 1e-3, 2)}
    curve = rows["fedper"]
    assert set(curve["accuracy"]) == {"8", "inf"}
    config = epsilon.configured(panel, "fedper")
    assert config.privacy == "none"
    _, _, rate = curve["settings without privacy"].partition("learning_rate=")
    config.update(seed=epsilon.FIRST_SEED, learning_rate=float(rate))
    plain = accuracy(fedjax_pfl.run(config))
    assert curve["accuracy"]["inf"]["mean"] == pytest.approx(plain)
    (axis,) = figure.axes
    assert axis.lines[0].get_ydata()[0] == rows["local"]["accuracy"]["any"]["mean"]
