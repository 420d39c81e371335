"""What a round writes of rows off the devices, leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.simulation.offloaded_rows import OffloadedRows
from fedjax_pfl.simulation.stores import Clients, Rows, arrays

FIRST = {"a": np.arange(3, dtype=np.float32), "b": np.float32(7)}


@pytest.mark.parametrize("parts", [("a", "b"), ("a",), ("b",)], ids=["both", "a", "b"])
@pytest.mark.parametrize("ids", [[4, 1], [5, 1], [5, 5]], ids=["all", "one is absent", "nobody"])
def test_leaves_that_are_not_written_stay(parts, ids):
    clients = Clients(
        [Rows((), 5, "host"), Rows(FIRST, 5, "host")], several=False, offload=("models",)
    )
    known, new = OffloadedRows(clients), {"a": jnp.full((2, 3), 9.0), "b": jnp.array([20.0, 21.0])}

    @jax.jit
    def round_(ids):
        rows = known.seen({"models": ()}, 2)["models"]
        put = {name: trees.put(rows[name], ids, new[name]) for name in parts}
        return known.taken({"models": {**rows, **put}})[1]

    known.write(clients, jax.device_get(round_(jnp.array(ids, jnp.int32))))
    wanted = {"a": np.tile(FIRST["a"], (5, 1)), "b": np.full(5, 7, np.float32)}
    for name in parts:
        for seat, i in enumerate(ids):
            if i < 5:
                wanted[name][i] = new[name][seat]
    found = arrays(State((), {"models": ()}, clients)).rows["models"]
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert clients.written(1).tolist() == sorted(i for i in ids if i < 5)
