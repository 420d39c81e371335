"""FedMN's presets are the testbed's settings, and its published table is whole."""

import jax
import numpy as np
import pytest

from experiments.papers.fedmn import studies as studies
from experiments.papers.fedmn.tables import PUBLISHED
from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.fedmn import router
from fedjax_pfl.core import trees
from fedjax_pfl.networks import CNN, MobileNet
from fedjax_pfl.presets import fedmn
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.configuration import ALGORITHMS
from tests import cases, tiny


@pytest.mark.parametrize(
    ("preset", "partition", "clients", "model", "layout"),
    [
        ("", "clusters", 10, "small", (2, 2, 2)),
        ("mnist", "clusters", 20, "lenet", (2, 2, 2)),
        ("cifar10", "clusters", 80, "mobilenet", (2, 2, 2)),
        ("cifar100", "pachinko", 100, "mobilenet", (2, 2, 2)),
        ("emnist_byclass", "clusters", 100, "cnn", (3, 3, 3)),
        ("femnist", "natural", 539, "cnn", (3, 3, 3)),
    ],
)
def test_fedmn_on_each_dataset(preset, partition, clients, model, layout):
    made = fedmn.get_config(preset)
    configuration.specify(made)
    assert (made.algorithm, made.partition, made.clients) == ("fedmn", partition, clients)
    assert (made.model, made.fedmn.layout) == (model, layout)
    phases = configuration.phases(made)
    assert [p.algorithm for p in phases] == ["fedavg", "fedmn"]
    testbed = preset in fedmn.TESTBED
    assert [p.rounds for p in phases] == [145 if testbed else 50, 150]
    assert [p.learning_rate for p in phases] == ([0.07, 0.02] if testbed else [0.05, 0.05])
    assert {p.model for p in phases} == {model}
    assert made.test_fraction == 0.2
    assert not made.evaluate_after  # fine-tuned FedAvg is a column of its own


def test_methods_have_the_testbeds_settings():
    for name in fedmn.RATES:
        for column, dataset in enumerate(fedmn.TESTBED):
            made = fedmn.get_config(f"{dataset}-{name}")
            configuration.specify(made)
            assert (made.algorithm, made.phases, made.rounds) == (name, (), 200)
            assert made.learning_rate == fedmn.RATES[name][column]
            assert (made.batch_size, made.local_epochs) == (128, 1)
            assert (made.momentum, made.weight_decay, made.keep_optimizer) == (0.9, 5e-4, True)
            assert made.learning_rate_drops == (0.5, 0.75)
    assert fedmn.get_config("cifar10-fedprox").fedprox.mu == 1.0
    assert fedmn.get_config("femnist-pfedme").pfedme.penalty == 10.0
    made = fedmn.get_config("emnist_byclass")
    assert (made.fraction, made.clusters.clusters, made.clusters.alpha) == (0.1, 62, 0.4)


def test_words_change_a_preset():
    assert fedmn.get_config("plain").phases == ()
    assert fedmn.get_config("mnist-n5").clients == 5
    made = fedmn.get_config("digits-fedem-dirichlet0.4")
    assert (made.algorithm, made.partition, made.phases) == ("fedem", "dirichlet", ())
    made = fedmn.get_config("emnist_byclass-fedmn_correlation")
    assert made.algorithm == "fedmn_correlation"
    assert made.fedmn_correlation.layout == (3, 3, 3)
    assert [p.rounds for p in configuration.phases(made)] == [145, 150]


def test_the_published_table_is_whole():
    rows = PUBLISHED["table2"]["rows"]
    assert set(rows) == {*fedmn.RATES, "fedmn"} <= set(ALGORITHMS)
    assert all(list(cells) == list(fedmn.TESTBED) for cells in rows.values())
    best = {dataset: max(rows, key=lambda row: rows[row][dataset]) for dataset in fedmn.TESTBED}
    assert set(best.values()) == {"fedmn"}
    assert rows["fedmn"]["femnist"] == 82.2


def test_the_arithmetic_of_the_studies():
    """The layouts that the paper lists for 8 blocks, and how groups are compared."""
    assert studies.layouts(8) == [(1, 2, 5), (1, 3, 4), (1, 4, 3), (1, 5, 2)]
    true = np.array([0, 0, 1, 1, 2, 2])
    pi = np.repeat([[0.1, 0.2], [0.1, 0.3], [0.2, 0.2]], 2, 0)
    assert studies.grouped(pi, true) == pytest.approx(1)
    assert studies.grouped(pi, np.array([0, 1, 2, 0, 1, 2])) < 0.2
    opened = studies.served(np.array([[0.6, 0.1, 0.7], [0.2, 0.3, 0.4]]), (1, 1, 1))
    np.testing.assert_array_equal(opened, [[True] * 3, [True] * 3])  # one path is kept


@pytest.mark.parametrize(
    ("model", "image", "layout", "plain"),
    [
        (CNN(outputs=62), (28, 28, 1), (3, 3, 3), 2_278_334 - 2049 * 62),
        pytest.param(
            MobileNet(outputs=62),
            (32, 32, 3),
            (2, 2, 2),
            2_236_682 - 1281 * 10,
            marks=pytest.mark.slow("fifty layers to trace, three times"),
        ),
    ],
    ids=["cnn", "mobilenet"],
)
def test_sizes_of_the_testbed(model, image, layout, plain):
    """Encoders are the testbed's networks with 512 outputs, the router's has 128."""
    federation = tiny.federated()[1]._replace(input_shape=image, outputs=62)
    algorithm = algorithms.fedmn(
        model,
        cases.training(),
        federation,
        layout=layout,
    )
    server = jax.eval_shape(algorithm.init, jax.random.key(0)).server["params"]
    wide, count = (2049 if layout[0] == 3 else 1281), layout[0]
    wanted = (
        count * (plain + wide * 512)
        + count * (513 * 256 + 257 * 62)
        + plain
        + wide * 128
        + 63 * 64
        + 193 * router.paths(layout)
    )
    assert trees.size(server) == wanted
