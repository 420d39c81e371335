"""What checkpoints hold of clients in a store, without a run."""

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


def clients(store="host", folder=None):
    groups = [RowStore(FIRST, N, store, folder), RowStore((), N, store, folder)]
    return ClientStore(groups, has_groups=True)


def rows_of(ids, value):
    """One client's arrays for each, all of which differ."""
    return {
        "w": np.stack([np.full((2, 3), value + i / 16, np.float32) for i in ids]),
        "n": np.array([value * 100 + i for i in ids], np.int32),
        "b": np.array([[i % 2 == 0] for i in ids]),
    }


def held(clients):
    """As arrays of all of them."""
    return to_arrays(State((), (), clients)).clients


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, held(one), held(other))


def read(folder, now):
    shapes = [jax.tree.map(lambda a: np.broadcast_to(a, (N, *np.shape(a))), FIRST), ()]
    changed_rows.check(folder, now)
    plain = changed_rows.from_json(now._asdict())

    def make(first):
        return RowStore(first, N, "disk", folder)

    return changed_rows.read(folder, plain, shapes, True, make)


@pytest.mark.parametrize("store", ["host", "disk"])
def test_rows_of_those_that_were_written(store, tmp_path):
    there = clients(store, tmp_path)
    same(there, clients())
    assert there.written(0).tolist() == []
    wanted = held(there)[0]
    for ids, value in (([2, 5], 1), ([5, 8, 0], 2)):
        there.write(0, np.array(ids), rows_of(ids, value))
        for name, leaf in rows_of(ids, value).items():
            wanted[name][ids] = leaf
    jax.tree.map(np.testing.assert_array_equal, held(there), (wanted, ()))
    some = there.read(0, np.array([8, 1, 5]))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[[8, 1, 5]]), some, wanted)
    assert there.written_bytes() == 4 * SIZE
    assert not any(tmp_path.iterdir())  # a file of the store has no name


def test_a_snapshot_stays_as_it_was():
    there = clients()
    there.write(0, np.array([1, 2]), rows_of([1, 2], 1))
    before = held(there)
    best = there.snapshot()
    for value in (2, 3):
        there.write(0, np.array([2, 3]), rows_of([2, 3], value))
    jax.tree.map(np.testing.assert_array_equal, held(best), before)
    assert best.written_bytes() == 2 * SIZE  # of clients 2 and 3, once
    assert held(there)[0]["n"][3] == 303


def test_a_checkpoint_writes_what_has_changed(tmp_path):
    there, best, before = clients(), None, None
    for step in range(12):
        ids = np.array([step % 3, 3 + step % 4])
        there.write(0, ids, rows_of(ids, step + 1))
        if step == 5:
            best = there.snapshot()
        now = changed_rows.write(tmp_path, str(step), there, best)
        changed_rows.mark_saved(there, best, now)
        changed_rows.remove_unused(tmp_path, [one.files for one in (before, now) if one])
        for one in filter(None, (before, now)):
            changed_rows.check(tmp_path, one)
        got, got_best = read(tmp_path, now)
        same(got, there)
        assert (best is None) == (got_best is None)
        if best is not None:
            same(got_best, best)
            assert got_best.written(0).tolist() == best.written(0).tolist()
        # What all begin with; the ids and records of two; of the best round's as many at most.
        assert (tmp_path / f"{step}.rows").stat().st_size >= 4 + SIZE + 4 + 2 * (4 + SIZE)
        assert sum(part.number for part in now.state) <= 2 * there.groups[0].count
        before = now
    changed_rows.write(tmp_path, "again", there, best)  # nothing has changed
    assert (tmp_path / "again.rows").stat().st_size == 4 + SIZE + 4


@pytest.mark.parametrize("harm", ["a byte", "cut", "gone"])
def test_damage_is_found(harm, tmp_path):
    there = clients()
    there.write(0, np.arange(N), rows_of(range(N), 1))
    now = changed_rows.write(tmp_path, "1", there, None)
    path = tmp_path / "1.rows"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    changed_rows.check(tmp_path, now)
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(content if harm == "a byte" else content[:-1])
    with pytest.raises(DamagedError, match=r"1\.rows"):
        changed_rows.check(tmp_path, now)


def test_what_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    there = clients()
    there.write(0, np.array([1]), rows_of([1], 1))

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(changed_rows.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        changed_rows.write(tmp_path, "1", there, None)
    assert not any(tmp_path.iterdir())
    monkeypatch.undo()
    now = changed_rows.write(tmp_path, "1", there, None)  # nothing that had changed is forgotten
    same(read(tmp_path, now)[0], there)
