"""What stays with clients in memory or on disk, against arrays that are copied by hand."""

from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest

from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.simulation.stores import Clients, Rows, arrays

EMPTY = State((), (), ())
FIRST = {"n": np.int32(2), "w": np.arange(3, dtype=np.float32)}


def numbered(*values: int) -> dict[str, np.ndarray]:
    """Rows that are told apart by a number each."""
    n = np.array(values, np.int32)
    return {"n": n, "w": np.repeat(n[:, None], 3, 1).astype(np.float32)}


def held(clients: Clients) -> Any:
    """As arrays of all of them."""
    return arrays(EMPTY._replace(clients=clients)).clients


@pytest.mark.parametrize("store", ["host", "disk"])
def test_a_snapshot_stays_as_it_is_while_clients_go_on(store: str, tmp_path: Path):
    now = Clients([Rows(FIRST, 5, store, tmp_path)], several=False)
    now.write(0, np.array([3, 1]), numbered(13, 11))
    first = {"n": np.full(5, 2, np.int32), "w": np.tile(FIRST["w"], (5, 1))}
    wanted = {name: leaf.copy() for name, leaf in first.items()}
    for name, leaf in numbered(13, 11).items():
        wanted[name][[3, 1]] = leaf
    chex.assert_trees_all_equal(held(now), wanted)
    assert now.written(0).tolist() == [1, 3]

    best = now.snapshot()
    now.write(0, np.array([3, 4]), numbered(23, 24))
    now.write(0, np.array([3]), numbered(33))
    chex.assert_trees_all_equal(held(best), wanted)
    changed = {name: leaf.copy() for name, leaf in wanted.items()}
    for name, leaf in numbered(33, 24).items():
        changed[name][[3, 4]] = leaf
    chex.assert_trees_all_equal(held(now), changed)
    chex.assert_trees_all_equal(
        now.read(0, np.array([4, 0])), {n: a[[4, 0]] for n, a in changed.items()}
    )

    later = now.snapshot()
    now.write(0, np.array([0]), numbered(40))
    chex.assert_trees_all_equal(held(later), changed)


def test_nothing_is_kept_of_clients_who_have_nothing():
    rows = Rows((), 5, "disk")
    rows.put(np.array([1, 2]), np.empty((2, 0), np.uint8))
    assert rows.records(np.array([4, 1, 1])).shape == (3, 0)
    assert rows.read(np.array([1])) == ()
    assert not len(rows.written())


def test_a_part_of_a_record_is_read_alone(tmp_path: Path):
    for store in ("host", "disk"):
        clients = Clients([Rows(FIRST, 5, store, tmp_path)], several=False)
        clients.write(0, np.array([3]), numbered(13))
        best = clients.snapshot()
        clients.write(0, np.array([0, 3]), numbered(20, 23))
        ids = np.array([3, 1, 3, 0])
        for one, wanted in ((clients, (23, 2, 23, 20)), (best, (13, 2, 13, 2))):
            assert one.leaf(0, 0, ids).tolist() == list(wanted)
            assert one.leaf(0, 1, ids).shape == (4, 3)
            np.testing.assert_array_equal(one.leaf(0, 1, ids), one.read(0, ids)["w"])


def test_a_directory_that_is_gone_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match="gone was removed or moved during its run; put it back"):
        Rows(FIRST, 5, "disk", tmp_path / "gone")
