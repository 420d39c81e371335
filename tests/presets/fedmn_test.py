"""Tests of FedMN's presets and published results."""

import jax
import numpy as np
import pytest

from experiments.papers.fedmn import studies
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
    config = fedmn.get_config(preset)
    configuration.specify(config)
    assert (config.algorithm, config.partition, config.clients) == ("fedmn", partition, clients)
    assert (config.model, config.fedmn.layout) == (model, layout)
    phases = configuration.phases(config)
    assert [p.algorithm for p in phases] == ["fedavg", "fedmn"]
    testbed = preset in fedmn.TESTBED
    assert [p.rounds for p in phases] == [145 if testbed else 50, 150]
    assert [p.learning_rate for p in phases] == ([0.07, 0.02] if testbed else [0.05, 0.05])
    assert {p.model for p in phases} == {model}
    assert config.test_fraction == 0.2
    assert not config.evaluate_after


def test_methods_have_the_settings_of_the_testbed():
    for name in fedmn.RATES:
        for column, dataset in enumerate(fedmn.TESTBED):
            config = fedmn.get_config(f"{dataset}-{name}")
            configuration.specify(config)
            assert (config.algorithm, config.phases, config.rounds) == (name, (), 200)
            assert config.learning_rate == fedmn.RATES[name][column]
            assert (config.batch_size, config.local_epochs) == (128, 1)
            assert (config.momentum, config.weight_decay, config.keep_optimizer) == (
                0.9,
                5e-4,
                True,
            )
            assert config.learning_rate_drops == (0.5, 0.75)
    assert fedmn.get_config("cifar10-fedprox").fedprox.mu == 1.0
    assert fedmn.get_config("femnist-pfedme").pfedme.penalty == 10.0
    config = fedmn.get_config("emnist_byclass")
    assert (config.fraction, config.clusters.clusters, config.clusters.alpha) == (0.1, 62, 0.4)


def test_words_change_a_preset():
    assert fedmn.get_config("plain").phases == ()
    assert fedmn.get_config("mnist-n5").clients == 5
    config = fedmn.get_config("digits-fedem-dirichlet0.4")
    assert (config.algorithm, config.partition, config.phases) == ("fedem", "dirichlet", ())
    config = fedmn.get_config("emnist_byclass-fedmn_correlation")
    assert config.algorithm == "fedmn_correlation"
    assert config.fedmn_correlation.layout == (3, 3, 3)
    assert [p.rounds for p in configuration.phases(config)] == [145, 150]


def test_the_published_table_is_complete():
    rows = PUBLISHED["table2"]["rows"]
    assert set(rows) == {*fedmn.RATES, "fedmn"} <= set(ALGORITHMS)
    assert all(list(cells) == list(fedmn.TESTBED) for cells in rows.values())


def test_layouts_and_groups_of_the_studies():
    assert studies.layouts(8) == [(1, 2, 5), (1, 3, 4), (1, 4, 3), (1, 5, 2)]
    true = np.array([0, 0, 1, 1, 2, 2])
    pi = np.repeat([[0.1, 0.2], [0.1, 0.3], [0.2, 0.2]], 2, 0)
    assert studies.grouped(pi, true) == pytest.approx(1)
    assert studies.grouped(pi, np.array([0, 1, 2, 0, 1, 2])) < 0.2
    gates = studies.served(np.array([[0.6, 0.1, 0.7], [0.2, 0.3, 0.4]]), (1, 1, 1))
    np.testing.assert_array_equal(gates, [[True] * 3, [True] * 3])  # one path remains


@pytest.mark.parametrize(
    ("model", "image", "layout", "encoder"),
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
def test_sizes_of_the_testbed(model, image, layout, encoder):
    """Checks encoders with 512 outputs and a router with 128 outputs."""
    federation = tiny.federated()[1]._replace(input_shape=image, outputs=62)
    algorithm = algorithms.fedmn(model, cases.training(), federation, layout=layout)
    server = jax.eval_shape(algorithm.init, jax.random.key(0)).server["params"]
    wide, count = (2049 if layout[0] == 3 else 1281), layout[0]
    expected = (
        count * (encoder + wide * 512)
        + count * (513 * 256 + 257 * 62)
        + encoder
        + wide * 128
        + 63 * 64
        + 193 * router.paths(layout)
    )
    assert trees.size(server) == expected
