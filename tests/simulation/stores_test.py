"""Client-side state in memory or on disk, compared with arrays."""

import weakref
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest

from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.simulation.stores import ClientStore, RowStore, to_arrays

EMPTY = State((), (), ())
FIRST = {"n": np.int32(2), "w": np.arange(3, dtype=np.float32)}


def rows(*values: int) -> dict[str, np.ndarray]:
    """Returns one row per value, filled with it."""
    n = np.array(values, np.int32)
    return {"n": n, "w": np.repeat(n[:, None], 3, 1).astype(np.float32)}


def content(clients: ClientStore) -> Any:
    """Returns the arrays of all clients."""
    return to_arrays(EMPTY._replace(clients=clients)).clients


def with_rows(arrays: Any, ids: list[int], *values: int) -> Any:
    """Returns a copy of the arrays with other rows for some clients."""
    changed = {name: leaf.copy() for name, leaf in arrays.items()}
    for name, leaf in rows(*values).items():
        changed[name][ids] = leaf
    return changed


@pytest.mark.parametrize("store", ["host", "disk"])
def test_snapshot_keeps_its_rows_while_clients_change(store: str, tmp_path: Path):
    clients = ClientStore(
        [RowStore(first=FIRST, clients=5, store=store, folder=tmp_path)], has_groups=False
    )
    clients.write(0, np.array([3, 1]), rows(13, 11))
    initial = {"n": np.full(5, 2, np.int32), "w": np.tile(FIRST["w"], (5, 1))}
    expected = with_rows(initial, [3, 1], 13, 11)
    chex.assert_trees_all_equal(content(clients), expected)
    assert clients.written(0).tolist() == [1, 3]

    best = clients.snapshot()
    clients.write(0, np.array([3, 4]), rows(23, 24))
    clients.write(0, np.array([3]), rows(33))
    chex.assert_trees_all_equal(content(best), expected)
    assert best.written_bytes() == 2 * (4 + 3 * 4)  # clients 3 and 4, once each
    changed = with_rows(expected, [3, 4], 33, 24)
    chex.assert_trees_all_equal(content(clients), changed)
    some = {name: leaf[[4, 0]] for name, leaf in changed.items()}
    chex.assert_trees_all_equal(clients.read(0, np.array([4, 0])), some)

    earlier = weakref.ref(best)
    del best
    clients = clients.hand_over()
    later = clients.snapshot()
    assert earlier() is None  # without a collection of cycles, which is rare
    clients.write(0, np.array([0]), rows(40))
    chex.assert_trees_all_equal(content(later), changed)
    assert not any(tmp_path.iterdir())  # the file of a store has no name


def test_clients_without_arrays():
    store = RowStore((), 5, "disk")
    store.put(np.array([1, 2]), np.empty((2, 0), np.uint8))
    assert store.records(np.array([4, 1, 1])).shape == (3, 0)
    assert store.read(np.array([1])) == ()
    assert not len(store.written())


@pytest.mark.parametrize("store", ["host", "disk"])
def test_leaf_reads_a_part_of_each_record(store: str, tmp_path: Path):
    clients = ClientStore(
        [RowStore(first=FIRST, clients=5, store=store, folder=tmp_path)], has_groups=False
    )
    clients.write(0, np.array([3]), rows(13))
    best = clients.snapshot()
    clients.write(0, np.array([0, 3]), rows(20, 23))
    ids = np.array([3, 1, 3, 0])
    for source, expected in ((clients, [23, 2, 23, 20]), (best, [13, 2, 13, 2])):
        assert source.leaf(0, 0, ids).tolist() == expected
        assert source.leaf(0, 1, ids).shape == (4, 3)
        np.testing.assert_array_equal(source.leaf(0, 1, ids), source.read(0, ids)["w"])


def test_missing_folder_is_an_error(tmp_path: Path):
    with pytest.raises(UsageError, match="gone was removed or moved during its run; put it back"):
        RowStore(first=FIRST, clients=5, store="disk", folder=tmp_path / "gone")
