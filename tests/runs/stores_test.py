"""Tests that runs do not depend on where examples and client-side state are stored."""

import csv

import jax
import numpy as np
import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import checkpoints, export, run_directory, runner
from fedjax_pfl.runs.interrupt import Stop, Stopped
from fedjax_pfl.simulation.stores import to_arrays
from tests.runs.common import BASE, at_step, kill, undisturbed, untimed

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

# The second phase starts from the heads and the model of the first.
CONFIG = {k: v for k, v in BASE.items() if k != "devices"} | {
    "algorithm": "fedper",
    "clients": 6,
    "clients_per_round": 3,
    "rounds": 4,
    "phases": ({"rounds": 2}, {"rounds": 2}),
}
SINGLE = CONFIG | {"phases": ()}


def assert_close(a, b):
    """Compares numbers to 1e-6, and everything else exactly."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if isinstance(x, str):
            assert x == y
        else:
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def assert_close_runs(result, expected):
    assert result.ledger == expected.ledger
    for a, b in ((result.state, expected.state), (result.best, expected.best)):
        assert_close(a and to_arrays(a), b and to_arrays(b))
    assert_close(untimed(result.metrics), untimed(expected.metrics))
    assert_close(result.clients, expected.clients)


def stop_after_a_call(config, directory):
    stop = Stop()
    stop.exit_status = 130
    with pytest.raises(Stopped):
        runner.run(config, directory, stop)


# pFedLA offloads rows of some clients, Factorized-FL rows of all clients.
FACTORIZED = {"algorithm": "factorized_fl", "factorized_fl": {"minimum": 2}}
METHODS = {
    "fedper": {},
    "pfedla": {"algorithm": "pfedla", "pfedla": {"candidates": 3}, "phases": ()},
    "factorized": FACTORIZED,
    "client-side heads": FACTORIZED | {"keep_head": True},  # rows stay on the device
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_run_resumes_with_another_store(method, tmp_path):
    """Runs a round each on the device, on the host, on three devices and on disk."""
    config = CONFIG | method
    for store in ({}, {"store": "host"}, {"store": "sharded"}):
        stop_after_a_call(config | store, tmp_path)
    result = runner.run(config | {"store": "disk"}, tmp_path)
    assert result.resumed_at == 3
    assert_close_runs(result, undisturbed(config))
    run_directory.write_json(tmp_path / "config.json", result.config)  # with store=disk
    written = tmp_path.stat().st_mtime_ns
    loaded = export.load_result(tmp_path)
    assert tmp_path.stat().st_mtime_ns == written
    for state in (result.state, result.best):
        states = (state, to_arrays(state))
        models = [list(export.personalize(loaded, form, 4, [1, 4])) for form in states]
        assert [i for i, _ in models[0]] == [1, 4]
        assert_close(*models)


def test_evaluation_of_some_clients(tmp_path):
    config = SINGLE | {"evaluate_clients": 2, "validation_fraction": 0.0}
    result = runner.run(config, tmp_path)
    assert_close_runs(result, runner.run(config | {"store": "host"}))
    ids = [row["client"] for row in result.clients if row["before_accuracy"] is not None]
    assert len(ids) == 2
    assert [line["before"]["clients"] for line in result.metrics] == [2, 2]
    assert sum(row["client_updates"] > 0 for row in result.clients) > 2
    with open(tmp_path / "clients.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["client"] for row in rows if row["test_examples"]] == [str(i) for i in ids]


def test_rows_of_an_earlier_store_are_removed(tmp_path):
    stop_after_a_call(SINGLE | {"store": "host"}, tmp_path)
    assert list((tmp_path / "rows").iterdir())
    runner.run(SINGLE, tmp_path)
    assert not list((tmp_path / "rows").iterdir())


def test_scores_belong_to_the_clients_of_the_last_evaluation(tmp_path):
    """The first phase evaluates two active clients, and the second one the held-out clients."""
    phases = ({"rounds": 2}, {"rounds": 2, "participants": "held_out", "clients_per_round": 1})
    config = CONFIG | {"evaluate_clients": 2, "held_out": 2, "phases": phases}
    ended = runner.run(config, tmp_path, on_evaluation=lambda line: False)
    assert [line["phase"] for line in ended.metrics] == [0]
    expected = runner.run(config | {"phases": ({"rounds": 2},), "rounds": 2})
    assert [row["before_accuracy"] for row in ended.clients] == [
        row["before_accuracy"] for row in expected.clients
    ]


def test_several_runs_need_the_device_store(tmp_path):
    with pytest.raises(UsageError, match="run them one by one"):
        runner.run_all(CONFIG | {"store": "host", "seeds": 2}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_killed_and_damaged_run_resumes(tmp_path, capsys):
    """Kills between the rows and the rest of a checkpoint, and damages the previous rows."""
    config = SINGLE | {"store": "host"}
    with kill(checkpoints.Store, "save", at_step(3)):
        runner.run(config, tmp_path)
    folder = tmp_path / "rows"
    assert {path.name for path in folder.iterdir()} == {"1.rows", "2.rows", "3.rows"}
    content = bytearray((folder / "2.rows").read_bytes())
    content[-1] ^= 1
    (folder / "2.rows").write_bytes(content)
    result = runner.run(config, tmp_path)
    assert result.resumed_at == 1
    assert "The checkpoint of round 2 is damaged: 2.rows is not what was" in capsys.readouterr().err
    assert_close_runs(result, undisturbed(SINGLE))
    store = checkpoints.open_store(tmp_path / "checkpoints", read_only=True)
    used = {file for step in store.steps() for file in store.facts(step)["rows"]["files"]}
    assert {path.name for path in folder.iterdir()} == used
    assert_close_runs(export.load_result(tmp_path), result)
    for path in folder.iterdir():
        path.write_bytes(b"")
    with pytest.raises(UsageError, match="is damaged"):
        export.load_result(tmp_path)
