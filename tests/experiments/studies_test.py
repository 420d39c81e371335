"""Studies of the papers: their arithmetic, settings and presets."""

from types import SimpleNamespace

import numpy as np
import pytest

from experiments import reproduce
from experiments.papers import study as common
from experiments.papers import table as tables
from experiments.papers.factorized_fl import gradient_distances
from experiments.papers.factorized_fl import studies as factorized_fl
from experiments.papers.fedmn import studies as fedmn
from experiments.papers.pfedhn import studies as pfedhn
from experiments.papers.pfedla import studies as pfedla
from experiments.reproduce import Options
from fedjax_pfl import data
from fedjax_pfl.presets import factorized_fl as factorized_presets
from fedjax_pfl.presets import pfedhn as pfedhn_presets
from fedjax_pfl.report import text_tables
from fedjax_pfl.settings import configuration
from tests.experiments.reproduce_test import page, write_run


def test_agreement_of_weights_and_overlap():
    overlap = np.array([[4, 3, 1], [3, 4, 2], [1, 2, 4]])
    ordered = np.array([[0.5, 0.3, 0.2], [0.3, 0.45, 0.25], [0.1, 0.2, 0.7]])
    correlation, top, weight = pfedla.agreement(ordered, overlap)
    # Off the diagonal: overlaps 3 1 3 2 1 2, weights .3 .2 .3 .25 .1 .2.
    ranks = np.array([5.5, 1.5, 5.5, 3.5, 1.5, 3.5]), np.array([5.5, 2.5, 5.5, 4, 1, 2.5])
    assert correlation == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert top == 1
    assert weight == pytest.approx(0.55)
    correlation, top, _ = pfedla.agreement(ordered[:, ::-1], overlap)
    assert top == pytest.approx(1 / 3)
    assert correlation < 0


def test_mean_and_deviation_over_seeds():
    assert common.mean_std([1.0, 3.0]) == {"mean": 2.0, "std": pytest.approx(2**0.5), "seeds": 2}
    assert common.mean_std([5.0])["std"] is None


def test_rows_are_normalised_to_0_and_1():
    rows = pfedhn.row_normalised(np.array([[1.0, 3.0, 2.0], [0.5, 0.5, 0.5]]))
    np.testing.assert_array_equal(rows, [[0, 1, 0.5], [1, 1, 1]])


def test_moves_of_embeddings_exclude_decay():
    first = np.array([[2.0, 0.0], [0.0, 1.0], [-2.0, 0.0]])
    moves = np.array([[0.0, 0.3], [0.5, 0.0], [0.0, 0.3]])  # orthogonal to `first`
    decayed = pfedhn.own_moves(np.stack([first, 0 * first, 0.8 * first + moves]))
    np.testing.assert_allclose(decayed, moves, atol=1e-12)
    np.testing.assert_allclose(pfedhn.own_moves(np.stack([first, 0.8 * first])), 0, atol=1e-12)


def test_the_control_of_factorized_fl_mixes_no_clients(monkeypatch):
    """Requires a tau above every cosine and a minimum of one candidate, the client itself."""
    monkeypatch.setattr(factorized_fl, "CLIENTS", SimpleNamespace(value=20))
    monkeypatch.setattr(factorized_fl, "DATASET", SimpleNamespace(value="mnist"))
    monkeypatch.setattr(factorized_fl, "SETTING", SimpleNamespace(value="permuted-noniid-w8"))
    monkeypatch.setattr(common, "PAPER", SimpleNamespace(value=True))
    monkeypatch.setattr(factorized_fl, "_compare", lambda study, variants: (variants, None))
    configs, _ = factorized_fl.components()
    assert len(configs) == 8
    control = configs["factorized, alone"].factorized_fl
    assert (control.tau > 1, control.minimum, control.matching) == (True, 1, "similar")
    assert (configs["beta"].factorized_fl.tau, configs["beta"].factorized_fl.minimum) == (0, 10)


def test_frequency_of_matches_excludes_the_last_mixture():
    weights = np.array([[[1, 0], [0.5, 0.5]], [[0.2, 0.8], [0.5, 0.5]], [[0.5, 0.5], [0, 1]]])
    np.testing.assert_array_equal(factorized_fl.frequency(weights), [[2, 1], [2, 2]])


def test_share_of_nearest_neighbours_in_the_same_group():
    points, group = np.array([[0.0], [1.0], [3.0], [3.5]]), np.array([0, 0, 0, 1])
    assert pfedhn.share_near_own_group(points, group) == 0.5  # the third is nearest to the fourth


def test_total_variation_to_the_nearest_trained_client():
    counts = np.array([[4, 0, 0], [0, 2, 0], [3, 0, 3]])
    distances = pfedhn.total_variation(counts, np.array([False, False, True]))
    np.testing.assert_allclose(distances, [0.5])


def test_novel_clients_fit_v_with_frozen_phi_and_baselines_are_fine_tuned(monkeypatch):
    configs = {}
    counts = np.eye(10, dtype=int)[np.arange(100) % 10]
    counts[90:] = 1  # a tenth of each class; trained clients have one class each
    active = np.arange(100) < 90
    clients = [{"before_accuracy": 0.5 + 0.3 * a, "after_accuracy": 0.9 - 0.2 * a} for a in active]

    def runs(config, name):
        configs[name] = config
        federation = SimpleNamespace(active=active, class_counts=counts)
        return [SimpleNamespace(clients=clients, federation=federation)]

    monkeypatch.setattr(pfedhn, "DATASET", SimpleNamespace(value="cifar10"))
    monkeypatch.setattr(pfedhn, "ROUNDS", SimpleNamespace(value=900))
    monkeypatch.setattr(common, "select_methods", lambda *_: ["pfedhn", "fedavg"])
    monkeypatch.setattr(common, "PAPER", SimpleNamespace(value=True))
    monkeypatch.setattr(pfedhn.study, "runs", runs)
    numbers, _ = pfedhn.novel()
    train, fit = configuration.phases(configs["novel0.5-pfedhn"])
    assert (train.participants, train.pfedhn.frozen, train.rounds) == ("active", False, 900)
    assert (fit.participants, fit.pfedhn.frozen, fit.rounds) == ("held_out", True, 100)
    assert (train.pfedhn.rate, fit.pfedhn.rate, fit.held_out) == (0.01, 1.0, 10)
    fedavg = [configs[f"novel{alpha}-fedavg"] for alpha in (0.1, 1)]
    assert [config.dirichlet_classes.novel_alpha for config in fedavg] == [0.1, 1.0]
    assert (fedavg[1].evaluate_after, len(configs)) == (True, 8)
    assert numbers["pfedhn"]["0.25"]["gap"]["mean"] == pytest.approx(-30)  # before fine-tuning
    assert numbers["fedavg"]["0.25"]["gap"]["mean"] == pytest.approx(20)  # after it
    assert numbers["pfedhn"]["0.25"]["total_variation"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("", {"clients": 10, "clients_per_round": 1, "rounds": 500, "model": "small"}),
        ("cifar10", {"clients": 50, "clients_per_round": 1, "rounds": 5000, "local_steps": 50}),
        ("cifar10-n100-k5", {"clients": 100, "clients_per_round": 5, "rounds": 1000}),
        ("cifar10-local", {"rounds": 40, "clients_per_round": None}),  # of 50 steps
        ("cifar10-fedavg", {"rounds": 5000, "clients_per_round": 5, "momentum": 0.9}),
        ("cifar10-pfedme", {"local_steps": 20, "momentum": 0.0, "learning_rate": 0.1}),
        ("cifar10-sizes", {"clients": 75}),
        ("omniglot-n8", {"partition": "natural", "clients": 8, "split": "pooled"}),
        ("steps100-fedper", {"rounds": 20, "partition": "shares"}),
    ],
)
def test_presets_of_pfedhn(preset, expected):
    config = pfedhn_presets.get_config(preset)
    assert {key: config[key] for key in expected} == expected
    assert (config.batch_size, config.clip_norm) == (64, 50.0)
    assert config.learning_rate == expected.get("learning_rate", 5e-3)


def test_nested_settings_of_presets_of_pfedhn():
    config = pfedhn_presets.get_config("cifar100-lg_fedavg-steps50")
    assert [dict(phase) for phase in config.phases] == [{"algorithm": "fedavg"}, {"rounds": 10}]
    assert config.shares.per_client == 10
    sizes = pfedhn_presets.get_config("sizes-cifar10")
    kernels = [group["lenet"]["kernels"] for group in sizes.groups]
    assert kernels == [(8, 16), (16, 32), (32, 64)]
    assert (pfedhn_presets.get_config("mnist").pfedhn.depth, sizes.pfedhn.depth) == (1, 3)
    assert (sizes.pfedhn.rate, sizes.pfedhn_pc.rate) == (1e-2, 5e-2)


def test_grouping_and_gradient_distances():
    truth = np.array([0, 0, 1, 1, 2, 2])
    blocks = np.where(truth[:, None] == truth, 0.9, 0.1) + 0.1 * np.eye(6)
    assert factorized_fl.grouping(blocks, truth) == 1
    assert factorized_fl.grouping(blocks, truth[[0, 2, 4, 1, 3, 5]]) < 0.1
    gradient = {"a": np.array([3.0, 0.0]), "b": np.array([0.0])}
    orthogonal = {"a": np.array([0.0, 0.1]), "b": np.array([0.0])}
    assert gradient_distances.distance(gradient, gradient) == 0
    assert gradient_distances.distance(gradient, orthogonal) == pytest.approx(2**0.5)


@pytest.mark.parametrize(("labels", "classes", "shift"), [("other", 5, 5), ("next", 10, 1)])
def test_contradicting_groups_have_the_same_images_with_other_labels(labels, classes, shift):
    dataset = fedmn.contradicting("digits", None, 30, labels)
    digits = data.load("digits")
    first = dataset.owner_train < 6
    np.testing.assert_array_equal(np.bincount(dataset.owner_train), [30] * 12)
    label_of = dict(zip(map(np.ndarray.tobytes, digits.x_train), digits.y_train, strict=True))
    true_labels = np.array([label_of[image.tobytes()] for image in dataset.x_train])
    assert set(true_labels[first]) == set(true_labels[~first]) == set(range(classes))
    expected = (true_labels + np.where(first, 0, shift)) % 10
    np.testing.assert_array_equal(dataset.y_train, expected)


@pytest.mark.parametrize(
    ("preset", "expected", "method_settings"),
    [
        ("permuted-noniid", {"clients": 10, "keep_head": False, "model": "small"}, {"minimum": 5}),
        ("cifar10-iid", {"clients": 20, "keep_head": False, "augment": True}, {"minimum": 20}),
        ("cifar10-permuted-noniid-alpha", {"permute_labels": True}, {"share": "u", "tau": 0.0}),
        (
            "cifar100-domains",
            {"rounds": 100, "zero_head": False},
            {"tau": 0.95, "minimum": 4, "scale": 20.0, "sparsity": 5e-4, "penalty": True},
        ),
        ("mnist-noniid-w16-fedavg", {"algorithm": "fedavg", "augment": False}, {}),
        ("permuted-noniid-fedavg", {"zero_head": False, "keep_head": True}, {}),
        (
            "permuted-noniid-factorized_fl_moved",
            {"zero_head": True, "keep_head": True},
            {"scale": 1.0},
        ),
        ("noniid-factorized_fl_moved-alpha", {"zero_head": False}, {"share": "u"}),
        ("domains-cifar100-factorized_fl_moved", {"zero_head": True}, {"scale": 5.0}),
    ],
)
def test_presets_of_factorized_fl(preset, expected, method_settings):
    config = factorized_presets.get_config(preset)
    configuration.specify(config)
    assert {key: config[key] for key in expected} == expected
    section = config[config.algorithm] if method_settings else {}
    assert {key: section[key] for key in method_settings} == method_settings
    assert config.resnet9.width == (16 if "w16" in preset else 64)


def test_a_mean_without_diverged_clients_is_no_accuracy():
    """Clients without finite outputs are left out of the recorded mean, or all of them are."""
    diverged = {"accuracy_mean": 0.9, "not_finite": 9}
    some = SimpleNamespace(metrics=[{"before": {"accuracy_mean": 0.5}}, {"before": diverged}])
    every = {"accuracy_mean": None, "accuracy_weighted": None, "not_finite": 10}
    all_ = SimpleNamespace(metrics=[{"before": every, "round": 2, "best_round": 2}])
    np.testing.assert_array_equal(tables.curve(some), [50, np.nan])
    for run in (some, all_):
        assert np.isnan(tables.accuracy(run))
        assert tables.plateau(run) == "diverged"
        assert np.isnan(tables.accuracy_over(lambda row, clients: True, "before")(run))
    assert np.isnan(tables.best(all_, "accuracy_weighted"))
    assert tables.cell(common.mean_std([50.0, tables.accuracy(some)])) == "-"


def test_a_plateau_compares_the_means_of_the_last_two_quarters():
    """Compares 60 with 60.4 after local training, and 50 with 51 before it."""
    curves = {
        "before": (0.2, 0.2, 0.3, 0.3, 0.5, 0.5, 0.5, 0.52),
        "after": (0.2, 0.2, 0.3, 0.3, 0.6, 0.6, 0.604, 0.604),
    }
    lines = [{k: {"accuracy_mean": v[i]} for k, v in curves.items()} for i in range(8)]
    run = SimpleNamespace(metrics=lines)
    assert (tables.plateau(run), tables.plateau(run, "after")) == ("not converged", "plateau")
    assert tables.plateau(SimpleNamespace(metrics=lines[:3])) == "too short to tell"


@pytest.mark.parametrize(
    ("table", "cell", "stage"),
    [
        ("factorized_fl/table1", "local/cifar10-iid", "after"),
        ("pfedla/table1", "local/cifar10-n10", "before"),
    ],
)
def test_the_plateau_is_of_the_curve_in_the_table(table, cell, stage, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "plateau", lambda run, when: f"{when} local training")
    monkeypatch.setattr(reproduce.data, "require_available", lambda name, data_dir=None: None)
    options = Options(table, "full", (cell,), 1)
    write_run(tmp_path / "a", cell, 0, 0.6, options)
    assert f" {stage} local training" in page(options, tmp_path)


def test_numbers_are_printed_as_tables():
    spread = {"mean": 0.5, "std": 0.25, "seeds": 2}
    numbers = {
        "alpha": 1.25,
        "long": list(range(9)),
        "fedavg": {"before": spread, "after": {"mean": 1.0, "std": None, "seeds": 1}},
        "local": {"before": spread, "after": None},
    }
    first, second = common.as_tables(numbers)
    assert first.heads == ["alpha", "long"]
    assert first.rows == [["all", "1.25", "9 values, in the file"]]
    assert second.heads == ["before", "after"]
    assert second.rows == [["fedavg", "0.5 ± 0.25", "1"], ["local", "0.5 ± 0.25", "–"]]
    (table,) = common.as_tables({"group": {f"n{i}": i for i in range(8)}})
    assert table.rows[3] == ["group / n3", "3"]
    # A group may be called "mean", like a mean over seeds.
    kinds = {"mean": {"same": 1.0, "other": 2.0}, "one": {"mean": 3.0, "std": 0.5}}
    text = text_tables.text(common.as_tables({"before": kinds}))
    assert "3 ± 0.5" in text
    assert "same" in text
