"""Checkpoints of off-device client state: each writes only the rows that have changed.

The description of a checkpoint lists parts of files. If several parts have a row of the same
client, the last one counts. A file is written before the checkpoint that needs it, has a digest in
the description, and is removed when no checkpoint needs it any more. All rows are written again
when half of the rows in the parts are out of date.
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

_READ_BLOCK = 1 << 26  # bytes read at a time


class Part(NamedTuple):
    """A place in a file with the rows of some clients: int32 ids, then the bytes of each row."""

    file: str  # name in the folder
    at: int  # first byte
    group: int  # index into `ClientStore.groups`
    number: int  # of clients


class SavedRows(NamedTuple):
    """Places of all rows of a checkpoint, in files of it and of earlier ones. Plain data for JSON.

    If several parts have the same client, the last one counts; without one, its row is `first`.
    """

    state: list[Part]
    best: list[Part] | None  # rows of the best state that differ from `state`; None if no best
    first: list[Part]  # a row for each group, with which all its clients started
    files: dict[str, str]  # SHA-256 of each file, by name


def from_json(saved: Any) -> SavedRows:
    """Returns the description from JSON, a dict of its fields."""

    def parts(rows: Any) -> list[Part]:
        return [Part(*row) for row in rows]

    best = None if saved["best"] is None else parts(saved["best"])
    return SavedRows(
        state=parts(saved["state"]), best=best, first=parts(saved["first"]), files=saved["files"]
    )


class _Writer:
    """Writes a file of rows and computes its SHA-256. The file has its name only after `close`."""

    def __init__(self, path: Path) -> None:
        self.path, self.temporary = path, path.with_name(path.name + ".part")
        self.file = open(self.temporary, "wb")  # noqa: SIM115
        self.digest, self.position = hashlib.sha256(), 0

    def write(self, array: np.ndarray) -> None:
        """Appends the bytes of an array to the file."""
        content = np.ascontiguousarray(array).data
        self.file.write(content)
        self.digest.update(content)
        self.position += array.nbytes

    def append_rows(self, g: int, blocks: Iterable[np.ndarray], records: Any) -> Part:
        """Appends the client ids of all blocks, then the records of each. Returns their place.

        `g` is the clients' group; `records` maps a block of ids [K] to bytes [K, size].
        """
        blocks, start = list(blocks), self.position
        number = sum(map(len, blocks))
        for block in blocks:
            self.write(block.astype(np.int32))
        for block in blocks:
            self.write(records(block))
        return Part(file=self.path.name, at=start, group=g, number=number)

    def close(self) -> str:
        """Ends the file and moves it to its path. Returns the SHA-256 of its content."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.temporary, self.path)
        return self.digest.hexdigest()


def write(folder: Path, name: str, clients: ClientStore, best: Snapshot | None) -> SavedRows:
    """Writes the rows that have changed since the checkpoint of the last `mark_saved`.

    The file NAME.rows has rows of `clients`, and of `best`, those of the best round, if any.
    Returns the places of all rows, also in earlier files.
    """
    folder.mkdir(exist_ok=True)
    previous: SavedRows | None = clients.saved
    writer = _Writer(folder / f"{name}.rows")
    try:
        first = [
            writer.append_rows(g, [np.zeros(1)], lambda _, rows=rows: rows.first)
            for g, rows in enumerate(clients.groups)
        ]
        state = _write_changed(writer, clients.groups, previous.state if previous else [])
        best_parts = None
        if best is not None:
            is_saved = previous is not None and best.saved is previous
            old_parts = (previous.best or []) if is_saved and previous else []
            best_parts = _write_changed(writer, best.groups, old_parts)
        digest = writer.close()
    except BaseException:
        writer.file.close()
        writer.temporary.unlink(missing_ok=True)
        raise
    digests = {**(previous.files if previous else {}), writer.path.name: digest}
    used = {part.file for part in (*state, *(best_parts or ()), *first)}
    return SavedRows(
        state=state,
        best=best_parts,
        first=first,
        files={file: digests[file] for file in sorted(used)},
    )


def _write_changed(
    writer: _Writer, groups: Iterable[RowStore], old_parts: list[Part]
) -> list[Part]:
    """Writes the changed rows of each group, or all its written rows.

    All are written if its parts would otherwise hold more than twice as many records as rows.

    Returns all parts that count: the still needed ones of `old_parts`, then the new ones.
    """
    parts = []
    for g, rows in enumerate(groups):
        group_parts = [part for part in old_parts if part.group == g]
        ids = np.flatnonzero(rows.changed)
        if sum(part.number for part in group_parts) + len(ids) > 2 * max(1, rows.count):
            group_parts, ids = [], rows.written()
        if len(ids) and rows.layout.size:
            group_parts.append(writer.append_rows(g, rows.blocks(ids), rows.records))
        parts += group_parts
    return parts


def mark_saved(clients: ClientStore, best: Snapshot | None, saved: SavedRows) -> None:
    """Marks all rows as unchanged; `saved` describes the complete checkpoint that has them."""
    for store in (clients, best):
        if store is not None:
            store.saved = saved
            for rows in store.groups:
                rows.changed[:] = False


def remove_unused(folder: Path, needed: Iterable[Iterable[str]]) -> None:
    """Removes files of rows that no checkpoint needs; `needed` has file names per checkpoint."""
    names = {file for files in needed for file in files}
    for path in folder.glob("*.rows*"):
        if path.name not in names:
            path.unlink(missing_ok=True)


def check_files(folder: Path, saved: SavedRows) -> None:
    """Raises DamagedError if a file of `saved` is missing or has another digest."""
    for name, digest in saved.files.items():
        try:
            with open(folder / name, "rb") as file:
                is_intact = hashlib.file_digest(file, "sha256").hexdigest() == digest
        except OSError as error:
            raise DamagedError(f"{name} cannot be read ({error.strerror})") from error
        if not is_intact:
            raise DamagedError(f"{name} is not what was written")


def read(
    folder: Path,
    saved: SavedRows,
    templates: Sequence[PyTree],
    *,
    has_groups: bool,
    make: Callable[[PyTree], RowStore],
    offload: Sequence[str] = (),
) -> tuple[ClientStore, Snapshot | None]:
    """Reads the clients of a checkpoint and of its best round. Call `check_files` first.

    Args:
      folder: Folder of the files.
      saved: Description of the rows.
      templates: Shapes [N, ...] of the clients' arrays in each architecture group, then of the
        offloaded parts of `State.rows`.
      has_groups: True if `State.clients` is a tuple with an entry for each architecture group.
      make: Function from the initial arrays of one client to a store of all clients.
      offload: Names of the offloaded parts of `State.rows`.

    Returns:
      The clients' rows, and those of the best round; None if there is none.
    """
    groups = []
    for g, template in enumerate(templates):
        rows = make(jax.tree.map(lambda s: np.zeros(s.shape[1:], s.dtype), template))
        if rows.layout.size:
            ((_, record),) = _records(folder, saved.first, g, rows.layout.size)
            rows = make(trees.row(rows.layout.unpack(record), 0))
            _fill(folder, saved.state, g, rows)
        groups.append(rows)
    clients, best = ClientStore(groups, has_groups, offload), None
    if saved.best is not None:
        best = clients.snapshot()
        for g, rows in enumerate(best.groups):
            _fill(folder, saved.best, g, rows)
    mark_saved(clients, best, saved)
    return clients, best


def _fill(folder: Path, parts: list[Part], g: int, rows: RowStore) -> None:
    for ids, records in _records(folder, parts, g, rows.layout.size):
        rows.put(ids, records)


def _records(
    folder: Path, parts: list[Part], g: int, size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields blocks of ids [K] and records uint8 [K, size] of group `g`, oldest first."""
    for part in parts:
        if part.group != g or not size:
            continue
        with open(folder / part.file, "rb") as file:
            file.seek(part.at)
            ids = np.frombuffer(file.read(4 * part.number), np.int32)
            step = max(1, _READ_BLOCK // size)
            for start in range(0, part.number, step):
                block = ids[start : start + step]
                content = np.frombuffer(file.read(len(block) * size), np.uint8)
                yield block, content.reshape(len(block), size)
