"""The arithmetic of the studies, and the presets of their systems."""

import copy
import re
from types import SimpleNamespace

import numpy as np
import pytest
from absl import flags

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
from fedjax_pfl.presets import pfedhn as presets
from fedjax_pfl.report import text_tables
from fedjax_pfl.settings import configuration
from tests.commands import message
from tests.experiments.reproduce_test import shown, there

FLAGS = (common.ROUNDS, common.DATASET, common.CLIENTS, common.SEEDS)


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


@pytest.mark.parametrize("system", [pfedla, pfedhn, fedmn, factorized_fl], ids=lambda s: s.__name__)
def test_without_a_name_all_studies_are_listed(system, capsys):
    common.main(system.STUDIES, system.__doc__, ["x"], "pfedla", system.LENGTHS)
    said = capsys.readouterr().out
    for name in system.STUDIES:
        assert re.search(rf"^(\w+, )*{name}\b[\w, ]* \S", said, re.M), name


def test_an_unknown_study_gets_the_nearest():
    given = "pfedla", pfedla.LENGTHS
    line = message(common.main, pfedla.STUDIES, "", ["x", "figure66"], *given)
    assert line == "there is no study 'figure66'; did you mean figure6?"
    line = message(common.main, pfedla.STUDIES, "", ["x", "figure6", "digits"], *given)
    assert line == "name one study; 'digits' is one word too many"


def test_mean_and_deviation_over_seeds():
    assert common.mean_std([1.0, 3.0]) == {"mean": 2.0, "std": pytest.approx(2**0.5), "seeds": 2}
    assert common.mean_std([5.0])["std"] is None


def test_rows_are_normalised():
    got = pfedhn.row_normalised(np.array([[1.0, 3.0, 2.0], [0.5, 0.5, 0.5]]))
    np.testing.assert_array_equal(got, [[0, 1, 0.5], [1, 1, 1]])


def test_what_embeddings_learned_is_apart_from_decay():
    first = np.array([[2.0, 0.0], [0.0, 1.0], [-2.0, 0.0]])
    moves = np.array([[0.0, 0.3], [0.5, 0.0], [0.0, 0.3]])  # orthogonal to where they came from
    got = pfedhn.own_moves(np.stack([first, 0 * first, 0.8 * first + moves]))
    np.testing.assert_allclose(got, moves, atol=1e-12)
    np.testing.assert_allclose(pfedhn.own_moves(np.stack([first, 0.8 * first])), 0, atol=1e-12)


def test_the_control_of_factorized_fl_mixes_with_nobody(monkeypatch):
    """With one candidate at least and a τ that no cosine reaches, a client is its own only one."""
    monkeypatch.setattr(factorized_fl, "CLIENTS", SimpleNamespace(value=20))
    monkeypatch.setattr(factorized_fl, "DATASET", SimpleNamespace(value="mnist"))
    monkeypatch.setattr(factorized_fl, "SETTING", SimpleNamespace(value="permuted-noniid-w8"))
    monkeypatch.setattr(common, "PAPER", SimpleNamespace(value=True))
    monkeypatch.setattr(factorized_fl, "_compare", lambda study, variants: (variants, None))
    made, _ = factorized_fl.components()
    assert len(made) == 8
    alone = made["factorized, alone"].factorized_fl
    assert (alone.tau > 1, alone.minimum, alone.matching) == (True, 1, "similar")
    assert (made["beta"].factorized_fl.tau, made["beta"].factorized_fl.minimum) == (0, 10)


def test_how_often_clients_are_matched_by_hand():
    """The last mixture is not counted: no round downloads it."""
    weights = np.array([[[1, 0], [0.5, 0.5]], [[0.2, 0.8], [0.5, 0.5]], [[0.5, 0.5], [0, 1]]])
    np.testing.assert_array_equal(factorized_fl.frequency(weights), [[2, 1], [2, 2]])


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("single", [], ("cifar10", "iid", 20, 20)),
        ("figure6", [], ("cifar10", "permuted-noniid", 20, 50)),
        ("figure6", ["--setting=domains", "--dataset=cifar100"], ("cifar100", "domains", 20, 100)),
        ("similarity", [], ("cifar100", "domains", 20, 100)),
        ("architectures", ["--rounds=7", "--clients=8"], ("cifar100", "domains", 8, 7)),
    ],
)
def test_paper_sets_data_clients_and_rounds(name, given, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(flags, "FLAGS", copy.deepcopy(flags.FLAGS))
    used = {
        "dataset": common.DATASET,
        "setting": factorized_fl.SETTING,
        "clients": common.CLIENTS,
        "rounds": common.ROUNDS,
    }
    for flag in (
        *used.values(),
        common.PAPER,
        common.OUT,
        common.METHODS,
        common.SEEDS,
        common.SET,
    ):
        monkeypatch.setattr(flag, "_flagvalues", flags.FLAGS)
    seen = []

    def study():
        seen.append(tuple(flag.value for flag in used.values()))
        return {"x": 1.0}, None

    flags.FLAGS(["x", "--paper", f"--out={tmp_path}", *given])
    studies = {name: factorized_fl.as_published(name, study)}
    common.main(studies, "", ["x", name], "factorized_fl", factorized_fl.LENGTHS)
    assert seen == [wanted]


def test_nearest_neighbours_by_hand():
    points, group = np.array([[0.0], [1.0], [3.0], [3.5]]), np.array([0, 0, 0, 1])
    assert pfedhn.share_near_own_group(points, group) == 0.5  # the third is nearest to the fourth


def test_total_variation_by_hand():
    """The last client is half like the first, and nothing like the second."""
    counts = np.array([[4, 0, 0], [0, 2, 0], [3, 0, 3]])
    got = pfedhn.total_variation(counts, np.array([False, False, True]))
    np.testing.assert_allclose(got, [0.5])


def test_new_clients_fit_v_alone_and_baselines_are_fine_tuned(monkeypatch):
    """Ninety clients train and ten come later, who are visited as often, with φ frozen."""
    seen = {}
    counts = np.eye(10, dtype=int)[np.arange(100) % 10]
    counts[90:] = 1  # a tenth of each class: nine tenths of them no trained client has
    active = np.arange(100) < 90
    clients = [{"before_accuracy": 0.5 + 0.3 * a, "after_accuracy": 0.9 - 0.2 * a} for a in active]

    def runs(made, name):
        seen[name] = made
        there = SimpleNamespace(active=active, class_counts=counts)
        return [SimpleNamespace(clients=clients, federation=there)]

    monkeypatch.setattr(pfedhn, "DATASET", SimpleNamespace(value="cifar10"))
    monkeypatch.setattr(pfedhn, "ROUNDS", SimpleNamespace(value=900))
    asked = ["pfedhn", "fedavg"]
    monkeypatch.setattr(common, "METHODS", SimpleNamespace(value=asked))
    monkeypatch.setattr(common, "PAPER", SimpleNamespace(value=True))
    monkeypatch.setattr(pfedhn.study, "runs", runs)
    found, _ = pfedhn.novel()
    train, fit = configuration.phases(seen["novel0.5-pfedhn"])
    assert (train.participants, train.pfedhn.frozen, train.rounds) == ("active", False, 900)
    assert (fit.participants, fit.pfedhn.frozen, fit.rounds) == ("held_out", True, 100)
    assert (train.pfedhn.rate, fit.pfedhn.rate) == (0.01, 1.0)
    assert fit.held_out == 10
    assert [seen[f"novel{a}-fedavg"].dirichlet_classes.novel_alpha for a in (0.1, 1)] == [0.1, 1.0]
    assert (seen["novel1-fedavg"].evaluate_after, len(seen)) == (True, 8)
    row = found["pfedhn"]["0.25"]  # as served; fine-tuned
    assert row["gap"]["mean"] == pytest.approx(-30)
    assert found["fedavg"]["0.25"]["gap"]["mean"] == pytest.approx(20)
    assert row["total_variation"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("preset", "wanted"),
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
def test_presets_of_pfedhn(preset, wanted):
    made = presets.get_config(preset)
    assert {key: made[key] for key in wanted} == wanted
    assert (made.batch_size, made.clip_norm) == (64, 50.0)
    assert made.learning_rate == wanted.get("learning_rate", 5e-3)


def test_presets_of_pfedhn_in_parts():
    made = presets.get_config("cifar100-lg_fedavg-steps50")
    assert [dict(phase) for phase in made.phases] == [{"algorithm": "fedavg"}, {"rounds": 10}]
    assert made.shares.per_client == 10
    sizes = presets.get_config("sizes-cifar10")
    kernels = [group["lenet"]["kernels"] for group in sizes.groups]
    assert kernels == [(8, 16), (16, 32), (32, 64)]
    assert (presets.get_config("mnist").pfedhn.depth, sizes.pfedhn.depth) == (1, 3)
    assert (sizes.pfedhn.rate, sizes.pfedhn_pc.rate) == (1e-2, 5e-2)


def test_grouping_finds_blocks_and_distance_knows_directions():
    truth = np.array([0, 0, 1, 1, 2, 2])
    blocks = np.where(truth[:, None] == truth, 0.9, 0.1) + 0.1 * np.eye(6)
    assert factorized_fl.grouping(blocks, truth) == 1
    assert factorized_fl.grouping(blocks, truth[[0, 2, 4, 1, 3, 5]]) < 0.1
    one = {"a": np.array([3.0, 0.0]), "b": np.array([0.0])}
    across = {"a": np.array([0.0, 0.1]), "b": np.array([0.0])}
    assert gradient_distances.distance(one, one) == 0
    assert gradient_distances.distance(one, across) == pytest.approx(2**0.5)


@pytest.mark.parametrize(("labels", "classes", "shift"), [("other", 5, 5), ("next", 10, 1)])
def test_contradicting_groups_see_the_same_classes_under_other_numbers(
    labels: str, classes: int, shift: int
):
    made = fedmn.contradicting("digits", None, 30, labels)
    digits = data.load("digits")
    first = made.owner_train < 6
    np.testing.assert_array_equal(np.bincount(made.owner_train), [30] * 12)
    known = {
        image.tobytes(): label for image, label in zip(digits.x_train, digits.y_train, strict=True)
    }
    seen = np.array([known[image.tobytes()] for image in made.x_train])
    assert set(seen[first]) == set(seen[~first]) == set(range(classes))
    np.testing.assert_array_equal(made.y_train, (seen + np.where(first, 0, shift)) % 10)


@pytest.mark.parametrize(
    ("preset", "wanted", "own"),
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
def test_presets_of_factorized_fl(preset, wanted, own):
    made = factorized_presets.get_config(preset)
    configuration.specify(made)
    assert {key: made[key] for key in wanted} == wanted
    section = made[made.algorithm] if own else {}
    assert {key: section[key] for key in own} == own
    assert made.resnet9.width == (16 if "w16" in preset else 64)


# Curves.


def test_a_plateau_by_hand():
    """Quarters of two evaluations: 60 and 60.4 after local training, 50 and 51 before it."""
    last = {
        "before": (0.2, 0.2, 0.3, 0.3, 0.5, 0.5, 0.5, 0.52),
        "after": (0.2, 0.2, 0.3, 0.3, 0.6, 0.6, 0.604, 0.604),
    }
    lines = [{k: {"accuracy_mean": v[i]} for k, v in last.items()} for i in range(8)]

    def judged(lines, *when):
        return tables.plateau(SimpleNamespace(metrics=lines), *when)

    assert (judged(lines), judged(lines, "after")) == ("not converged", "plateau")
    assert judged(lines[:3]) == "too short to tell"


@pytest.mark.parametrize(
    ("table", "cell", "when"),
    [
        ("factorized_fl/table1", "local/cifar10-iid", "after"),
        ("pfedla/table1", "local/cifar10-n10", "before"),
    ],
)
def test_the_curve_that_is_judged_is_that_of_the_number(table, cell, when, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "plateau", lambda run, when: f"{when} local training")
    monkeypatch.setattr(reproduce.data, "require_available", lambda name, data_dir=None: None)
    options = Options(table, "full", (cell,), 1)
    there(tmp_path / "a", cell, 0, 0.6, options)
    assert f" {when} local training" in shown(options, tmp_path)


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
    many = {f"n{i}": i for i in range(8)}
    (table,) = common.as_tables({"group": many})
    assert table.rows[3] == ["group / n3", "3"]


def test_by_default_a_study_runs_on_what_is_embedded():
    assert common.DATASET.default == "digits"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], (20, "digits", 10, 1, ["beta"])),
        (["--paper"], (50, "cifar10", 75, 3, ["beta", "alpha"])),
        (["--paper", "--dataset=mnist", "--seeds=2"], (50, "mnist", 75, 2, ["beta", "alpha"])),
        (["--rounds=3"], (3, "digits", 10, 1, ["beta"])),
    ],
)
def test_a_study_is_short_unless_the_papers_settings_are_asked_for(
    given, wanted, tmp_path, capsys, monkeypatch
):
    seen = []

    def drawn():
        flag_values = [flag.value for flag in FLAGS]
        seen.append((*flag_values, common.select_methods(["beta", "alpha"], ["beta"])))
        return {"accuracy": 97.25}, None

    monkeypatch.setattr(flags, "FLAGS", copy.deepcopy(flags.FLAGS))
    for name in ("rounds", "paper", "methods", "out", "seeds", "set", "dataset", "clients"):
        flag = getattr(common, name.upper())
        monkeypatch.setattr(flag, "_flagvalues", flags.FLAGS)
    flags.FLAGS(["x", f"--out={tmp_path}", *given])
    length = common.Length(20, 50, "cifar10", 75, 3)
    common.main({"drawn": drawn}, "", ["x", "drawn"], "pfedla", {"": length})
    assert seen == [wanted]
    assert "97.25" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("spectral", ("cifar10", 50)),
        ("novel", ("cifar10", 100)),
        ("figure3", ("cifar10", 10)),
        ("figure4", ("cifar100", 100)),
        ("figure5", ("cifar10", 50)),
        ("figure6", ("cifar10", 50)),
        ("fixed", ("cifar10", 50)),
    ],
)
def test_the_paper_of_pfedhn_sets_dataset_and_clients(name, wanted):
    length = pfedhn.LENGTHS.get(name, pfedhn.LENGTHS[""])
    assert (length.dataset, length.clients) == wanted
    assert (length.paper, length.seeds) == (5000, 3)


def test_a_group_may_be_called_mean():
    """As in Factorized-FL's `distance`, where it holds numbers of several kinds of clients."""
    kinds = {"mean": {"same": 1.0, "other": 2.0}, "one": {"mean": 3.0, "std": 0.5}}
    text = text_tables.text(common.as_tables({"before": kinds}))
    assert "3 ± 0.5" in text
    assert "same" in text
