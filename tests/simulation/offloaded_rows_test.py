"""Tests of the rows that a round writes to offloaded parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.simulation.offloaded_rows import OffloadedRows
from fedjax_pfl.simulation.stores import ClientStore, RowStore, to_arrays

FIRST = {"a": np.arange(3, dtype=np.float32), "b": np.float32(7)}


@pytest.mark.parametrize("names", [("a", "b"), ("a",), ("b",)], ids=["both", "a", "b"])
@pytest.mark.parametrize("ids", [[4, 1], [5, 1], [5, 5]], ids=["all", "one absent", "all absent"])
def test_only_changed_leaves_of_present_clients_are_written(names, ids):
    clients = ClientStore(
        [RowStore((), 5, "host"), RowStore(FIRST, 5, "host")], has_groups=False, offload=("models",)
    )
    offloaded = OffloadedRows(clients)
    new = {"a": jnp.full((2, 3), 9.0), "b": jnp.array([20.0, 21.0])}

    @jax.jit
    def update(ids):
        rows = offloaded.join({"models": ()}, 2)["models"]
        changed = {name: trees.put(rows[name], ids, new[name]) for name in names}
        return offloaded.split({"models": {**rows, **changed}})[1]

    offloaded.write(clients, jax.device_get(update(jnp.array(ids, jnp.int32))))
    expected = {"a": np.tile(FIRST["a"], (5, 1)), "b": np.full(5, 7, np.float32)}
    for name in names:
        for slot, i in enumerate(ids):
            if i < 5:
                expected[name][i] = new[name][slot]
    rows = to_arrays(State((), {"models": ()}, clients)).rows["models"]
    jax.tree.map(np.testing.assert_array_equal, rows, expected)
    assert clients.written(1).tolist() == sorted(i for i in ids if i < 5)
