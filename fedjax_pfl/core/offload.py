"""Server-side rows of clients that may be stored off the device, and how methods read them.

A method lists parts of its rows in `Algorithm.offload`. It reads these parts only through
`take_rows`, `weighted_sum`, `dot_products` and `map_clients`, and writes them only through
`Cohort.put` and `Cohort.update`. For arrays on the device these are plain array operations. For
parts stored on the host or on disk, the leaves are `Offloaded`: the program requests the rows that
it needs, all rows block by block.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
_BLOCK = 1 << 24  # bytes of rows in memory at a time if all rows are read


class Source(Protocol):
    """Storage, off the device, of one field of `State.rows`, which is a tree of leaves [N, ...]."""

    def read(self, leaves: Sequence[int], ids: np.ndarray) -> list[np.ndarray]:
        """Returns rows `ids` of the leaves with these numbers: one [*ids.shape, ...] per leaf."""


@jax.tree_util.register_pytree_node_class
class Offloaded:
    """A leaf [N, ...] that is stored off the device, with the rows to write after this round.

    Rows are read as they were before the round. After it, rows `ids` become `values`.

    Args:
      source: Storage of the leaf.
      k: Index of the leaf in the source.
      shape: Shape of the leaf, [N, ...].
      dtype: Type of the leaf.
      ids: int32 [K]; ids out of range write nothing.
      values: Rows to write, [K, ...].
    """

    def __init__(
        self, source: Source, k: int, shape: tuple[int, ...], dtype: Any, ids: Any, values: Any
    ) -> None:
        self.source, self.k, self.shape, self.dtype = source, k, shape, dtype
        self.ids, self.values = ids, values

    def tree_flatten(self) -> tuple[tuple[Any, Any], Any]:
        return (self.ids, self.values), (self.source, self.k, self.shape, self.dtype)

    @classmethod
    def tree_unflatten(cls, static: Any, children: tuple[Any, Any]) -> "Offloaded":
        (source, k, shape, dtype), (ids, values) = static, children
        return cls(source, k, shape, dtype, ids, values)

    def put(self, ids: jax.Array, values: jax.Array) -> "Offloaded":
        """Returns this leaf with new rows to write after the round, instead of those it had.

        `values` is [K, ...]; `ids` [K] are their rows.
        """
        return Offloaded(
            source=self.source, k=self.k, shape=self.shape, dtype=self.dtype, ids=ids, values=values
        )


def is_offloaded(leaf: Any) -> bool:
    """Returns True if the leaf is stored off the device."""
    return isinstance(leaf, Offloaded)


def offloaded_leaves(tree: PyTree) -> list[Offloaded]:
    """Returns the leaves of a tree that are stored off the device."""
    return [leaf for leaf in _flatten(tree)[0] if is_offloaded(leaf)]


def _flatten(tree: PyTree) -> tuple[list[Any], Any]:
    """Returns the leaves, each `Offloaded` as one leaf, and the tree structure."""
    return jax.tree.flatten(tree, is_leaf=is_offloaded)


def take_rows(tree: PyTree, ids: Any) -> PyTree:
    """Returns rows `ids` of every leaf, arrays [*ids.shape, ...]. Leaves may be `Offloaded`."""
    leaves, structure = _flatten(tree)
    read = iter(_read(list(filter(is_offloaded, leaves)), jnp.asarray(ids, jnp.int32)))
    rows = [next(read) if is_offloaded(leaf) else leaf[ids] for leaf in leaves]
    return jax.tree.unflatten(structure, rows)


def weighted_sum(tree: PyTree, weights: PyTree) -> PyTree:
    """Computes Σ_j w_j x_j over axis 0 of every leaf x. Returns leaves [...] of the same dtype.

    Args:
      tree: Leaves of shape [N, ...], arrays or `Offloaded`.
      weights: Array of shape [N], or a tree with one such array per leaf.
    """
    leaves, structure = _flatten(tree)
    if hasattr(weights, "ndim"):
        leaf_weights = [weights] * len(leaves)
    else:
        leaf_weights = structure.flatten_up_to(weights)
    if any(map(is_offloaded, leaves)):
        sums = _blocked_sum(_Leaves(leaves), leaf_weights)
    else:
        sums = list(map(_sum, leaves, leaf_weights))
    narrow = [total.astype(leaf.dtype) for total, leaf in zip(sums, leaves, strict=True)]
    return jax.tree.unflatten(structure, narrow)


def _sum(leaf: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns Σ_j w_j x_j, at least in float32."""
    return jnp.tensordot(weights, widened(leaf), 1, precision="highest")


def dot_products(tree: PyTree, vectors: PyTree) -> PyTree:
    """Computes ⟨x_j, v⟩ of every row x_j of each leaf [N, ...]. Returns float32 leaves [N].

    Args:
      tree: Leaves of shape [N, ...], arrays or all `Offloaded`.
      vectors: Tree with one array v [...] per leaf.
    """
    leaves, structure = _flatten(tree)
    flat = structure.flatten_up_to(vectors)
    if any(map(is_offloaded, leaves)):
        return jax.tree.unflatten(structure, _blocked_map(_Leaves(leaves), partial(_dots, flat)))
    # The rows come first: XLA would copy all of them if they were the second factor of a product.
    products = [
        jnp.dot(
            widened(leaf).reshape(len(leaf), -1), widened(vector).reshape(-1), precision="highest"
        )
        for leaf, vector in zip(leaves, flat, strict=True)
    ]
    return jax.tree.unflatten(structure, products)


def _dots(vectors: list[jax.Array], row: list[jax.Array]) -> list[jax.Array]:
    return [
        jnp.vdot(widened(x), widened(v), precision="highest")
        for x, v in zip(row, vectors, strict=True)
    ]


def widened(x: jax.Array) -> jax.Array:
    """Returns x as float32 if its dtype is narrower, such as bfloat16."""
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def map_clients(f: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """Returns f(row) for the row of every client, stacked to [N, ...].

    Leaves of `tree` are [N, ...], arrays or all `Offloaded`; `row` is the tree of one client.
    """
    leaves, structure = _flatten(tree)
    if not any(map(is_offloaded, leaves)):
        return jax.vmap(f)(tree)

    def of_row(row: list[jax.Array]) -> PyTree:
        return f(jax.tree.unflatten(structure, row))

    return _blocked_map(_Leaves(leaves), of_row)


def _read(leaves: Sequence[Offloaded], ids: jax.Array) -> list[jax.Array]:
    """Returns rows `ids` of each leaf, [*ids.shape, ...], with one host call per source."""
    rows: dict[int, jax.Array] = {}
    for source in dict.fromkeys(leaf.source for leaf in leaves):
        numbers = [j for j, leaf in enumerate(leaves) if leaf.source is source]
        rows |= zip(numbers, _read_from(source, [leaves[j] for j in numbers], ids), strict=True)
    return [rows[j] for j in range(len(leaves))]


def _read_from(source: Source, leaves: Sequence[Offloaded], ids: jax.Array) -> list[jax.Array]:
    """Returns rows `ids` of leaves of one source, by one host call."""
    numbers = [leaf.k for leaf in leaves]
    shapes = [jax.ShapeDtypeStruct((*ids.shape, *x.shape[1:]), x.dtype) for x in leaves]

    def read_on_host(ids: Any) -> list[np.ndarray]:
        return source.read(numbers, np.asarray(ids))

    return jax.pure_callback(read_on_host, shapes, ids, vmap_method="broadcast_all")


class _Leaves(tuple[Offloaded, ...]):
    """Leaves as a static argument: compared by where they are stored."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(tuple((x.source, x.k) for x in self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Leaves) and [(x.source, x.k) for x in self] == [
            (x.source, x.k) for x in other
        ]

    def __ne__(self, other: object) -> bool:
        return not self == other

    @property
    def rows(self) -> int:
        return self[0].shape[0]

    @property
    def blocks(self) -> tuple[int, int]:
        """Returns the number of blocks and the rows per block; the last block may be incomplete."""
        row_bytes = sum(math.prod(x.shape[1:]) * np.dtype(x.dtype).itemsize for x in self)
        step = min(self.rows, max(1, _BLOCK // max(1, row_bytes)))
        return -(-self.rows // step), step

    def block(self, b: Any) -> list[jax.Array]:
        """Returns the rows of block `b` of each leaf; an incomplete block repeats the last row."""
        ids = b * self.blocks[1] + jnp.arange(self.blocks[1], dtype=jnp.int32)
        return _read(self, jnp.minimum(ids, self.rows - 1))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked_sum(leaves: _Leaves, weights: list[jax.Array]) -> list[jax.Array]:
    """Returns Σ_j w_j x_j for each leaf x and its weights w [N], reading blocks of rows."""
    count, step = leaves.blocks
    padding = count * step - leaves.rows
    padded = [jnp.pad(w, (0, padding)) for w in weights]

    def add(b: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        block_weights = [jax.lax.dynamic_slice_in_dim(w, b * step, step) for w in padded]
        parts = zip(sums, leaves.block(b), block_weights, strict=True)
        return [s + _sum(x, w) for s, x, w in parts]

    zeros = [widened(jnp.zeros(x.shape[1:], x.dtype)) for x in leaves]
    return jax.lax.fori_loop(0, count, add, zeros)


def _sum_forward(leaves: _Leaves, weights: list[jax.Array]) -> tuple[list[jax.Array], None]:
    return _blocked_sum(leaves, weights), None


def _sum_backward(leaves: _Leaves, _: None, slopes: list[jax.Array]) -> tuple[list[jax.Array]]:
    """Returns the gradient in the weights, [N] per leaf, of sums with gradients `slopes`."""
    return (_blocked_map(leaves, partial(_dots, slopes)),)


_blocked_sum.defvjp(_sum_forward, _sum_backward)


def _blocked_map(leaves: _Leaves, f: Callable[[list[jax.Array]], PyTree]) -> PyTree:
    """Returns f(row) for every row of the leaves, stacked to [N, ...]; reads blocks of rows.

    A row is a list with one array per leaf.
    """
    count, _ = leaves.blocks

    def of_block(b: jax.Array) -> PyTree:
        return jax.vmap(f)(leaves.block(b))

    blocks = jax.lax.map(of_block, jnp.arange(count, dtype=jnp.int32))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: leaves.rows], blocks)


def split_parts(rows: PyTree, names: Sequence[str]) -> tuple[PyTree, dict[str, PyTree]]:
    """Removes named parts (fields or keys) from rows, a NamedTuple or a dict.

    Returns the rows with () for these parts, and the removed parts by name.
    """
    if not names:
        return rows, {}
    if isinstance(rows, dict):
        return {**rows, **dict.fromkeys(names, ())}, {name: rows[name] for name in names}
    parts = {name: getattr(rows, name) for name in names}
    return rows._replace(**dict.fromkeys(names, ())), parts


def join_parts(rows: PyTree, parts: dict[str, PyTree]) -> PyTree:
    """Puts parts back into rows; the inverse of `split_parts`."""
    if not parts:
        return rows
    return {**rows, **parts} if isinstance(rows, dict) else rows._replace(**parts)
