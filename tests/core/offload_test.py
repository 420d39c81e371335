"""Rows that lie elsewhere: what is read of them is what is read of arrays, and so are gradients."""

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
    """A source, and how many rows it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def read(self, leaves: Any, ids: np.ndarray) -> list[np.ndarray]:
        self.asked.append(ids.size)
        return [jax.tree.leaves(ROWS)[k][ids] for k in leaves]


def elsewhere(source: Arrays, seats: int = 2) -> Any:
    none = jnp.full(seats, N, jnp.int32)
    leaves, form = jax.tree.flatten(ROWS)
    return jax.tree.unflatten(
        form,
        [
            offload.Offloaded(source, k, x.shape, x.dtype, none, jnp.zeros((seats, *x.shape[1:])))
            for k, x in enumerate(leaves)
        ],
    )


@pytest.fixture(params=[1, 60, 1 << 20], ids=["row by row", "two at a time", "all at once"])
def block(request, monkeypatch) -> int:
    """Bytes of a block; a row has 28."""
    monkeypatch.setattr(offload, "_BLOCK", request.param)
    return request.param


def squares(row: Any) -> Any:
    return {"all": trees.squared_norm(row), "b": 2 * row["b"]}


WEIGHTS = {"a": jnp.sin(jnp.arange(N, dtype=jnp.float32)), "b": jnp.linspace(0, 1, N)}


def everything(rows: Any, i: Any, weights: Any) -> Any:
    """One client's row, two rows, a sum with one weight and one with two, and a number of each."""
    return (
        trees.row(rows, i),
        offload.take_rows(rows, jnp.array([i, 0])),
        offload.weighted_sum(rows, weights["a"]),
        offload.weighted_sum(rows, weights),
        offload.map_clients(squares, rows),
    )


def test_reads_what_arrays_have(block):
    source = Arrays()
    several = jax.jit(jax.vmap(everything, (None, 0, None)))
    ids = jnp.array([6, 0, 3], jnp.int32)
    found = several(elsewhere(source), ids, WEIGHTS)
    chex.assert_trees_all_close(found, several(ROWS, ids, WEIGHTS), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[0]["a"], ROWS["a"][[6, 0, 3]])
    step = max(1, min(N, block // 28))
    assert max(source.asked) <= max(step, 6)  # and never all, but where all are a block


def test_weights_have_the_gradient_of_arrays(block):
    def loss(rows: Any, weights: Any) -> Any:
        return trees.squared_norm(offload.weighted_sum(rows, weights)) / 2

    slope = jax.jit(jax.grad(loss, 1))
    found = slope(elsewhere(Arrays()), WEIGHTS)
    # d/dw_j of |Σ_j w_j x_j|² / 2 is ⟨x_j, Σ_j w_j x_j⟩.
    mixed = {k: np.tensordot(np.asarray(WEIGHTS[k]), ROWS[k], 1) for k in ROWS}
    wanted = {k: ROWS[k].reshape(N, -1) @ mixed[k].reshape(-1) for k in ROWS}
    chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_what_is_written_is_kept_aside():
    source, ids = Arrays(), jnp.array([4, N], jnp.int32)
    new = jax.tree.map(lambda x: jnp.asarray(x[:2] + 1), ROWS)
    rows = trees.put(elsewhere(source), ids, new)
    for leaf, wanted in zip(
        jax.tree.leaves(rows, is_leaf=offload.is_offloaded), new.values(), strict=True
    ):
        np.testing.assert_array_equal(leaf.ids, ids)
        np.testing.assert_array_equal(leaf.values, wanted)
    np.testing.assert_array_equal(jax.jit(trees.row)(rows, 4)["b"], ROWS["b"][4])  # as it was


def test_parts_are_taken_out_and_come_back():
    rest, parts = offload.split_parts(ROWS, ("a",))
    assert rest["a"] == ()
    assert list(parts) == ["a"]
    chex.assert_trees_all_equal(offload.join_parts(rest, parts), ROWS)
    assert offload.split_parts(ROWS, ()) == (ROWS, {})
