"""Offloaded rows give the same values and gradients as arrays."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import offload, trees

N = 7
ROWS = {
    "a": np.arange(N * 6, dtype=np.float32).reshape(N, 2, 3) / 7 - 2,
    "b": np.cos(np.arange(N, dtype=np.float32)),
}


class Arrays:
    """A source that records the number of rows of every read."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def read(self, leaves: Any, ids: np.ndarray) -> list[np.ndarray]:
        self.reads.append(ids.size)
        return [jax.tree.leaves(ROWS)[k][ids] for k in leaves]


def offloaded(source: Arrays, slots: int = 2) -> Any:
    none = jnp.full(slots, N, jnp.int32)
    leaves, form = jax.tree.flatten(ROWS)
    return jax.tree.unflatten(
        form,
        [
            offload.Offloaded(
                source=source,
                k=k,
                shape=x.shape,
                dtype=x.dtype,
                ids=none,
                values=jnp.zeros((slots, *x.shape[1:])),
            )
            for k, x in enumerate(leaves)
        ],
    )


@pytest.fixture(params=[1, 60, 1 << 20], ids=["row by row", "two at a time", "all at once"])
def block(request, monkeypatch) -> int:
    """Returns the bytes of a block; a row has 28."""
    monkeypatch.setattr(offload, "_BLOCK", request.param)
    return request.param


def squares(row: Any) -> Any:
    return {"all": trees.squared_norm(row), "b": 2 * row["b"]}


WEIGHTS = {"a": jnp.sin(jnp.arange(N, dtype=jnp.float32)), "b": jnp.linspace(0, 1, N)}


def read_all(rows: Any, i: Any, weights: Any) -> Any:
    """Reads one row, two rows, two weighted sums, products and a value of every row."""
    return (
        trees.row(rows, i),
        offload.take_rows(rows, jnp.array([i, 0])),
        offload.weighted_sum(rows, weights["a"]),
        offload.weighted_sum(rows, weights),
        offload.dot_products(rows, trees.row(rows, i)),
        offload.map_clients(squares, rows),
    )


def test_reads_equal_arrays(block):
    source = Arrays()
    read = jax.jit(jax.vmap(read_all, (None, 0, None)))
    ids = jnp.array([6, 0, 3], jnp.int32)
    values = read(offloaded(source), ids, WEIGHTS)
    chex.assert_trees_all_close(values, read(ROWS, ids, WEIGHTS), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(values[0]["a"], ROWS["a"][[6, 0, 3]])
    flat = {name: x.reshape(N, -1).astype(np.float64) for name, x in ROWS.items()}
    expected = {name: x[[6, 0, 3]] @ x.T for name, x in flat.items()}
    chex.assert_trees_all_close(values[4], expected, rtol=1e-5, atol=1e-5)
    step = max(1, min(N, block // 28))
    assert max(source.reads) <= max(step, 6)  # never all rows, unless they fit in one block


def test_rows_may_be_partly_offloaded():
    mixed = {"a": offloaded(Arrays())["a"], "b": jnp.asarray(ROWS["b"]), "c": ()}
    rows = jax.jit(offload.take_rows)(mixed, jnp.array([6, 0], jnp.int32))
    chex.assert_trees_all_equal(rows, {"a": ROWS["a"][[6, 0]], "b": ROWS["b"][[6, 0]], "c": ()})


def test_gradient_of_weighted_sum(block):
    def loss(rows: Any, weights: Any) -> Any:
        return trees.squared_norm(offload.weighted_sum(rows, weights)) / 2

    slope = jax.jit(jax.grad(loss, 1))
    gradient = slope(offloaded(Arrays()), WEIGHTS)
    # d/dw_j of |Σ_j w_j x_j|² / 2 is ⟨x_j, Σ_j w_j x_j⟩.
    mixed = {k: np.tensordot(np.asarray(WEIGHTS[k]), ROWS[k], 1) for k in ROWS}
    expected = {k: ROWS[k].reshape(N, -1) @ mixed[k].reshape(-1) for k in ROWS}
    chex.assert_trees_all_close(gradient, expected, rtol=1e-5, atol=1e-5)


def test_put_stores_pending_writes():
    source, ids = Arrays(), jnp.array([4, N], jnp.int32)
    new = jax.tree.map(lambda x: jnp.asarray(x[:2] + 1), ROWS)
    rows = trees.put(offloaded(source), ids, new)
    for leaf, value in zip(
        jax.tree.leaves(rows, is_leaf=offload.is_offloaded), new.values(), strict=True
    ):
        np.testing.assert_array_equal(leaf.ids, ids)
        np.testing.assert_array_equal(leaf.values, value)
    np.testing.assert_array_equal(jax.jit(trees.row)(rows, 4)["b"], ROWS["b"][4])  # unchanged


def test_split_and_join_parts():
    other_rows, parts = offload.split_parts(ROWS, ("a",))
    assert other_rows["a"] == ()
    assert list(parts) == ["a"]
    chex.assert_trees_all_equal(offload.join_parts(other_rows, parts), ROWS)
    assert offload.split_parts(ROWS, ()) == (ROWS, {})
