"""The arithmetic of the studies, and the published numbers that they print."""

import json

import numpy as np
import pytest

from experiments.studies import common, pfedla
from fedjax_pfl import config as configuration


def test_agreement_by_hand():
    overlap = np.array([[4, 3, 1], [3, 4, 2], [1, 2, 4]])
    ordered = np.array([[0.5, 0.3, 0.2], [0.3, 0.45, 0.25], [0.1, 0.2, 0.7]])
    correlation, own, weight = pfedla.agreement(ordered, overlap)
    # Off the diagonal: overlaps 3 1 3 2 1 2, weights .3 .2 .3 .25 .1 .2.
    ranks = np.array([5.5, 1.5, 5.5, 3.5, 1.5, 3.5]), np.array([5.5, 2.5, 5.5, 4, 1, 2.5])
    assert correlation == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert own == 1
    assert weight == pytest.approx(0.55)
    correlation, own, _ = pfedla.agreement(ordered[:, ::-1], overlap)
    assert own == pytest.approx(1 / 3)
    assert correlation < 0


def test_mean_and_deviation_over_seeds():
    assert common.mean_std([1.0, 3.0]) == {"mean": 2.0, "std": pytest.approx(2**0.5), "seeds": 2}
    assert common.mean_std([5.0])["std"] is None


def test_cells():
    assert pfedla._cell(None) == "-"
    assert pfedla._cell([59.44, 0.4]) == "59.44 ± 0.40"
    assert pfedla._cell({"mean": 1.0, "std": None, "seeds": 1}) == "1.00"
    assert pfedla._cell("not run") == "not run"


def test_published_tables_are_whole():
    """Ten rows; FedBN has no number where the network has no BatchNorm."""
    published = json.loads(pfedla.PUBLISHED.read_text())
    for table in ("table1", "table2"):
        rows = published[table]["rows"]
        assert len(rows) == 10
        for method, cells in rows.items():
            missing = {cell for cell, value in cells.items() if value is None}
            without = {f"{d}-n{n}" for d in ("emnist", "fashion_mnist") for n in (10, 100)}
            assert missing == (without if method == "fedbn" else set())
    assert published["table1"]["rows"]["pfedla"]["cifar10-n10"] == [61.43, 0.56]
    assert published["table2"]["rows"]["heurpfedla"]["cifar100-n100"] == [48.72, 1.75]


@pytest.mark.parametrize("table", ["table1", "table2"])
def test_every_cell_of_a_table_is_a_configuration(table):
    published = json.loads(pfedla.PUBLISHED.read_text())[table]
    for method in published["rows"]:
        for clients in (10, 100):
            config = pfedla.row(method, published["partition"], "cifar10", clients)
            if config.algorithm in configuration.ALGORITHMS:
                configuration.check(config)
    fedrep = pfedla.row("fedrep", published["partition"], "cifar10", 10)
    assert fedrep.local_epochs + fedrep.fedrep.head_epochs == 10
    pfedme = pfedla.row("pfedme", published["partition"], "cifar10", 100)
    assert (pfedme.local_epochs, pfedme.local_steps, pfedme.clients_per_round) == (None, 20, 10)
    heur = pfedla.row("heurpfedla", published["partition"], "cifar10", 10)
    assert (heur.algorithm, heur.pfedla.k) == ("pfedla", 1)
