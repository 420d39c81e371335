"""What stays with clients in memory or on disk, against arrays that are copied by hand."""

from pathlib import Path

import chex
import numpy as np
import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.engine.stores import Clients, Rows

FIRST = {"n": np.int32(2), "w": np.arange(3, dtype=np.float32)}


def numbered(*values: int) -> dict[str, np.ndarray]:
    """Rows that are told apart by a number each."""
    n = np.array(values, np.int32)
    return {"n": n, "w": np.repeat(n[:, None], 3, 1).astype(np.float32)}


@pytest.mark.parametrize("store", ["host", "disk"])
def test_a_snapshot_stays_as_it_is_while_clients_go_on(store: str, tmp_path: Path):
    now = Clients([Rows(FIRST, 5, store, tmp_path)], several=False)
    now.write(0, np.array([3, 1]), numbered(13, 11))
    first = {"n": np.full(5, 2, np.int32), "w": np.tile(FIRST["w"], (5, 1))}
    wanted = {name: leaf.copy() for name, leaf in first.items()}
    for name, leaf in numbered(13, 11).items():
        wanted[name][[3, 1]] = leaf
    chex.assert_trees_all_equal(now.whole(), wanted)
    assert now.written(0).tolist() == [1, 3]

    best = now.snapshot()
    now.write(0, np.array([3, 4]), numbered(23, 24))
    now.write(0, np.array([3]), numbered(33))
    chex.assert_trees_all_equal(best.whole(), wanted)
    changed = {name: leaf.copy() for name, leaf in wanted.items()}
    for name, leaf in numbered(33, 24).items():
        changed[name][[3, 4]] = leaf
    chex.assert_trees_all_equal(now.whole(), changed)
    chex.assert_trees_all_equal(
        now.read(0, np.array([4, 0])), {n: a[[4, 0]] for n, a in changed.items()}
    )

    later = now.snapshot()
    now.write(0, np.array([0]), numbered(40))
    chex.assert_trees_all_equal(later.whole(), changed)


def test_a_directory_that_is_gone_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match="gone was removed or moved during its run; put it back"):
        Rows(FIRST, 5, "disk", tmp_path / "gone")
