"""What a checkpoint holds of clients that are in a store: those that changed since the last one.

A checkpoint's description lists parts of files, in order; the last part that has a client counts. A
file is written whole before the checkpoint that needs it, has a digest in its description, and is
removed when no checkpoint needs it any more. When half of what the parts hold is out of date, all
of it is written anew.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import PyTree
from fedjax_pfl.runs.checkpoints import DamagedError
from fedjax_pfl.simulation.stores import ClientStore, RowStore, Snapshot

_READ = 1 << 26  # bytes at a time


class Part(NamedTuple):
    """Clients of one group in a file: their ids, and then their records."""

    file: str
    at: int  # in bytes
    group: int
    number: int


class Described(NamedTuple):
    """What a checkpoint needs; plain data."""

    state: list[Part]
    best: list[Part] | None  # of those that have changed since the best round; None: there is none
    first: list[Part]  # one record, of what all began with, of each group
    files: dict[str, str]  # digests


def described(plain: Any) -> Described:
    """What `_asdict` was saved from."""
    state, best, first, files = (plain[name] for name in Described._fields)

    def parts(listed: Any) -> list[Part]:
        return [Part(*one) for one in listed]

    return Described(parts(state), None if best is None else parts(best), parts(first), files)


class _Writer:
    """A file and its digest."""

    def __init__(self, path: Path) -> None:
        self.path, self.part = path, path.with_name(path.name + ".part")
        self.file, self.digest, self.at = open(self.part, "wb"), hashlib.sha256(), 0  # noqa: SIM115

    def write(self, array: np.ndarray) -> None:
        content = np.ascontiguousarray(array).data
        self.file.write(content)
        self.digest.update(content)
        self.at += array.nbytes

    def put(self, g: int, blocks: Iterable[np.ndarray], ids: np.ndarray, records: Any) -> Part:
        """Ids and records of some clients, fetched block by block."""
        at = self.at
        self.write(ids.astype(np.int32))
        for some in blocks:
            self.write(records(some))
        return Part(self.path.name, at, g, len(ids))

    def end(self) -> str:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.part, self.path)
        return self.digest.hexdigest()


def write(folder: Path, name: str, clients: ClientStore, best: Snapshot | None) -> Described:
    """Write what has changed since the last checkpoint that `done` was called of."""
    folder.mkdir(exist_ok=True)
    before: Described | None = clients.saved
    writer = _Writer(folder / f"{name}.rows")
    try:
        first = [
            writer.put(g, [np.zeros(0)], np.zeros(1), lambda _, rows=rows: rows.first)
            for g, rows in enumerate(clients.groups)
        ]
        state = _changed(writer, clients.groups, before.state if before else [])
        same = before is not None and best is not None and best.saved is before
        overlay = None
        if best is not None:
            overlay = _changed(writer, best.groups, (before.best or []) if same and before else [])
        digest = writer.end()
    except BaseException:
        writer.file.close()
        writer.part.unlink(missing_ok=True)
        raise
    known = {**(before.files if before else {}), writer.path.name: digest}
    used = {part.file for part in (*state, *(overlay or ()), *first)}
    return Described(state, overlay, first, {file: known[file] for file in sorted(used)})


def _changed(writer: _Writer, groups: Iterable[RowStore], listed: list[Part]) -> list[Part]:
    """The parts of a state's groups, of which those are written that have changed."""
    parts = []
    for g, rows in enumerate(groups):
        own = [part for part in listed if part.group == g]
        ids = np.flatnonzero(rows.changed)
        if sum(part.number for part in own) + len(ids) > 2 * max(1, rows.count):
            own, ids = [], rows.written()
        if len(ids) and rows.layout.size:
            own.append(writer.put(g, rows.blocks(ids), ids, rows.records))
        parts += own
    return parts


def done(clients: ClientStore, best: Snapshot | None, now: Described) -> None:
    """The checkpoint is whole: what changes from here on is what the next one has to hold."""
    for each in (clients, best):
        if each is not None:
            each.saved = now
            for rows in each.groups:
                rows.changed[:] = False


def clear(folder: Path, needed: Iterable[Iterable[str]]) -> None:
    """Remove files that no checkpoint needs, of those that there are."""
    names = {file for files in needed for file in files}
    for path in folder.glob("*.rows*"):
        if path.name not in names:
            path.unlink(missing_ok=True)


def check(folder: Path, now: Described) -> None:
    """DamagedError where a file is not what was written."""
    for name, digest in now.files.items():
        try:
            with open(folder / name, "rb") as file:
                same = hashlib.file_digest(file, "sha256").hexdigest() == digest
        except OSError as error:
            raise DamagedError(f"{name} cannot be read ({error.strerror})") from error
        if not same:
            raise DamagedError(f"{name} is not what was written")


def read(
    folder: Path,
    now: Described,
    each: Sequence[PyTree],
    several: bool,
    make: Callable[..., RowStore],
    offload: Sequence[str] = (),
) -> tuple[ClientStore, Snapshot | None]:
    """The clients, and those of the best round; files must have been checked.

    Args:
      each: Shapes of client-side state of each group, [N, ...], and of the offloaded rows.
      make: from what all begin with to RowStore.
    """
    groups = []
    for g, shapes in enumerate(each):
        one = jax.tree.map(lambda s: np.zeros(s.shape[1:], s.dtype), shapes)
        rows = make(one)
        if rows.layout.size:
            ((_, record),) = _records(folder, now.first, g, rows.layout.size)
            rows = make(trees.row(rows.layout.unpack(record), 0))
            _fill(folder, now.state, g, rows)
        groups.append(rows)
    clients, best = ClientStore(groups, several, offload), None
    if now.best is not None:
        best = clients.snapshot()
        for g, rows in enumerate(best.groups):
            _fill(folder, now.best, g, rows)
    done(clients, best, now)
    return clients, best


def _fill(folder: Path, listed: list[Part], g: int, rows: RowStore) -> None:
    for ids, records in _records(folder, listed, g, rows.layout.size):
        rows.put(ids, records)


def _records(
    folder: Path, listed: list[Part], g: int, size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ids and records of a group, in the order in which they were written."""
    for part in listed:
        if part.group != g or not size:
            continue
        with open(folder / part.file, "rb") as file:
            file.seek(part.at)
            ids = np.frombuffer(file.read(4 * part.number), np.int32)
            step = max(1, _READ // size)
            for start in range(0, part.number, step):
                some = ids[start : start + step]
                content = np.frombuffer(file.read(len(some) * size), np.uint8)
                yield some, content.reshape(len(some), size)
