"""Values that clients read from all rows are computed in blocks, whatever the layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.simulation import map_clients

ROWS = jnp.arange(14.0).reshape(7, 2)


def test_layout_of_blocks():
    """Seven clients in chunks of one or two, in blocks of at most three."""
    assert map_clients.layout(7, 1, None) == (1, 1, 7, 1)
    assert map_clients.layout(7, 1, None, 3) == (1, 3, 3, 1)
    assert map_clients.layout(7, 2, None, 3) == (1, 4, 1, 2)
    assert map_clients.layout(7, 2, None, 1) == (1, 4, 1, 2)


@pytest.mark.parametrize(
    ("devices", "is_spread"), [(1, False), (2, False), (2, True)], ids=["one", "two", "spread"]
)
@pytest.mark.parametrize("chunk", [1, 2])
def test_blocks_equal_a_loop(devices: int, is_spread: bool, chunk: int):
    axis = (jax.sharding.AxisType.Auto,)
    used = jax.devices()[:devices]
    mesh = jax.make_mesh((devices,), ("clients",), axis, devices=used) if devices > 1 else None

    def mix(rows, i):
        return rows[i] + jnp.float32(i + 1) * rows.sum(0)

    def add(shared, item):
        i, mixed = item
        return shared + mixed * jnp.float32(i)

    def run(rows):
        ids, use = jnp.arange(7), jnp.ones(7, bool)
        return map_clients.map_clients(
            add, 0.5, ids, use, chunk, mesh, mix, rows, block=3, is_spread=is_spread
        )

    rows, i = np.asarray(ROWS), np.arange(7.0)[:, None]
    expected = 0.5 + i * (rows + (i + 1) * rows.sum(0))
    np.testing.assert_allclose(jax.jit(run)(ROWS), expected, rtol=1e-6)
