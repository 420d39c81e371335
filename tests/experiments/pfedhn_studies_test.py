"""Studies of the pFedHN paper: means over seeds."""

from types import SimpleNamespace

import numpy as np
import pytest

from experiments.papers.pfedhn import studies as pfedhn
from tests.commands import message

pytestmark = pytest.mark.slow("runs of a study")


@pytest.fixture
def two_seeds(monkeypatch):
    """Replaces the runs of a study by two runs of 20 clients in five groups."""
    rng = np.random.default_rng(0)
    counts = np.repeat(np.eye(5, dtype=int), 4, 0)

    def run(seed):
        first = rng.normal(size=(20, 4))
        moves = [counts[:, :4], rng.normal(size=(20, 4))][seed]
        return SimpleNamespace(
            seed=seed,
            federation=SimpleNamespace(class_counts=counts),
            observations={
                "embeddings": ([0, 1], [first, first + moves]),
                "spread": ([0, 1], [np.zeros(2), np.array([seed, seed])]),
            },
        )

    results = [run(0), run(1)]
    flag = {"DATASET": "digits", "CLIENTS": 2, "ROUNDS": 5}
    for name, value in flag.items():
        monkeypatch.setattr(pfedhn, name, SimpleNamespace(value=value))
    monkeypatch.setattr(pfedhn.study, "runs", lambda config, name: results)
    monkeypatch.setattr(pfedhn, "_numbers", lambda results: {"runs": len(results)})
    return results


def test_accuracies_of_heads_on_bodies_are_means_over_seeds(two_seeds, monkeypatch):
    """The own body is best for both heads with seed 0, and for one of them with seed 1."""
    accuracies = [[[0.9, 0.1], [0.3, 0.7]], [[0.5, 0.7], [0.1, 0.3]]]
    monkeypatch.setattr(pfedhn, "_crossed", lambda result: np.array(accuracies[result.seed]))
    numbers, figure = pfedhn.figure3()
    np.testing.assert_allclose(numbers.pop("accuracy"), [[0.7, 0.4], [0.2, 0.5]])
    assert {name: value["mean"] for name, value in numbers.items()} == pytest.approx(
        {"own_body": 60, "other_bodies": 30, "spread_of_bodies": 0.5, "own_is_best_of_row": 0.75}
    )
    assert numbers["own_body"]["std"] == pytest.approx(800**0.5)  # of 80 and 40
    np.testing.assert_allclose(figure.axes[0].images[0].get_array(), [[1, 0], [0, 1]])


def test_groups_of_embeddings_are_compared_for_every_seed(two_seeds):
    by_seed = [pfedhn.clusters(result).measures for result in two_seeds]
    assert by_seed[0]["nearest_of_own_group_by_moves"] > by_seed[1]["nearest_of_own_group_by_moves"]
    numbers, figure = pfedhn.figure4()
    assert [numbers.pop(name) for name in ("runs", "clients", "groups")] == [2, 20, 5]
    assert set(numbers) == set(by_seed[0])
    for name, value in numbers.items():
        assert value["mean"] == pytest.approx(np.mean([m[name] for m in by_seed])), name
    assert "seed 0" in figure.get_suptitle()


@pytest.mark.parametrize("name", ["spectral", "figure3", "figure4", "figure5", "figure6", "fixed"])
def test_runs_of_other_numbers_of_clients_have_other_folders(name, two_seeds, monkeypatch):
    """On CIFAR-100, because figure 4 reads --clients there only."""

    class FirstRun(Exception):
        """Ends a study when its first run starts."""

    def runs(config, name):
        raise FirstRun(name)

    folders = []
    monkeypatch.setattr(pfedhn.study, "runs", runs)
    monkeypatch.setattr(pfedhn.study, "PAPER", SimpleNamespace(value=False))
    monkeypatch.setattr(pfedhn, "DATASET", SimpleNamespace(value="cifar100"))
    for clients in (30, 40):
        monkeypatch.setattr(pfedhn, "CLIENTS", SimpleNamespace(value=clients))
        with pytest.raises(FirstRun) as first:
            pfedhn.STUDIES[name]()
        folders.append(str(first.value))
    assert folders[0].replace("n30", "n40") == folders[1] != folders[0]


def test_clients_without_a_common_coarse_class_are_refused(two_seeds, monkeypatch):
    """Groups of one client each have no silhouette."""
    monkeypatch.setattr(pfedhn, "DATASET", SimpleNamespace(value="cifar100"))
    monkeypatch.setattr(pfedhn, "CLIENTS", SimpleNamespace(value=20))
    assert message(pfedhn.figure4).endswith("share none of the 20; give --clients=21 or more")
