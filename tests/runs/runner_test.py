"""Tests of the files and results of a run."""

import csv
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import client_data
from fedjax_pfl.data.federate import portions
from fedjax_pfl.runs import build, runner
from fedjax_pfl.runs.phase_inputs import next_boundary
from fedjax_pfl.settings import configuration
from tests.runs.common import (
    BASE,
    FILES,
    MODEL,
    assert_same_bits,
    assert_same_run,
    contents,
    other_lines,
    read_metrics,
    state_after,
)

STAGE_KEYS = {
    "accuracy_mean",
    "accuracy_weighted",
    "accuracy_std",
    "accuracy_variance",
    "accuracy_worst10",
    "loss",
    "clients",
    "not_finite",
}


def test_the_files_agree_with_the_result(finished):
    result, directory = finished
    assert {p.name for p in directory.iterdir()} == FILES
    figures = {p.name for p in (directory / "figures").iterdir()}
    assert "partition.png" in figures
    assert all(name.endswith(".png") for name in figures)
    assert "<html" in (directory / "report.html").read_text()
    assert len(list((directory / "checkpoints").iterdir())) == 2

    config = json.loads((directory / "config.json").read_text())
    assert config == result.config
    assert (config["clients"], config["mlp"]) == (3, {"hidden": [4]})

    lines = read_metrics(directory)
    assert lines == result.metrics
    assert [line["round"] for line in lines] == [2, 4, 6]
    stages = ("before", "after", "validation")
    keys = "round phase seconds evaluate_seconds compile_seconds checkpoint_seconds train_loss "
    keys += "bytes_down bytes_up dropped rejected best_round"
    for line in lines:
        assert set(line) == {*keys.split(), *stages}
        assert all(set(line[stage]) == STAGE_KEYS for stage in stages)

    last, traffic = lines[-1], json.loads((directory / "traffic.json").read_text())
    assert (traffic["total_down"], traffic["total_up"]) == (last["bytes_down"], last["bytes_up"])
    assert sum(traffic["down"].values()) == traffic["total_down"] == 2 * 6 * MODEL
    uploads = 2 * 6 - last["dropped"]
    assert sum(traffic["up"].values()) == traffic["total_up"] == uploads * MODEL

    with (directory / "clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["client"] for row in rows] == ["0", "1", "2"]
    assert [list(row) for row in rows] == [list(row) for row in result.clients]

    def numbers(key):
        return [float(row[key]) for row in rows]

    assert sum(numbers("bytes_down")) == last["bytes_down"]
    assert sum(numbers("bytes_up")) == last["bytes_up"]
    assert sum(numbers("dropped")) == last["dropped"] > 0
    assert sum(numbers("rejected")) == last["rejected"] == 0
    assert sum(numbers("client_updates")) == uploads
    assert np.mean(numbers("before_accuracy")) == pytest.approx(last["before"]["accuracy_mean"])
    assert np.mean(numbers("after_loss")) == pytest.approx(last["after"]["loss"])
    (best,) = [line for line in lines if line["round"] == last["best_round"]]
    for stage in ("before", "after"):
        mean = np.mean(numbers(f"best_{stage}_accuracy"))
        assert mean == pytest.approx(best[stage]["accuracy_mean"])
    assert [int(n) for n in numbers("train_examples")] == result.federation.counts.tolist()

    confusion = json.loads((directory / "confusion.json").read_text())
    test = portions(result.data, confusion["classes"]).test
    for stage in ("before", "after"):
        matrix = np.array(confusion[stage])
        np.testing.assert_array_equal(matrix.sum(1), test.sum(0))
        correct = np.dot(numbers(f"{stage}_accuracy"), numbers("test_examples"))
        assert np.trace(matrix) == pytest.approx(correct)


def test_a_finished_run_is_unchanged(finished):
    result, directory = finished
    files = contents(directory)
    repeated = runner.run(BASE, directory)
    assert repeated.resumed_at == repeated.metrics[-1]["round"] == 6
    assert contents(directory) == files
    assert_same_run(repeated, result)
    assert repeated.metrics == result.metrics  # including times


def test_a_run_without_a_directory_writes_nothing(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = runner.run(BASE)
    assert list(tmp_path.iterdir()) == []
    assert (result.directory, result.resumed_at) == (None, None)
    assert_same_run(result, finished[0])


@pytest.mark.slow("a run of its own")
def test_the_best_state_is_that_of_the_first_best_round(finished):
    result, _ = finished
    scores = {line["round"]: line["validation"]["accuracy_mean"] for line in result.metrics}
    best = [max((t for t in scores if t <= last), key=lambda t: (scores[t], -t)) for last in scores]
    assert [line["best_round"] for line in result.metrics] == best
    assert_same_bits(jax.device_get(state_after(result, best[-1])), result.best)


@pytest.mark.slow("a run of its own")
def test_validation_after_local_training():
    settings = {**BASE, "rounds": 1, "devices": 1, "evaluate_after": True}
    served, trained = (
        runner.run({**settings, "validate_after": value}).metrics[0] for value in (False, True)
    )
    assert served["validation"] != trained["validation"]
    for stage in ("before", "after"):
        assert served[stage] == trained[stage]


@pytest.mark.slow("a run of its own")
def test_a_run_with_rejected_updates_and_a_free_first_download(capsys):
    """Has no validation examples, and no evaluation after local training."""
    changes = {
        "max_update_norm": 1e-6,
        "evaluate_after": False,
        "count_initial_download": False,
        "validation_fraction": 0.0,
        "clients_per_round": None,
        "eval_every": 1,
        "rounds": 2,
        "dropout": 0.0,
    }
    result = runner.run({**BASE, **changes})
    for key in ("after", "validation", "best_round", "train_loss"):
        assert [line[key] for line in result.metrics] == [None, None]
    assert result.best is None
    assert [line["bytes_down"] for line in result.metrics] == [0, 3 * MODEL]
    assert [line["bytes_up"] for line in result.metrics] == [3 * MODEL, 6 * MODEL]
    assert result.ledger.client_down == [MODEL] * 3
    assert all(row["after_accuracy"] is None for row in result.clients)

    lines = other_lines(capsys.readouterr().err)
    assert len(lines) == 6
    assert lines[5] == (
        "round 2: the update of client 2 was rejected because it is not finite or too large"
    )
    assert [line["rejected"] for line in result.metrics] == [3, 6]
    assert result.ledger.rejected == [2, 2, 2]
    first = result.phases[0].rounds.init(jax.random.key(0))
    assert_same_bits(jax.device_get(result.state), jax.device_get(first))


@pytest.mark.slow("programs of two groups")
def test_two_groups_with_compressed_uploads(tmp_path):
    changes = {
        "groups": ({}, {"mlp": {"hidden": (2,)}}),
        "upload_bits": 8,
        "clients_per_round": None,
        "evaluate_after": False,
        "rounds": 2,
        "dropout": 0.0,
    }
    result = runner.run({**BASE, **changes}, tmp_path)
    wide, narrow = (16, 4, 12, 3), (8, 2, 6, 3)  # values per array
    down = [4 * sum(sizes) for sizes in (wide, narrow)]
    up = [sum(size + 4 for size in sizes) for sizes in (wide, narrow)]  # bytes and a scale
    assert [row["group"] for row in result.clients] == [0, 1, 0]
    assert result.ledger.client_down == [2 * down[0], 2 * down[1], 2 * down[0]]
    assert result.ledger.client_up == [2 * up[0], 2 * up[1], 2 * up[0]]
    shapes = [s["params"]["fc1"]["kernel"].shape for s in result.state.server]
    assert shapes == [(4, 4), (4, 2)]
    repeated = runner.run({**BASE, **changes}, tmp_path)
    assert repeated.resumed_at == 2
    assert_same_run(repeated, result, tmp_path)


def built(changes):
    return build.build(runner.configuration.complete({**BASE, **changes}))


def test_rounds_after_which_a_phase_is_evaluated_or_saved():
    """It begins in round 5; evaluations are every four rounds and checkpoints every three."""
    settings = {"rounds": 10, "eval_every": 4, "checkpoint_every": 3}
    for changes, expected in (
        ({}, [8, 9, 11, 13, 14, 15]),
        ({"checkpoint_every": None}, [9, 13, 15]),
    ):
        config, ends = configuration.complete({**settings, **changes}), [5]
        while ends[-1] < 15:
            ends.append(next_boundary(config, 5, ends[-1]))
        assert ends[1:] == expected


def test_confusion_matrices_need_classes_that_all_clients_number_alike():
    """Class 1 of one owner is another character than class 1 of the next, as in Omniglot."""
    inputs = built({}).phases[0].inputs
    clients, classes = inputs.federation.clients, inputs.federation.outputs
    for name, value in {
        "classes": np.ones((clients, classes), bool),
        "label_map": np.tile(np.arange(classes, dtype=np.int32), (clients, 1)),
    }.items():
        changed = dataclasses.replace(inputs, examples=[inputs.arrays._replace(**{name: value})])
        assert (inputs.count_confusion, changed.count_confusion) == (True, False)


def test_peers_belong_to_one_group():
    """Puts a single client into the second group."""
    groups = ({}, {"mlp": {"hidden": (2,)}})
    changes = {"algorithm": "fedfomo", "fedfomo": {"peers": 1}, "groups": groups}
    built({**changes, "clients": 4})
    with pytest.raises(UsageError, match="at least one other active client"):
        built(changes)


def test_the_learning_rate_drops_within_a_phase():
    """Measures one step in every round; drops are at half and three quarters of the phase."""
    changes = {
        "local_epochs": None,
        "local_steps": 1,
        "keep_optimizer": False,
        "phases": ({"rounds": 2}, {"rounds": 4, "learning_rate_drops": (0.5, 0.75)}),
    }
    experiment, key = built(changes), jax.random.key(0)
    phase = experiment.phases[1]
    server = phase.rounds.init(key).server
    client = jax.tree.map(jnp.asarray, client_data(experiment.data, 0))

    @jax.jit
    def step(t):
        upload, *_ = phase.algorithm.train(server, (), ClientContext(0, client, t, key))
        return trees.squared_norm(trees.change(server, upload))

    sizes = np.sqrt([float(step(jnp.int32(t))) for t in range(2, 7)])
    np.testing.assert_allclose(sizes / sizes[0], [1, 1, 0.1, 0.01, 0.01], rtol=1e-3)
