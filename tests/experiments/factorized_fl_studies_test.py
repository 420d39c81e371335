"""Studies of the Factorized-FL paper: means over seeds."""

from types import SimpleNamespace

import numpy as np
import pytest

from experiments.papers.factorized_fl import studies as factorized_fl


def test_cosines_of_clients_are_means_over_seeds(monkeypatch):
    """Two clients with cosines 0.2 and 0.6 in both evaluations; the picture shows seed 0."""

    def run(cosine):
        cosines = [np.array([[1.0, cosine], [cosine, 1.0]])] * 2
        weights = [np.full((2, 2), 0.5)] * 2
        observations = {name: ([1, 2], cosines) for name in ("u", "v")}
        return SimpleNamespace(observations={**observations, "weights": ([1, 2], weights)})

    flag = {"SETTING": "iid", "DATASET": "digits", "CLIENTS": 2, "ROUNDS": 2}
    for name, value in flag.items():
        monkeypatch.setattr(factorized_fl, name, SimpleNamespace(value=value))
    monkeypatch.setattr(factorized_fl, "runs", lambda settings, name: [run(0.2), run(0.6)])
    monkeypatch.setattr(factorized_fl, "numbers", lambda results: {})
    measured, figure = factorized_fl.similarity()
    assert measured["mean cosine of u"] == measured["mean cosine of v"] == pytest.approx([0.4, 0.4])
    np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), [[1, 0.2], [0.2, 1]])
    assert figure.get_suptitle().endswith("seed 0")
