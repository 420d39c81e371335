"""Rows of clients that may lie off the devices, and what a method may do with them.

A method names the parts of its rows that it reads by `take`, `mixed` and `each` alone, and writes
by `Cohort.put`: `Algorithm.far`. Where these lie in arrays, the three are plain array operations.
Where they lie on the host or in a file, a part's leaves are `Far`: the program asks for the rows
that it needs, and for all of them block by block.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
_BLOCK = 1 << 24  # bytes of rows that are at hand at a time, where all are read


class Source(Protocol):
    """Where the rows of one part lie."""

    def read(self, leaves: Sequence[int], ids: np.ndarray) -> list[np.ndarray]:
        """Of some leaves the rows `ids`, [*ids.shape, ...]."""


@jax.tree_util.register_pytree_node_class
class Far:
    """A leaf [N, ...] that lies elsewhere, and of a round those rows that are to be written.

    The rows that it reads are those from before the round.
    """

    def __init__(
        self, source: Source, k: int, shape: tuple[int, ...], dtype: Any, ids: Any, values: Any
    ) -> None:
        """Leaf k of a source; `values` are for the rows `ids`, those out of range for none."""
        self.source, self.k, self.shape, self.dtype = source, k, shape, dtype
        self.ids, self.values = ids, values

    def tree_flatten(self) -> tuple[tuple[Any, Any], Any]:
        """As JAX asks for it."""
        return (self.ids, self.values), (self.source, self.k, self.shape, self.dtype)

    @classmethod
    def tree_unflatten(cls, about: Any, children: tuple[Any, Any]) -> "Far":
        """The inverse."""
        (source, k, shape, dtype), (ids, values) = about, children
        return cls(source, k, shape, dtype, ids, values)

    def put(self, ids: jax.Array, values: jax.Array) -> "Far":
        """With these to be written, in place of others."""
        return Far(self.source, self.k, self.shape, self.dtype, ids, values)


def is_far(leaf: Any) -> bool:
    """Whether a leaf lies elsewhere."""
    return isinstance(leaf, Far)


def leaves_of(tree: PyTree) -> list[Far]:
    """The leaves of a tree that lie elsewhere."""
    return [leaf for leaf in _flat(tree)[0] if is_far(leaf)]


def _flat(tree: PyTree) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree, is_leaf=is_far)


def take(tree: PyTree, ids: Any) -> PyTree:
    """The rows `ids` of every leaf."""
    leaves, form = _flat(tree)
    if any(map(is_far, leaves)):
        found = _read(leaves, jnp.asarray(ids, jnp.int32))
    else:
        found = [leaf[ids] for leaf in leaves]
    return jax.tree.unflatten(form, found)


def mixed(tree: PyTree, weights: PyTree) -> PyTree:
    """Σ_j w_j x_j over axis 0 of every leaf; weights: [N], or a tree of them, one for each leaf."""
    leaves, form = _flat(tree)
    own = [weights] * len(leaves) if hasattr(weights, "ndim") else form.flatten_up_to(weights)
    if any(map(is_far, leaves)):
        return jax.tree.unflatten(form, _mixed(_Leaves(leaves), own))
    return jax.tree.unflatten(form, list(map(_sum, leaves, own)))


def _sum(leaf: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.tensordot(weights, leaf, 1, precision="highest")


def each(f: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """f(row) of every row, stacked: [N, ...]."""
    leaves, form = _flat(tree)
    if not any(map(is_far, leaves)):
        return jax.vmap(f)(tree)

    def of_row(row: list[jax.Array]) -> PyTree:
        return f(jax.tree.unflatten(form, row))

    return _each(_Leaves(leaves), of_row)


def _read(leaves: Sequence[Far], ids: jax.Array) -> list[jax.Array]:
    """Their rows, by one call of the host for each source."""
    found: dict[int, jax.Array] = {}
    for source in dict.fromkeys(leaf.source for leaf in leaves):
        own = [j for j, leaf in enumerate(leaves) if leaf.source is source]
        found |= zip(own, _read_from(source, [leaves[j] for j in own], ids), strict=True)
    return [found[j] for j in range(len(leaves))]


def _read_from(source: Source, leaves: Sequence[Far], ids: jax.Array) -> list[jax.Array]:
    numbers = [leaf.k for leaf in leaves]
    shapes = [jax.ShapeDtypeStruct((*ids.shape, *x.shape[1:]), x.dtype) for x in leaves]

    def host(ids: Any) -> list[np.ndarray]:
        return source.read(numbers, np.asarray(ids))

    return jax.pure_callback(host, shapes, ids, vmap_method="broadcast_all")


class _Leaves(tuple[Far, ...]):
    """Compared by where they lie: an argument that is not traced."""

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
        """(how many, of how many rows each); the last may go beyond the end."""
        one = sum(math.prod(x.shape[1:]) * np.dtype(x.dtype).itemsize for x in self)
        step = min(self.rows, max(1, _BLOCK // max(1, one)))
        return -(-self.rows // step), step

    def block(self, b: Any) -> list[jax.Array]:
        """Its rows; beyond the end the last one again."""
        ids = b * self.blocks[1] + jnp.arange(self.blocks[1], dtype=jnp.int32)
        return _read(self, jnp.minimum(ids, self.rows - 1))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed(leaves: _Leaves, weights: list[jax.Array]) -> list[jax.Array]:
    number, step = leaves.blocks
    more = number * step - leaves.rows
    padded = [jnp.pad(w, (0, more)) for w in weights]

    def add(b: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        own = [jax.lax.dynamic_slice_in_dim(w, b * step, step) for w in padded]
        return [s + _sum(x, w) for s, x, w in zip(sums, leaves.block(b), own, strict=True)]

    return jax.lax.fori_loop(0, number, add, [jnp.zeros(x.shape[1:], x.dtype) for x in leaves])


def _mixed_forward(leaves: _Leaves, weights: list[jax.Array]) -> tuple[list[jax.Array], None]:
    return _mixed(leaves, weights), None


def _mixed_backward(leaves: _Leaves, _: None, slopes: list[jax.Array]) -> tuple[list[jax.Array]]:
    def inner(row: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(row, slopes, strict=True)
        return [jnp.vdot(x, g, precision="highest") for x, g in pairs]

    return (_each(leaves, inner),)


_mixed.defvjp(_mixed_forward, _mixed_backward)


def _each(leaves: _Leaves, f: Callable[[list[jax.Array]], PyTree]) -> PyTree:
    number, _ = leaves.blocks

    def of_block(b: jax.Array) -> PyTree:
        return jax.vmap(f)(leaves.block(b))

    found = jax.lax.map(of_block, jnp.arange(number, dtype=jnp.int32))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: leaves.rows], found)


def separate(rows: PyTree, names: Sequence[str]) -> tuple[PyTree, dict[str, PyTree]]:
    """Rows, a NamedTuple or a dict, with () in the place of the parts that are named; those."""
    if not names:
        return rows, {}
    if isinstance(rows, dict):
        return {**rows, **dict.fromkeys(names, ())}, {name: rows[name] for name in names}
    parts = {name: getattr(rows, name) for name in names}
    return rows._replace(**dict.fromkeys(names, ())), parts


def joined(rows: PyTree, parts: dict[str, PyTree]) -> PyTree:
    """The inverse."""
    if not parts:
        return rows
    return {**rows, **parts} if isinstance(rows, dict) else rows._replace(**parts)
