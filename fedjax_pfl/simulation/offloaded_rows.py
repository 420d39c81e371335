"""A method's rows off the devices: what its programs see of them, and what a round writes there."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core import groups, offload
from fedjax_pfl.core.algorithm import Algorithm, PyTree, State
from fedjax_pfl.simulation.stores import Clients


def names(algorithm: Algorithm) -> tuple[str, ...]:
    """The parts of an algorithm's rows that may lie off the devices."""
    return () if groups.has_groups(algorithm) else algorithm.offload


def apart(algorithm: Algorithm, state: State) -> tuple[State, tuple[PyTree, ...]]:
    """What is on the devices of a state, and what is not: clients by group, and those parts."""
    rows, parts = offload.split_parts(state.rows, names(algorithm))
    return State(state.server, rows, ()), (
        *groups.wrap_clients(algorithm, state).clients,
        *parts.values(),
    )


class Source:
    """One part's rows, of the clients that it is pointed at: `offload.Source`."""

    def __init__(self, g: int, clients: Clients) -> None:
        """g: its number among what is kept of clients."""
        self.g, self.clients = g, clients

    def read(self, leaves: Sequence[int], ids: np.ndarray) -> list[np.ndarray]:
        """Of some leaves the rows `ids`, [*ids.shape, ...]; of an id above all the last, as JAX."""
        rows = self.clients.groups[self.g]
        flat = np.minimum(ids.reshape(-1), rows.clients - 1)
        if len(leaves) == len(rows.form.shapes):  # a record is read at once
            records = self.clients.records(self.g, flat)
            each = [rows.form.leaf(k, records) for k in leaves]
        else:
            each = [self.clients.leaf(self.g, k, flat) for k in leaves]
        return [leaf.reshape(*ids.shape, *leaf.shape[1:]) for leaf in each]


class Written(NamedTuple):
    """Rows of one part."""

    ids: list[Any]  # int32 [K] of each leaf; those out of range are none
    leaves: list[Any]  # [K, ...]


class OffloadedRows:
    """The parts of a method's rows that lie with clients that are off the devices."""

    def __init__(self, clients: Clients) -> None:
        """Of clients of this form; which ones, `point` says."""
        own = len(clients.groups) - len(clients.offload)
        self.sources = {name: Source(g, clients) for g, name in enumerate(clients.offload, own)}

    def point(self, clients: Clients) -> None:
        """From here on it is these whose rows are read."""
        for source in self.sources.values():
            source.clients = clients

    def seen(self, rows: PyTree, number: int = 1) -> PyTree:
        """In a program: rows as the method knows them, of which so many can be written."""
        return offload.join_parts(
            rows, {name: self._leaves(s, number) for name, s in self.sources.items()}
        )

    def _leaves(self, source: Source, number: int) -> PyTree:
        whole = source.clients.groups[source.g]
        none = jnp.full(number, whole.clients, jnp.int32)

        def leaf(k: int) -> offload.Offloaded:
            shape, dtype = whole.form.shapes[k], whole.form.dtypes[k]
            values = jnp.zeros((number, *shape), dtype)
            return offload.Offloaded(source, k, (whole.clients, *shape), dtype, none, values)

        return jax.tree.unflatten(whole.form.tree, list(map(leaf, range(len(whole.form.shapes)))))

    def taken(self, rows: PyTree) -> tuple[PyTree, dict[str, Written]]:
        """In a program: the rest of the rows, and what is to be written of the parts."""
        rest, parts = offload.split_parts(rows, tuple(self.sources))
        found = {}
        for name, part in parts.items():
            leaves = offload.offloaded_leaves(part)
            found[name] = Written([x.ids for x in leaves], [x.values for x in leaves])
        return rest, found

    def write(self, clients: Clients, written: dict[str, Written]) -> None:
        """What `taken` found, in NumPy arrays."""
        for name, (each, leaves) in written.items():
            g = self.sources[name].g
            n = clients.groups[g].clients
            ids = each[0]
            if all((ids < n).all() and np.array_equal(ids, one) for one in each):
                clients.write(g, ids, leaves)
                continue
            # Some are not there, or only some leaves have been written: the others stay.
            ids = np.unique(np.concatenate([one[one < n] for one in each]))
            kept = jax.tree.leaves(clients.read(g, ids))
            for whole, one, leaf in zip(kept, each, leaves, strict=True):
                whole[np.searchsorted(ids, one[one < n])] = leaf[one < n]
            clients.write(g, ids, kept)
