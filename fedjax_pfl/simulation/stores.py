"""What there is of each client, where that is not on a device: in memory, or in a file.

A client's arrays lie one behind the other as one record. All begin with the same one, and only
those that have been written take space. A run's best state is kept beside it as those records
that have changed since.
"""

import contextlib
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.core import offload
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.errors import UsageError, removed_directory
from fedjax_pfl.simulation import spread

PyTree = Any
_BLOCK = 1 << 26  # bytes of memory that are taken at a time
_AT_ONCE = 1 << 26  # bytes that are read at a time, where all clients' are
_BUFFERS = 1000  # that a system call takes, at most


class Form(NamedTuple):
    """How a client's arrays lie in its record."""

    tree: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    ends: tuple[int, ...]  # in bytes

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0

    def parts(self, rows: PyTree) -> list[np.ndarray]:
        """Stacked arrays as what lies side by side in records, uint8 [K, ...] each; not copied."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(rows)]
        for leaf, dtype in zip(leaves, self.dtypes, strict=True):
            assert leaf.dtype == dtype
        flat = [np.ascontiguousarray(leaf).reshape(len(leaf), -1) for leaf in leaves]
        return [leaf.view(np.uint8) for leaf in flat]

    def pack(self, rows: PyTree) -> np.ndarray:
        """Stacked arrays as records, uint8 [K, size]."""
        parts = self.parts(rows)
        return np.concatenate(parts, 1) if parts else np.empty((0, 0), np.uint8)

    def unpack(self, records: np.ndarray) -> PyTree:
        """The inverse."""
        return jax.tree.unflatten(self.tree, [self.leaf(k, records) for k in range(len(self.ends))])

    def leaf(self, k: int, records: np.ndarray) -> np.ndarray:
        """One of the arrays in records."""
        start, end = self.part(k)
        return self.array(k, records[:, start:end])

    def array(self, k: int, part: np.ndarray) -> np.ndarray:
        """One of the arrays from its part of each record."""
        flat = np.ascontiguousarray(part).view(self.dtypes[k])
        return flat.reshape(len(part), *self.shapes[k])

    def part(self, k: int) -> tuple[int, int]:
        """Where it lies: from, to."""
        return self._parts()[k]

    def _parts(self) -> list[tuple[int, int]]:
        return list(zip((0, *self.ends), self.ends, strict=False))


def form(row: PyTree) -> Form:
    """That of one client's arrays; their shapes will do."""
    leaves = jax.tree.leaves(row)
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    dtypes = tuple(np.dtype(leaf.dtype) for leaf in leaves)
    sizes = [int(np.prod(s)) * d.itemsize for s, d in zip(shapes, dtypes, strict=True)]
    return Form(jax.tree.structure(row), shapes, dtypes, tuple(np.cumsum(sizes).tolist()))


class _Memory:
    """Records in memory, which grows."""

    def __init__(self, size: int) -> None:
        self.each, self.size = max(1, _BLOCK // size), size
        self.blocks: list[np.ndarray] = []

    def read(self, slots: np.ndarray, start: int, end: int) -> np.ndarray:
        found = np.empty((len(slots), end - start), np.uint8)
        for block, here, within in self._by_block(slots):
            found[here] = block[within, start:end]
        return found

    def write(self, slots: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        for _ in range(len(self.blocks), 1 + int(slots.max()) // self.each):
            self.blocks.append(np.empty((self.each, self.size), np.uint8))
        for block, here, within in self._by_block(slots):
            at = 0
            for part in parts:
                block[within, at : at + part.shape[1]] = part[here]
                at += part.shape[1]

    def _by_block(self, slots: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        number, within = np.divmod(slots, self.each)
        for n in np.unique(number):
            here = number == n
            yield self.blocks[n], here, within[here]


class _File:
    """Records in a file without a name, which is gone when the process is."""

    def __init__(self, size: int, folder: Path | None) -> None:
        self.size = size
        with _writable(folder):
            self.file, path = tempfile.mkstemp(dir=folder)
            weakref.finalize(self, os.close, self.file)
            os.unlink(path)

    def read(self, slots: np.ndarray, start: int, end: int) -> np.ndarray:
        found = np.empty((len(slots), end - start), np.uint8)
        for n, slot in enumerate(slots.tolist()):
            into, at = memoryview(found[n]), 0
            while at < end - start:  # no more than 2 GiB come at once
                got = os.preadv(self.file, [into[at:]], slot * self.size + start + at)
                if not got:
                    raise UsageError("the file of what stays with clients has been cut short")
                at += got
        return found

    def write(self, slots: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        parts = parts if len(parts) <= _BUFFERS else [np.concatenate(parts, 1)]
        with _writable(None):
            for n, slot in enumerate(slots.tolist()):
                own, start = [part[n] for part in parts], slot * self.size
                at = os.pwritev(self.file, own, start)
                while at < self.size:  # not all fitted into one call
                    at += os.pwrite(self.file, np.concatenate(own)[at:].data, start + at)


@contextlib.contextmanager
def _writable(folder: Path | None) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise removed_directory(folder) from error
    except OSError as error:
        where = folder or tempfile.gettempdir()
        raise UsageError(
            f"store=disk cannot write what stays with clients ({error.strerror}; in {where} or "
            "the run's directory); make room there and give the same command again"
        ) from error


class Rows:
    """What stays with each client of one group of architectures."""

    def __init__(self, first: PyTree, clients: int, store: str, folder: Path | None = None) -> None:
        """All begin with `first`, one client's arrays."""
        self.form = form(first)
        row = self.form.pack(jax.tree.map(lambda leaf: np.asarray(leaf)[None], first))
        self.first = row.reshape(1, self.form.size)  # also where there is nothing
        self.store, self.folder = store, folder
        self.slot = np.full(clients, -1, np.int32)
        self.space = self._new_space()
        self.number = 0  # of records that are written
        self.changed = np.zeros(clients, bool)  # since somebody last looked

    def _new_space(self) -> "_Memory | _File | None":
        if not self.form.size:
            return None
        return (
            _File(self.form.size, self.folder) if self.store == "disk" else _Memory(self.form.size)
        )

    @property
    def clients(self) -> int:
        return len(self.slot)

    def records(self, ids: np.ndarray, start: int = 0, end: int | None = None) -> np.ndarray:
        """uint8 [K, size], or of each record the bytes from `start` to `end`."""
        slots, end = self.slot[ids], self.form.size if end is None else end
        found = np.empty((len(ids), end - start), np.uint8)
        there = slots >= 0
        found[~there] = self.first[:, start:end]
        if there.any() and end > start:
            assert self.space is not None
            found[there] = self.space.read(slots[there], start, end)
        return found

    def put(self, ids: np.ndarray, *records: np.ndarray) -> None:
        """Write those of some clients, each of which is named once; parts that lie side by side."""
        if self.space is None or not len(ids):
            return
        new = ids[self.slot[ids] < 0]
        self.slot[new] = np.arange(self.number, self.number + len(new), dtype=np.int32)
        self.number += len(new)
        self.space.write(self.slot[ids], records)
        self.changed[ids] = True

    def read(self, ids: np.ndarray) -> PyTree:
        """Some clients' arrays, stacked."""
        return self.form.unpack(self.records(ids))

    def written(self) -> np.ndarray:
        """The ids of those whose arrays are not the first."""
        return np.flatnonzero(self.slot >= 0)

    def blocks(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """As many at a time as take little memory."""
        step = max(1, _AT_ONCE // max(1, self.form.size))
        return (ids[start : start + step] for start in range(0, len(ids), step))

    def like(self) -> "Rows":
        """The same without anything written."""
        return Rows(
            jax.tree.map(lambda leaf: leaf[0], self.form.unpack(self.first)),
            self.clients,
            self.store,
            self.folder,
        )


class Clients:
    """Off-device storage of `State.clients` and of the offloaded parts of `State.rows`."""

    def __init__(self, groups: Sequence[Rows], several: bool, offload: Sequence[str] = ()) -> None:
        """Wraps stored rows.

        Args:
          groups: Rows of each architecture group, then of each offloaded part.
          several: True if the algorithm has a tuple of groups.
          offload: Names of the offloaded parts of `State.rows`.
        """
        self.groups, self.several, self.offload = tuple(groups), several, tuple(offload)
        self.best: Snapshot | None = None  # of an earlier round, which has to stay as it is
        self.described: Any = None  # where it was last saved

    def records(
        self, g: int, ids: np.ndarray, start: int = 0, end: int | None = None
    ) -> np.ndarray:
        """Those of some clients of a group, or a part of each."""
        return self.groups[g].records(ids, start, end)

    def write(self, g: int, ids: np.ndarray, rows: PyTree) -> None:
        """Write some clients' arrays, each named once."""
        if self.groups[g].form.size and len(ids):
            self.put(g, ids, *self.groups[g].form.parts(rows))

    def put(self, g: int, ids: np.ndarray, *records: np.ndarray) -> None:
        """As `write`, of records or the parts of them."""
        if self.best is not None:
            self.best.before(g, ids)
        self.groups[g].put(ids, *records)

    def snapshot(self) -> "Snapshot":
        """All of it as it is now, in the place of an earlier snapshot."""
        self.best = Snapshot(self)
        return self.best

    def read(self, g: int, ids: np.ndarray) -> PyTree:
        """Some clients' arrays, stacked."""
        return self.groups[g].form.unpack(self.records(g, ids))

    def leaf(self, g: int, k: int, ids: np.ndarray) -> np.ndarray:
        """One of their arrays."""
        form = self.groups[g].form
        return form.array(k, self.records(g, ids, *form.part(k)))

    def column(self, g: int, k: int) -> np.ndarray:
        """One leaf of all clients, [N, ...]."""
        rows, form = self.groups[g], self.groups[g].form
        first = form.leaf(k, rows.first)
        whole = np.repeat(first, rows.clients, 0)
        for some in rows.blocks(self.written(g)):
            whole[some] = self.leaf(g, k, some)
        return whole

    def written(self, g: int) -> np.ndarray:
        """Those of a group who do not have what all began with."""
        return self.groups[g].written()

    def kept(self) -> int:
        """Bytes of what has been written."""
        return sum(rows.number * rows.form.size for rows in self.groups)

    def filled(self, state: State, leaf: Callable[[int, int], Any]) -> State:
        """A state whose clients these are, with leaf(group, number) in the place of each of theirs.

        The parts of its rows that are offload come back to their places, too.
        """
        found = []
        for g, rows in enumerate(self.groups):
            leaves = [leaf(g, k) for k in range(len(rows.form.shapes))]
            found.append(jax.tree.unflatten(rows.form.tree, leaves))
        own = len(found) - len(self.offload)
        parts = dict(zip(self.offload, found[own:], strict=True))
        clients = tuple(found[:own]) if self.several else found[0]
        return State(state.server, offload.join_parts(state.rows, parts), clients)

    def shape(self, g: int, k: int) -> jax.ShapeDtypeStruct:
        """That of a leaf of all clients."""
        rows = self.groups[g]
        return jax.ShapeDtypeStruct((rows.clients, *rows.form.shapes[k]), rows.form.dtypes[k])


class Snapshot(Clients):
    """Clients as they were: what has changed since is kept."""

    def __init__(self, now: Clients) -> None:
        super().__init__([rows.like() for rows in now.groups], now.several, now.offload)
        self.now = now

    def before(self, g: int, ids: np.ndarray) -> None:
        """Keep those of clients who are about to change."""
        ids = ids[self.groups[g].slot[ids] < 0]
        self.groups[g].put(ids, self.now.groups[g].records(ids))

    def records(
        self, g: int, ids: np.ndarray, start: int = 0, end: int | None = None
    ) -> np.ndarray:
        found = self.groups[g].records(ids, start, end)
        same = self.groups[g].slot[ids] < 0
        found[same] = self.now.groups[g].records(ids[same], start, end)
        return found

    def written(self, g: int) -> np.ndarray:
        return np.union1d(self.groups[g].written(), self.now.groups[g].written())


def copied(state: State) -> State:
    """A state in NumPy arrays that stays as it is; clients elsewhere as a snapshot of them."""
    state = spread.gathered(state)
    clients = state.clients
    kept = State(*jax.tree.map(np.array, jax.device_get(state._replace(clients=()))))
    if isinstance(clients, Clients):
        return kept._replace(clients=clients.snapshot())
    return kept._replace(clients=jax.tree.map(np.array, jax.device_get(clients)))


def arrays(state: State) -> State:
    """A state with arrays of all clients, wherever they lie."""
    if isinstance(state.clients, Clients):
        return state.clients.filled(state, state.clients.column)
    return spread.gathered(state)
