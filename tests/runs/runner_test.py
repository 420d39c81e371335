"""What a run leaves behind, and the settings that the runner itself acts on."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import client_data
from fedjax_pfl.runs import build, runner
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


def test_the_directory_holds_the_files_of_the_design(finished):
    _, directory = finished
    assert {p.name for p in directory.iterdir()} == FILES
    figures = {p.name for p in (directory / "figures").iterdir()}
    assert "partition.png" in figures
    assert all(name.endswith(".png") for name in figures)
    assert "<html" in (directory / "report.html").read_text()
    assert len(list((directory / "checkpoints").iterdir())) == 2


def test_the_files_agree_with_each_other_and_the_result(finished):
    result, directory = finished
    config = json.loads((directory / "config.json").read_text())
    assert config == result.config
    assert (config["clients"], config["mlp"]) == (3, {"hidden": [4]})

    lines = read_metrics(directory)
    assert lines == result.metrics
    assert [line["round"] for line in lines] == [2, 4, 6]
    wanted = {
        "round",
        "phase",
        "seconds",
        "evaluate_seconds",
        "compile_seconds",
        "checkpoint_seconds",
        "train_loss",
        "before",
        "after",
        "validation",
        "bytes_down",
        "bytes_up",
        "dropped",
        "rejected",
        "best_round",
    }
    for line in lines:
        assert set(line) == wanted
        for stage in ("before", "after", "validation"):
            assert set(line[stage]) == {
                "accuracy_mean",
                "accuracy_weighted",
                "accuracy_std",
                "accuracy_variance",
                "accuracy_worst10",
                "loss",
                "clients",
                "not_finite",
            }

    last, traffic = lines[-1], json.loads((directory / "traffic.json").read_text())
    assert (traffic["total_down"], traffic["total_up"]) == (last["bytes_down"], last["bytes_up"])
    assert sum(traffic["down"].values()) == traffic["total_down"] == 2 * 6 * MODEL
    answers = 2 * 6 - last["dropped"]
    assert sum(traffic["up"].values()) == traffic["total_up"] == answers * MODEL

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
    assert sum(numbers("visits")) == answers
    assert np.mean(numbers("before_accuracy")) == pytest.approx(last["before"]["accuracy_mean"])
    assert np.mean(numbers("after_loss")) == pytest.approx(last["after"]["loss"])
    (best,) = [line for line in lines if line["round"] == last["best_round"]]
    for stage in ("before", "after"):
        of_clients = np.mean(numbers(f"best_{stage}_accuracy"))
        assert of_clients == pytest.approx(best[stage]["accuracy_mean"])
    assert [int(n) for n in numbers("train_examples")] == result.federation.counts.tolist()


def test_a_finished_run_says_so_and_is_left_as_it_is(finished):
    result, directory = finished
    before = contents(directory)
    again = runner.run(BASE, directory)
    assert again.resumed_at == again.metrics[-1]["round"] == 6
    assert contents(directory) == before
    assert_same_run(again, result)
    assert again.metrics == result.metrics  # not even the times change


def test_the_same_configuration_twice_gives_the_same(finished, tmp_path):
    result, _ = finished
    assert result.resumed_at is None
    assert_same_run(runner.run(BASE, tmp_path / "again"), result, tmp_path / "again")


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = runner.run(BASE)
    assert list(tmp_path.iterdir()) == []
    assert result.directory is None
    assert result.resumed_at is None
    assert len(result.metrics) == 3


@pytest.mark.slow("a run of its own")
def test_best_is_the_state_of_the_best_round(finished):
    result, _ = finished
    scores = {line["round"]: line["validation"]["accuracy_mean"] for line in result.metrics}
    best = result.metrics[-1]["best_round"]
    assert best == max(scores, key=lambda t: (scores[t], -t))  # the first of the best
    seen = [line["best_round"] for line in result.metrics]
    assert seen == [
        max((t for t in scores if t <= now), key=lambda t: (scores[t], -t)) for now in scores
    ]
    assert_same_bits(jax.device_get(state_after(result, best)), result.best)


# Settings that the runner itself acts on.


@pytest.mark.slow("a run of its own")
def test_a_best_round_by_the_model_after_local_training():
    changes = {**BASE, "rounds": 1, "devices": 1, "evaluate_after": True}
    served, trained = (
        runner.run({**changes, "validate_after": value}).metrics[0] for value in (False, True)
    )
    assert served["validation"] != trained["validation"]
    assert [served[key] for key in ("before", "after")] == [
        trained[key] for key in ("before", "after")
    ]


@pytest.mark.slow("a run of its own")
def test_neither_after_nor_the_first_download_and_every_update_rejected(capsys):
    """And nothing to validate on: no best."""
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
    assert [line["after"] for line in result.metrics] == [None, None]
    assert [line["validation"] for line in result.metrics] == [None, None]
    assert [line["best_round"] for line in result.metrics] == [None, None]
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
    assert [line["train_loss"] for line in result.metrics] == [None, None]
    first = result.phases[0].rounds.init(jax.random.key(0))
    assert_same_bits(jax.device_get(result.state), jax.device_get(first))


@pytest.mark.slow("programs of two groups")
def test_groups_of_two_widths_with_smaller_uploads(tmp_path):
    changes = {
        "groups": ({}, {"mlp": {"hidden": (2,)}}),
        "upload_bits": 8,
        "clients_per_round": None,
        "evaluate_after": False,
        "rounds": 2,
        "dropout": 0.0,
    }
    result = runner.run({**BASE, **changes}, tmp_path)
    wide, narrow = (16, 4, 12, 3), (8, 2, 6, 3)  # values of each array
    down = [4 * sum(sizes) for sizes in (wide, narrow)]
    up = [sum(size + 4 for size in sizes) for sizes in (wide, narrow)]  # a byte each and a scale
    assert [row["group"] for row in result.clients] == [0, 1, 0]
    assert result.ledger.client_down == [2 * down[0], 2 * down[1], 2 * down[0]]
    assert result.ledger.client_up == [2 * up[0], 2 * up[1], 2 * up[0]]
    shapes = [s["params"]["fc1"]["kernel"].shape for s in result.state.server]
    assert shapes == [(4, 4), (4, 2)]
    again = runner.run({**BASE, **changes}, tmp_path)
    assert again.resumed_at == 2
    assert_same_run(again, result, tmp_path)


def test_a_group_mixes_only_what_its_own_clients_store():
    """Of three clients in two groups, the second has no peer of its architecture."""
    changes = {"algorithm": "fedfomo", "fedfomo": {"peers": 1}, "validation_fraction": 0.2}
    _built_for({**changes, "clients": 4, "groups": ({}, {"mlp": {"hidden": (2,)}})})
    with pytest.raises(UsageError, match="at least one other active client"):
        _built_for({**changes, "groups": ({}, {"mlp": {"hidden": (2,)}})})


def _built_for(changes):
    return build.build(runner.configuration.complete({**BASE, **changes}))


@pytest.mark.slow("runs on several devices")
def test_chunks_of_clients_and_devices_do_not_matter(finished):
    """One client at a time on each of two devices; and the cohort at once on one."""
    together = state_after(_built_for({"chunk": 4, "devices": 1}), 1)
    apart = state_after(finished[0], 1)
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_learning_rate_drops_at_its_rounds():
    """After half and three quarters of a phase, counted from its first round: one step's size."""
    changes = {
        "local_epochs": None,
        "local_steps": 1,
        "keep_optimizer": False,
        "phases": ({"rounds": 2}, {"rounds": 4, "learning_rate_drops": (0.5, 0.75)}),
    }
    phase, data = (made := _built_for(changes)).phases[1], made.data
    key = jax.random.key(0)
    server = phase.rounds.init(key).server
    client = jax.tree.map(jnp.asarray, client_data(data, 0))

    @jax.jit
    def step(t):
        upload, *_ = phase.algorithm.train(server, (), ClientContext(0, client, t, key))
        return trees.squared_norm(trees.change(server, upload))

    sizes = np.sqrt([float(step(jnp.int32(t))) for t in range(2, 7)])
    np.testing.assert_allclose(sizes / sizes[0], [1, 1, 0.1, 0.01, 0.01], rtol=1e-3)
