"""Layout of a client's arrays in a record of bytes, in which `stores` keeps them off the device."""

from typing import Any, NamedTuple

import jax
import numpy as np

PyTree = Any


class RecordLayout(NamedTuple):
    """Layout of a client's arrays in its record, in sequence."""

    structure: Any  # JAX's structure of the tree of arrays
    shapes: tuple[tuple[int, ...], ...]  # of each array
    dtypes: tuple[np.dtype, ...]  # of each array
    ends: tuple[int, ...]  # byte at which each array ends

    @property
    def size(self) -> int:
        """Returns the bytes of a record."""
        return self.ends[-1] if self.ends else 0

    def to_bytes(self, rows: PyTree) -> list[np.ndarray]:
        """Views each leaf [K, ...] of the rows as bytes, uint8 [K, bytes of the leaf]."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(rows)]
        for leaf, dtype in zip(leaves, self.dtypes, strict=True):
            assert leaf.dtype == dtype
        flat = [np.ascontiguousarray(leaf).reshape(len(leaf), -1) for leaf in leaves]
        return [leaf.view(np.uint8) for leaf in flat]

    def pack(self, rows: PyTree) -> np.ndarray:
        """Packs leaves of shape [K, ...] into records, uint8 [K, size]."""
        columns = self.to_bytes(rows)
        return np.concatenate(columns, 1) if columns else np.empty((0, 0), np.uint8)

    def unpack(self, records: np.ndarray) -> PyTree:
        """Unpacks records, uint8 [K, size]; the inverse of `pack`."""
        leaves = [self.leaf(k, records) for k in range(len(self.ends))]
        return jax.tree.unflatten(self.structure, leaves)

    def leaf(self, k: int, records: np.ndarray) -> np.ndarray:
        """Returns leaf `k` of records, [K, ...]."""
        start, end = self.span(k)
        return self.from_bytes(k, records[:, start:end])

    def from_bytes(self, k: int, column: np.ndarray) -> np.ndarray:
        """Returns leaf `k` from its bytes, uint8 [K, bytes]."""
        flat = np.ascontiguousarray(column).view(self.dtypes[k])
        return flat.reshape(len(column), *self.shapes[k])

    def span(self, k: int) -> tuple[int, int]:
        """Returns the first byte of leaf `k` in a record, and the byte after its last."""
        return (0, *self.ends)[k], self.ends[k]


def record_layout(row: PyTree) -> RecordLayout:
    """Returns the layout of records for a tree of one client's arrays, or of their shapes."""
    leaves = jax.tree.leaves(row)
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    dtypes = tuple(np.dtype(leaf.dtype) for leaf in leaves)
    sizes = [int(np.prod(s)) * d.itemsize for s, d in zip(shapes, dtypes, strict=True)]
    return RecordLayout(
        structure=jax.tree.structure(row),
        shapes=shapes,
        dtypes=dtypes,
        ends=tuple(np.cumsum(sizes).tolist()),
    )
