"""Off-device storage of per-client arrays, in memory or in a file.

The arrays of a client are packed into one record of bytes. All clients start with the same record,
so only records that have been written use space. The best state of a run is stored as the records
that have changed since.
"""

import contextlib
import copy
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_pfl.core import offload
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.errors import UsageError, removed_directory
from fedjax_pfl.simulation import spread
from fedjax_pfl.simulation.record_layout import record_layout

PyTree = Any
_ALLOCATION = 1 << 26  # bytes of memory allocated at a time
_READ_BLOCK = 1 << 26  # bytes read at a time if the rows of all clients are read
_MAX_BUFFERS = 1000  # buffers of one system call


class _Memory:
    """Records of equal size in memory, at numbered slots, allocated in blocks when written."""

    def __init__(self, size: int) -> None:
        """Creates empty storage for records of `size` bytes."""
        self.block_length, self.size = max(1, _ALLOCATION // size), size
        self.blocks: list[np.ndarray] = []

    def read(self, slots: np.ndarray, start: int, end: int) -> np.ndarray:
        """Returns bytes `start` to `end` of the records in `slots` [K], uint8 [K, end - start]."""
        records = np.empty((len(slots), end - start), np.uint8)
        for block, selected, offsets in self._by_block(slots):
            records[selected] = block[offsets, start:end]
        return records

    def write(self, slots: np.ndarray, columns: Sequence[np.ndarray]) -> None:
        """Writes the records of `slots` [K], given as consecutive parts, uint8 [K, bytes]."""
        for _ in range(len(self.blocks), 1 + int(slots.max()) // self.block_length):
            self.blocks.append(np.empty((self.block_length, self.size), np.uint8))
        for block, selected, offsets in self._by_block(slots):
            start = 0
            for column in columns:
                end = start + column.shape[1]
                block[offsets, start:end] = column[selected]
                start = end

    def _by_block(self, slots: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yields each block, a mask of the slots in it, and their positions in it."""
        numbers, offsets = np.divmod(slots, self.block_length)
        for n in np.unique(numbers):
            selected = numbers == n
            yield self.blocks[n], selected, offsets[selected]


class _File:
    """Records of equal size in a file without a name, which ends with the process."""

    def __init__(self, size: int, folder: Path | None) -> None:
        """Creates a file for records of `size` bytes. Default folder: that of temporary files."""
        self.size = size
        with _writable(folder):
            self.file, path = tempfile.mkstemp(dir=folder)
            weakref.finalize(self, os.close, self.file)
            os.unlink(path)

    def read(self, slots: np.ndarray, start: int, end: int) -> np.ndarray:
        """Returns bytes `start` to `end` of the records in `slots` [K], uint8 [K, end - start].

        Raises UsageError if the file is truncated.
        """
        records = np.empty((len(slots), end - start), np.uint8)
        for n, slot in enumerate(slots.tolist()):
            buffer, position = memoryview(records[n]), 0
            while position < end - start:  # one call reads at most 2 GiB
                offset = slot * self.size + start + position
                count = os.preadv(self.file, [buffer[position:]], offset)
                if not count:
                    raise UsageError("the file with client-side state is truncated; run again")
                position += count
        return records

    def write(self, slots: np.ndarray, columns: Sequence[np.ndarray]) -> None:
        """Writes the records of `slots` [K], given as consecutive parts, uint8 [K, bytes]."""
        columns = columns if len(columns) <= _MAX_BUFFERS else [np.concatenate(columns, 1)]
        with _writable(None):
            for n, slot in enumerate(slots.tolist()):
                buffers, start = [column[n] for column in columns], slot * self.size
                position = os.pwritev(self.file, buffers, start)
                while position < self.size:  # one call writes at most 2 GiB
                    remainder = np.concatenate(buffers)[position:].data
                    position += os.pwrite(self.file, remainder, start + position)


@contextlib.contextmanager
def _writable(folder: Path | None) -> Iterator[None]:
    """Turns a failure to write in the context into a UsageError that names the folder."""
    try:
        yield
    except FileNotFoundError as error:
        raise removed_directory(folder) from error
    except OSError as error:
        place = folder or tempfile.gettempdir()
        raise UsageError(
            f"store=disk cannot write client-side state ({error.strerror}; in {place} or the run's "
            "directory); free disk space there and run the same command again"
        ) from error


class RowStore:
    """Per-client arrays of one architecture group, or of one offloaded field of `State.rows`.

    Starts with the same arrays for every client.

    Args:
      first: Arrays of one client.
      clients: Number of clients.
      store: "host" or "disk".
      folder: Folder of the file for "disk". Default: the folder of temporary files.
    """

    def __init__(self, first: PyTree, clients: int, store: str, folder: Path | None = None) -> None:
        self.layout = record_layout(first)
        row = self.layout.pack(jax.tree.map(lambda leaf: np.asarray(leaf)[None], first))
        self.first = row.reshape(1, self.layout.size)  # also if there are no arrays
        self.store, self.folder = store, folder
        self.slot = np.full(clients, -1, np.int32)  # slot of each client's record; -1: not written
        self.space = self._new_space()
        self.count = 0  # written records
        self.changed = np.zeros(clients, bool)  # since the last checkpoint

    def _new_space(self) -> "_Memory | _File | None":
        """Returns empty space for records, or None if records have no bytes."""
        size = self.layout.size
        if not size:
            return None
        return _File(size, self.folder) if self.store == "disk" else _Memory(size)

    @property
    def clients(self) -> int:
        """Returns the number of clients."""
        return len(self.slot)

    def records(self, ids: np.ndarray, start: int = 0, end: int | None = None) -> np.ndarray:
        """Returns bytes `start` to `end` of some clients' records, uint8 [K, end - start].

        Default: whole records. `ids` are client ids [K].
        """
        slots, end = self.slot[ids], self.layout.size if end is None else end
        records = np.empty((len(ids), end - start), np.uint8)
        is_written = slots >= 0
        records[~is_written] = self.first[:, start:end]
        if is_written.any() and end > start:
            assert self.space is not None
            records[is_written] = self.space.read(slots[is_written], start, end)
        return records

    def put(self, ids: np.ndarray, *columns: np.ndarray) -> None:
        """Writes the records of some clients.

        Args:
          ids: Distinct client ids, [K].
          *columns: Records, uint8 [K, size], or consecutive columns of them.
        """
        if self.space is None or not len(ids):
            return
        new = ids[self.slot[ids] < 0]
        self.slot[new] = np.arange(self.count, self.count + len(new), dtype=np.int32)
        self.count += len(new)
        self.space.write(self.slot[ids], columns)
        self.changed[ids] = True

    def read(self, ids: np.ndarray) -> PyTree:
        """Returns the arrays of some clients, leaves of shape [K, ...]."""
        return self.layout.unpack(self.records(ids))

    def written(self) -> np.ndarray:
        """Returns the ids of clients whose record has been written."""
        return np.flatnonzero(self.slot >= 0)

    def blocks(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """Yields blocks of ids whose records use little memory, in order."""
        step = max(1, _READ_BLOCK // max(1, self.layout.size))
        return (ids[start : start + step] for start in range(0, len(ids), step))

    def empty_copy(self) -> "RowStore":
        """Returns a store with the same first record and nothing written."""
        first = jax.tree.map(lambda leaf: leaf[0], self.layout.unpack(self.first))
        return RowStore(first=first, clients=self.clients, store=self.store, folder=self.folder)


class ClientStore:
    """Off-device storage of `State.clients` and of the offloaded parts of `State.rows`.

    The argument `g` of the methods is an index into `groups`.

    Args:
      groups: Rows of each architecture group, then of each offloaded part.
      has_groups: True if `State.clients` is a tuple of groups.
      offload: Names of the offloaded parts of `State.rows`.
    """

    def __init__(
        self, groups: Sequence[RowStore], has_groups: bool, offload: Sequence[str] = ()
    ) -> None:
        self.groups, self.has_groups, self.offload = tuple(groups), has_groups, tuple(offload)
        self.best: Snapshot | None = None  # the state of an earlier round
        self.saved: Any = None  # files of the last checkpoint
        self.writes = 0  # number of calls of `put`
        self.is_used_up = False  # a later state has written to the same rows

    def records(
        self, g: int, ids: np.ndarray, start: int = 0, end: int | None = None
    ) -> np.ndarray:
        """Returns bytes `start` to `end` of some clients' records, uint8 [K, end - start].

        Default: whole records. `ids` are client ids [K], `g` is an index into `groups`.
        """
        return self.groups[g].records(ids, start, end)

    def write(self, g: int, ids: np.ndarray, rows: PyTree) -> None:
        """Writes the arrays of some clients with distinct ids, leaves of shape [K, ...]."""
        if self.groups[g].layout.size and len(ids):
            self.put(g, ids, *self.groups[g].layout.to_bytes(rows))

    def put(self, g: int, ids: np.ndarray, *columns: np.ndarray) -> None:
        """Writes records, like `RowStore.put`, after `best` has copied the old ones."""
        if self.best is not None:
            self.best.save(g, ids)
        self.groups[g].put(ids, *columns)
        self.writes += 1

    def hand_over(self) -> "ClientStore":
        """Marks this store as used up. Returns a store of the same rows, for the next state."""
        successor = copy.copy(self)
        self.is_used_up = True
        return successor

    def snapshot(self) -> "Snapshot":
        """Returns a snapshot of the current state, which replaces an earlier snapshot."""
        self.best = Snapshot(self)
        return self.best

    def read(self, g: int, ids: np.ndarray) -> PyTree:
        """Returns the arrays of some clients, leaves of shape [K, ...]."""
        return self.groups[g].layout.unpack(self.records(g, ids))

    def leaf(self, g: int, k: int, ids: np.ndarray) -> np.ndarray:
        """Returns leaf `k` of some clients, [K, ...]."""
        layout = self.groups[g].layout
        return layout.from_bytes(k, self.records(g, ids, *layout.span(k)))

    def column(self, g: int, k: int) -> np.ndarray:
        """Returns leaf `k` of all clients in group `g`, [N, ...]."""
        rows = self.groups[g]
        column = np.repeat(rows.layout.leaf(k, rows.first), rows.clients, 0)
        for ids in rows.blocks(self.written(g)):
            column[ids] = self.leaf(g, k, ids)
        return column

    def written(self, g: int) -> np.ndarray:
        """Returns the ids of clients whose record has been written."""
        return self.groups[g].written()

    def written_bytes(self) -> int:
        """Returns the bytes of all written records."""
        return sum(rows.count * rows.layout.size for rows in self.groups)

    def fill(self, state: State, leaf: Callable[[int, int], Any]) -> State:
        """Returns a state with the trees of all clients and offloaded parts.

        Args:
          state: State without these.
          leaf: Maps (g, k) to the value instead of leaf `k` of group `g`.
        """
        trees = []
        for g, rows in enumerate(self.groups):
            leaves = [leaf(g, k) for k in range(len(rows.layout.shapes))]
            trees.append(jax.tree.unflatten(rows.layout.structure, leaves))
        count = len(trees) - len(self.offload)
        parts = dict(zip(self.offload, trees[count:], strict=True))
        clients = tuple(trees[:count]) if self.has_groups else trees[0]
        return State(state.server, offload.join_parts(state.rows, parts), clients)

    def shape(self, g: int, k: int) -> jax.ShapeDtypeStruct:
        """Returns the shape of leaf `k` of all clients."""
        rows = self.groups[g]
        return jax.ShapeDtypeStruct((rows.clients, *rows.layout.shapes[k]), rows.layout.dtypes[k])


class Snapshot(ClientStore):
    """The state of a `ClientStore` at its creation. Holds the records that have changed since.

    Args:
      current: The store.
    """

    def __init__(self, current: ClientStore) -> None:
        groups = [rows.empty_copy() for rows in current.groups]
        super().__init__(groups, current.has_groups, current.offload)
        self.current_groups = current.groups  # not `current`, whose `best` this is

    def save(self, g: int, ids: np.ndarray) -> None:
        """Copies records of group `g` that are about to change, unless it has done so before."""
        ids = ids[self.groups[g].slot[ids] < 0]
        self.groups[g].put(ids, self.current_groups[g].records(ids))

    def records(
        self, g: int, ids: np.ndarray, start: int = 0, end: int | None = None
    ) -> np.ndarray:
        """Returns bytes `start` to `end` of some clients' records, uint8 [K, end - start].

        They are the records at the time of the snapshot. `g` and `ids` are as for `ClientStore`.
        """
        records = self.groups[g].records(ids, start, end)
        is_unchanged = self.groups[g].slot[ids] < 0
        records[is_unchanged] = self.current_groups[g].records(ids[is_unchanged], start, end)
        return records

    def written(self, g: int) -> np.ndarray:
        """Returns the ids of clients whose record has been written."""
        return np.union1d(self.groups[g].written(), self.current_groups[g].written())


def copy_state(state: State) -> State:
    """Copies a state to NumPy arrays; a `ClientStore` becomes a `Snapshot`."""
    state = spread.gathered(state)
    clients = state.clients
    copied = State(*jax.tree.map(np.array, jax.device_get(state._replace(clients=()))))
    if isinstance(clients, ClientStore):
        return copied._replace(clients=clients.snapshot())
    return copied._replace(clients=jax.tree.map(np.array, jax.device_get(clients)))


def to_arrays(state: State) -> State:
    """Returns a state with arrays [N, ...] instead of a `ClientStore` or of `Spread` parts."""
    if isinstance(state.clients, ClientStore):
        return state.clients.fill(state, state.clients.column)
    return spread.gathered(state)
