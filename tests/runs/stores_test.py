"""A run is the same wherever examples and what stays with clients are kept."""

import csv

import jax
import numpy as np
import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import checkpoints, export, runner
from fedjax_pfl.runs.interrupt import Stop, Stopped
from fedjax_pfl.simulation.stores import to_arrays
from tests.runs.common import BASE, undisturbed, untimed

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

# The second phase begins with the heads and the model of the first.
CONFIG = {k: v for k, v in BASE.items() if k != "devices"} | {
    "algorithm": "fedper",
    "clients": 6,
    "clients_per_round": 3,
    "rounds": 4,
    "phases": ({"rounds": 2}, {"rounds": 2}),
}


class Killed(BaseException):
    """Nothing is done any more."""


def assert_close(got, wanted):
    """Numbers to 1e-6, and everything else the same."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        if isinstance(one, str):
            assert one == other
        else:
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def assert_same(got, wanted):
    assert got.ledger == wanted.ledger
    for one, other in ((got.state, wanted.state), (got.best, wanted.best)):
        assert_close(one and to_arrays(one), other and to_arrays(other))
    assert_close(untimed(got.metrics), untimed(wanted.metrics))
    assert_close(got.clients, wanted.clients)


def stopped(config, directory):
    """Until its first call has been saved."""
    stop = Stop()
    stop.exit_status = 130
    with pytest.raises(Stopped):
        runner.run(config, directory, stop)


# Rows that lie elsewhere, too; of pFedLA of a few others, and of Factorized-FL of all.
PFEDLA = {"algorithm": "pfedla", "pfedla": {"candidates": 3}, "phases": ()}
FACTORIZED = {"algorithm": "factorized_fl", "factorized_fl": {"minimum": 2}}
METHODS = {  # with heads that stay with clients, rows are on the device
    "fedper": {},
    "pfedla": PFEDLA,
    "factorized": FACTORIZED,
    "own heads": FACTORIZED | {"keep_head": True},
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_run_goes_on_with_another_store(method, tmp_path):
    """Of four rounds one on the device, one on the host, one on three devices, one on disk."""
    config = CONFIG | method
    stopped(config, tmp_path)
    stopped(config | {"store": "host"}, tmp_path)
    stopped(config | {"store": "sharded"}, tmp_path)
    got = runner.run(config | {"store": "disk"}, tmp_path)
    assert got.resumed_at == 3
    wanted = undisturbed(config)
    assert_same(got, wanted)
    whole = export.load_result(tmp_path)
    for state in (got.state, got.best):
        parts = (export.personalize(whole, one, 4, [1, 4]) for one in (state, to_arrays(state)))
        for (i, one), (j, other) in zip(*parts, strict=True):
            assert i == j
            assert_close(one, other)


def test_some_clients_are_evaluated_and_all_are_trained(tmp_path):
    config = CONFIG | {"evaluate_clients": 2, "validation_fraction": 0.0, "phases": (), "rounds": 4}
    one, other = (
        runner.run(config | {"store": store}, tmp_path / store) for store in ("device", "host")
    )
    assert_same(one, other)
    seen = [row["client"] for row in one.clients if row["before_accuracy"] is not None]
    assert (
        len(seen) == one.metrics[0]["before"]["clients"] == one.metrics[1]["before"]["clients"] == 2
    )
    assert sum(row["visits"] > 0 for row in one.clients) > 2
    with open(tmp_path / "device" / "clients.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["client"] for row in rows if row["test_examples"]] == [str(i) for i in seen]


def test_several_runs_are_of_the_device(tmp_path):
    with pytest.raises(UsageError, match="run them one by one"):
        runner.run_all(CONFIG | {"store": "host", "seeds": 2}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_that_was_killed_and_damaged_goes_on(tmp_path, monkeypatch, capsys):
    """Killed between the rows of a checkpoint and the checkpoint; the one before has rotted."""
    config = CONFIG | {"store": "host", "phases": ()}
    save = checkpoints.Store.save

    def killed(self, step, trees, facts):
        if step == 3:
            raise Killed
        save(self, step, trees, facts)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Store, "save", killed)
        with pytest.raises(Killed):
            runner.run(config, tmp_path)
    there = tmp_path / "rows"
    assert {path.name for path in there.iterdir()} == {"1.rows", "2.rows", "3.rows"}
    content = bytearray((there / "2.rows").read_bytes())
    content[-1] ^= 1
    (there / "2.rows").write_bytes(content)
    got = runner.run(config, tmp_path)
    assert got.resumed_at == 1
    assert "The checkpoint of round 2 is damaged: 2.rows is not what was" in capsys.readouterr().err
    assert_same(got, undisturbed(CONFIG | {"phases": ()}))
    store = checkpoints.open_store(tmp_path / "checkpoints", read_only=True)
    needed = [store.facts(step)["rows"] for step in store.steps()]
    assert {path.name for path in there.iterdir()} == {
        file for one in needed for file in one["files"]
    }
    assert_same(export.load_result(tmp_path), got)
    for path in there.iterdir():
        path.write_bytes(b"")
    with pytest.raises(UsageError, match="is damaged"):
        export.load_result(tmp_path)
