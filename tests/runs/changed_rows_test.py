"""Tests of the rows that a checkpoint saves of clients in a store."""

import jax
import numpy as np
import pytest

from fedjax_pfl.core.algorithm import State
from fedjax_pfl.runs import changed_rows
from fedjax_pfl.runs.checkpoints import DamagedError
from fedjax_pfl.simulation.stores import ClientStore, RowStore, to_arrays

N = 9
FIRST = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.int32(7), "b": np.array([True])}
SIZE = 6 * 4 + 4 + 1


def make_clients():
    return ClientStore([RowStore(FIRST, N, "host"), RowStore((), N, "host")], has_groups=True)


def rows_of(ids, value):
    """Returns different arrays for every client."""
    return {
        "w": np.stack([np.full((2, 3), value + i / 16, np.float32) for i in ids]),
        "n": np.array([value * 100 + i for i in ids], np.int32),
        "b": np.array([[i % 2 == 0] for i in ids]),
    }


def assert_equal(*stores):
    arrays = [to_arrays(State((), (), clients)).clients for clients in stores]
    jax.tree.map(np.testing.assert_array_equal, *arrays)


def read(folder, saved):
    shapes = [jax.tree.map(lambda a: np.broadcast_to(a, (N, *np.shape(a))), FIRST), ()]
    changed_rows.check_files(folder, saved)
    decoded = changed_rows.from_json(saved._asdict())
    return changed_rows.read(
        folder,
        decoded,
        shapes,
        has_groups=True,
        make=lambda first: RowStore(first=first, clients=N, store="disk", folder=folder),
    )


def test_a_checkpoint_writes_changed_rows_only(tmp_path):
    clients, best, previous = make_clients(), None, None
    for step in range(12):
        ids = np.array([step % 3, 3 + step % 4])
        clients.write(0, ids, rows_of(ids, step + 1))
        if step == 5:
            best = clients.snapshot()
        saved = changed_rows.write(tmp_path, str(step), clients, best)
        changed_rows.mark_saved(clients, best, saved)
        recent = [part for part in (previous, saved) if part]
        changed_rows.remove_unused(tmp_path, [part.files for part in recent])
        for part in recent:
            changed_rows.check_files(tmp_path, part)
        read_clients, read_best = read(tmp_path, saved)
        assert_equal(read_clients, clients)
        assert (best is None) == (read_best is None)
        if best is not None:
            assert_equal(read_best, best)
            assert read_best.written(0).tolist() == best.written(0).tolist()
        # The initial row, and ids and rows of two clients; at most as many of the best round.
        assert (tmp_path / f"{step}.rows").stat().st_size >= 4 + SIZE + 4 + 2 * (4 + SIZE)
        assert sum(part.number for part in saved.state) <= 2 * clients.groups[0].count
        previous = saved
    changed_rows.write(tmp_path, "unchanged", clients, best)
    assert (tmp_path / "unchanged.rows").stat().st_size == 4 + SIZE + 4


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damaged_rows_are_detected(damage, tmp_path):
    clients = make_clients()
    clients.write(0, np.arange(N), rows_of(range(N), 1))
    saved = changed_rows.write(tmp_path, "1", clients, None)
    path = tmp_path / "1.rows"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    changed_rows.check_files(tmp_path, saved)
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flipped" else content[:-1])
    with pytest.raises(DamagedError, match=r"1\.rows"):
        changed_rows.check_files(tmp_path, saved)


def test_a_failed_write_leaves_no_file_and_can_be_repeated(tmp_path, monkeypatch):
    clients = make_clients()
    clients.write(0, np.array([1]), rows_of([1], 1))

    def full(path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(changed_rows.os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            changed_rows.write(tmp_path, "1", clients, None)
    assert not any(tmp_path.iterdir())
    assert_equal(read(tmp_path, changed_rows.write(tmp_path, "1", clients, None))[0], clients)
