"""Offloaded parts of a method's rows: how programs read them, and what a round writes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core import groups, offload
from fedjax_pfl.core.algorithm import Algorithm, PyTree, State
from fedjax_pfl.simulation.stores import ClientStore


def part_names(algorithm: Algorithm) -> tuple[str, ...]:
    """Returns the names of the fields of `State.rows` that can be stored off the device."""
    return () if groups.has_groups(algorithm) else algorithm.offload


def split_state(algorithm: Algorithm, state: State) -> tuple[State, tuple[PyTree, ...]]:
    """Splits a state into the part on the devices and the offloaded trees.

    Returns the state with () for the clients and the offloaded parts of the rows, and a tuple of
    trees with leaves [N, ...]: the client-side state of each architecture group, then the parts.
    """
    rows, parts = offload.split_parts(state.rows, part_names(algorithm))
    clients = groups.wrap_clients(algorithm, state).clients
    return State(state.server, rows, ()), (*clients, *parts.values())


class PartSource:
    """An offloaded field of `State.rows` in a store. Implements `offload.Source`.

    Args:
      g: Index of the field's rows in `clients.groups`.
      clients: The store; it may be replaced later.
    """

    def __init__(self, g: int, clients: ClientStore) -> None:
        self.g, self.clients = g, clients

    def read(self, leaves: Sequence[int], ids: np.ndarray) -> list[np.ndarray]:
        """Returns rows `ids` of the leaves with these indices, each [*ids.shape, ...].

        An id out of range reads the last row, as in JAX.
        """
        rows = self.clients.groups[self.g]
        flat = np.minimum(ids.reshape(-1), rows.clients - 1)
        if len(leaves) == len(rows.layout.shapes):  # one read for all leaves
            records = self.clients.records(self.g, flat)
            arrays = [rows.layout.leaf(k, records) for k in leaves]
        else:
            arrays = [self.clients.leaf(self.g, k, flat) for k in leaves]
        return [array.reshape(*ids.shape, *array.shape[1:]) for array in arrays]


class PendingRows(NamedTuple):
    """Rows of one offloaded field of `State.rows` to write after a round."""

    ids: list[Any]  # client ids, int32 [K] for each leaf; ids out of range write nothing
    leaves: list[Any]  # values to write, [K, ...] for each leaf


class OffloadedRows:
    """The offloaded parts of a method's rows, as leaves that a program can read and write.

    Args:
      clients: The store. `set_clients` replaces it by another one of the same layout.
    """

    def __init__(self, clients: ClientStore) -> None:
        count = len(clients.groups) - len(clients.offload)
        self.sources = {
            name: PartSource(g, clients) for g, name in enumerate(clients.offload, count)
        }

    def set_clients(self, clients: ClientStore) -> None:
        """Reads from this store from now on."""
        for source in self.sources.values():
            source.clients = clients

    def join(self, rows: PyTree, capacity: int = 1) -> PyTree:
        """Returns rows whose offloaded parts have `offload.Offloaded` leaves, inside a program.

        Args:
          rows: `State.rows` with () for the offloaded parts.
          capacity: Number of rows that the program may write.
        """
        parts = {name: self._leaves(source, capacity) for name, source in self.sources.items()}
        return offload.join_parts(rows, parts)

    def _leaves(self, source: PartSource, capacity: int) -> PyTree:
        """Returns the part of a source as a tree of `offload.Offloaded` without written rows."""
        rows = source.clients.groups[source.g]
        no_ids = jnp.full(capacity, rows.clients, jnp.int32)

        def leaf(k: int) -> offload.Offloaded:
            """Returns leaf `k` without written rows."""
            shape, dtype = rows.layout.shapes[k], rows.layout.dtypes[k]
            values = jnp.zeros((capacity, *shape), dtype)
            return offload.Offloaded(
                source=source,
                k=k,
                shape=(rows.clients, *shape),
                dtype=dtype,
                ids=no_ids,
                values=values,
            )

        leaves = [leaf(k) for k in range(len(rows.layout.shapes))]
        return jax.tree.unflatten(rows.layout.structure, leaves)

    def split(self, rows: PyTree) -> tuple[PyTree, dict[str, PendingRows]]:
        """Splits the rows that a program returns.

        Returns the rows with () for the offloaded parts, and the pending writes by part name.
        """
        on_device, parts = offload.split_parts(rows, tuple(self.sources))
        pending = {}
        for name, part in parts.items():
            leaves = offload.offloaded_leaves(part)
            pending[name] = PendingRows([x.ids for x in leaves], [x.values for x in leaves])
        return on_device, pending

    def write(self, clients: ClientStore, pending: dict[str, PendingRows]) -> None:
        """Writes the pending rows that `split` returned, as NumPy arrays, to a store."""
        for name, (leaf_ids, leaves) in pending.items():
            g = self.sources[name].g
            n = clients.groups[g].clients
            ids = leaf_ids[0]
            if all((ids < n).all() and np.array_equal(ids, other) for other in leaf_ids):
                clients.write(g, ids, leaves)
                continue
            # Leaves write different rows: merge them with the stored ones.
            ids = np.unique(np.concatenate([ids[ids < n] for ids in leaf_ids]))
            merged = jax.tree.leaves(clients.read(g, ids))
            for target, changed, values in zip(merged, leaf_ids, leaves, strict=True):
                in_range = changed < n
                target[np.searchsorted(ids, changed[in_range])] = values[in_range]
            clients.write(g, ids, merged)
