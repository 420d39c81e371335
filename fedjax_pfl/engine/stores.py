"""What stays with clients, where it is not on a device: in this machine's memory, or in a file.

A client's arrays lie one behind the other as one record. All begin with the same one, and only
those that have been written take space. A run's best state is kept beside it as those records
that have changed since.
"""

import contextlib
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.errors import UsageError, removed
from fedjax_pfl.engine import spread

PyTree = Any
_BLOCK = 1 << 26  # bytes of memory that are taken at a time
_AT_ONCE = 1 << 26  # bytes that are read at a time, where all clients' are


class Form(NamedTuple):
    """How a client's arrays lie in its record."""

    tree: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    ends: tuple[int, ...]  # in bytes

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0

    def pack(self, rows: PyTree) -> np.ndarray:
        """Stacked arrays as records, uint8 [K, size]."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(rows)]
        number = len(leaves[0]) if leaves else 0
        records = np.empty((number, self.size), np.uint8)
        for leaf, dtype, (start, end) in zip(leaves, self.dtypes, self._parts(), strict=True):
            assert leaf.dtype == dtype
            flat = np.ascontiguousarray(leaf).reshape(number, -1)
            records[:, start:end] = flat.view(np.uint8)
        return records

    def unpack(self, records: np.ndarray) -> PyTree:
        """The inverse."""
        return jax.tree.unflatten(self.tree, [self.leaf(k, records) for k in range(len(self.ends))])

    def leaf(self, k: int, records: np.ndarray) -> np.ndarray:
        """One of the arrays in records."""
        start, end = self._parts()[k]
        part = np.ascontiguousarray(records[:, start:end])
        return part.view(self.dtypes[k]).reshape(len(records), *self.shapes[k])

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

    def read(self, slots: np.ndarray) -> np.ndarray:
        found = np.empty((len(slots), self.size), np.uint8)
        for block, here, within in self._by_block(slots):
            found[here] = block[within]
        return found

    def write(self, slots: np.ndarray, records: np.ndarray) -> None:
        for _ in range(len(self.blocks), 1 + int(slots.max()) // self.each):
            self.blocks.append(np.empty((self.each, self.size), np.uint8))
        for block, here, within in self._by_block(slots):
            block[within] = records[here]

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

    def read(self, slots: np.ndarray) -> np.ndarray:
        found = np.empty((len(slots), self.size), np.uint8)
        for n, slot in enumerate(slots.tolist()):
            into, at = memoryview(found[n]), 0
            while at < self.size:  # no more than 2 GiB come at once
                got = os.preadv(self.file, [into[at:]], slot * self.size + at)
                if not got:
                    raise UsageError("the file of what stays with clients has been cut short")
                at += got
        return found

    def write(self, slots: np.ndarray, records: np.ndarray) -> None:
        with _writable(None):
            for record, slot in zip(records, slots.tolist(), strict=True):
                at = 0
                while at < self.size:
                    at += os.pwrite(self.file, record[at:], slot * self.size + at)


@contextlib.contextmanager
def _writable(folder: Path | None) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise removed(folder) from error
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
        self.first = self.form.pack(jax.tree.map(lambda leaf: np.asarray(leaf)[None], first))
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

    def records(self, ids: np.ndarray) -> np.ndarray:
        """uint8 [K, size]."""
        slots = self.slot[ids]
        if not self.form.size:
            return np.empty((len(ids), 0), np.uint8)
        found = np.empty((len(ids), self.form.size), np.uint8)
        there = slots >= 0
        found[~there] = self.first
        if there.any():
            assert self.space is not None
            found[there] = self.space.read(slots[there])
        return found

    def put(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Write those of some clients, each of which is named once."""
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
    """All that stays with clients: `State.clients` where they are not on a device."""

    def __init__(self, groups: Sequence[Rows], several: bool) -> None:
        """`several`: an algorithm has a tuple of groups, and not just one."""
        self.groups, self.several = tuple(groups), several
        self.best: Snapshot | None = None  # of an earlier round, which has to stay as it is
        self.described: Any = None  # where it was last saved

    def records(self, g: int, ids: np.ndarray) -> np.ndarray:
        """Those of some clients of a group."""
        return self.groups[g].records(ids)

    def write(self, g: int, ids: np.ndarray, rows: PyTree) -> None:
        """Write some clients' arrays, each named once."""
        if self.groups[g].form.size and len(ids):
            self.put(g, ids, self.groups[g].form.pack(rows))

    def put(self, g: int, ids: np.ndarray, records: np.ndarray) -> None:
        """As `write`, of records."""
        if self.best is not None:
            self.best.before(g, ids)
        self.groups[g].put(ids, records)

    def snapshot(self) -> "Snapshot":
        """All of it as it is now, in the place of an earlier snapshot."""
        self.best = Snapshot(self)
        return self.best

    def read(self, g: int, ids: np.ndarray) -> PyTree:
        """Some clients' arrays, stacked."""
        return self.groups[g].form.unpack(self.records(g, ids))

    def column(self, g: int, k: int) -> np.ndarray:
        """One leaf of all clients, [N, ...]."""
        rows, form = self.groups[g], self.groups[g].form
        first = form.leaf(k, rows.first)
        whole = np.repeat(first, rows.clients, 0)
        for some in rows.blocks(self.written(g)):
            whole[some] = form.leaf(k, self.records(g, some))
        return whole

    def written(self, g: int) -> np.ndarray:
        """Those of a group who do not have what all began with."""
        return self.groups[g].written()

    def kept(self) -> int:
        """Bytes of what has been written."""
        return sum(rows.number * rows.form.size for rows in self.groups)

    def shapes(self) -> PyTree:
        """Those of all of it, as `State.clients` has them on a device."""

        def of(rows: Rows) -> PyTree:
            each = zip(rows.form.shapes, rows.form.dtypes, strict=True)
            leaves = [jax.ShapeDtypeStruct((rows.clients, *shape), d) for shape, d in each]
            return jax.tree.unflatten(rows.form.tree, leaves)

        found = tuple(map(of, self.groups))
        return found if self.several else found[0]

    def whole(self) -> PyTree:
        """All of it as NumPy arrays of all clients."""
        found = tuple(
            jax.tree.unflatten(
                rows.form.tree, [self.column(g, k) for k in range(len(rows.form.shapes))]
            )
            for g, rows in enumerate(self.groups)
        )
        return found if self.several else found[0]


class Snapshot(Clients):
    """Clients as they were: what has changed since is kept."""

    def __init__(self, now: Clients) -> None:
        super().__init__([rows.like() for rows in now.groups], now.several)
        self.now = now

    def before(self, g: int, ids: np.ndarray) -> None:
        """Keep those of clients who are about to change."""
        ids = ids[self.groups[g].slot[ids] < 0]
        self.groups[g].put(ids, self.now.groups[g].records(ids))

    def records(self, g: int, ids: np.ndarray) -> np.ndarray:
        found = self.groups[g].records(ids)
        same = self.groups[g].slot[ids] < 0
        found[same] = self.now.groups[g].records(ids[same])
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
        return state._replace(clients=state.clients.whole())
    return spread.gathered(state)
