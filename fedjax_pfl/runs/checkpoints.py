"""Checkpoints of a run: the state, the best state, and what has been counted and measured so far.

orbax writes them, each whole or not at all. Leaves are stored by name with a digest each, and each
checkpoint has a list of its files' digests: orbax alone restores damaged bytes, and other shapes
and dtypes, without a word. It is imported where it is used: that takes a third of a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.core.errors import UsageError

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

PyTree = Any
KEPT = 2  # checkpoints: where the newest is damaged, there is another
SUMS = "SHA256SUMS"  # in a checkpoint's folder; `sha256sum -c` reads it too


class DamagedError(Exception):
    """A checkpoint that does not hold what was saved; says which part of it."""


class Store(NamedTuple):
    """Where a run's checkpoints are."""

    manager: ocp.CheckpointManager

    def save(self, step: int, trees: dict[str, PyTree], facts: dict[str, Any]) -> None:
        """Write a checkpoint; when this returns, it is on disk and older ones may be gone.

        Where it cannot be written, an OSError says why, and what there was is there.
        """
        import orbax.checkpoint as ocp

        leaves = {name: _leaves(tree) for name, tree in trees.items()}
        digests = {
            name: {key: _digest(leaf) for key, leaf in part.items()}
            for name, part in leaves.items()
        }
        stored = {
            name: {key: leaf for key, leaf in part.items() if leaf.size}  # orbax refuses empty ones
            for name, part in leaves.items()
        }
        items = {name: ocp.args.StandardSave(part) for name, part in stored.items() if part}
        described = {"facts": facts, "digests": digests}
        meta = ocp.args.JsonSave(described | {"digest": _text_digest(described)})
        with _quietly(), self._whole_or_not(step):
            self.manager.save(step, args=ocp.args.Composite(meta=meta, **items))
            self.manager.wait_until_finished()
            part = self._folder(step) / f"{SUMS}.part"
            part.write_text(_sums(self._folder(step)))
            os.replace(part, part.with_suffix(""))

    @property
    def folder(self) -> Path:
        return Path(self.manager.directory)

    @property
    def rows(self) -> Path:
        """Where `changed_rows` writes what checkpoints need beside their own files."""
        return self.folder.parent / "rows"

    def _folder(self, step: int) -> Path:
        return self.folder / str(step)

    @contextlib.contextmanager
    def _whole_or_not(self, step: int) -> Iterator[None]:
        """Where it fails, no part is left; what the file system refused is an OSError."""
        try:
            yield
        except Exception as error:
            _clear(self.folder)
            if number := re.search(r"os_error_code='(\d+)'", str(error)):  # tensorstore's
                raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
            raise

    def drop(self, step: int) -> None:
        """Remove a damaged checkpoint: its round will be saved again."""
        self.manager.delete(step)

    def steps(self) -> list[int]:
        """Rounds of which there is a checkpoint, newest first."""
        return sorted(self.manager.all_steps(), reverse=True)

    def check(self, step: int) -> None:
        """DamagedError where a file of it is not what was written.

        A checkpoint that was killed before its list was written has none: its leaves' digests hold.
        """
        folder = self._folder(step)
        try:
            listed = (folder / SUMS).read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise DamagedError(f"{SUMS} cannot be read ({error.strerror})") from error
        try:
            there = _sums(folder).encode()
        except OSError as error:
            raise DamagedError(f"a file cannot be read ({error.strerror})") from error
        if there != listed:
            wanted, got = (set(text.splitlines()) for text in (listed, there))
            names = sorted(line[66:].decode(errors="replace") for line in wanted ^ got)
            raise DamagedError(f"{names[0] if names else SUMS} is not what was written")

    def facts(self, step: int) -> dict[str, Any]:
        """What was counted and measured until then."""
        return self._meta(step)["facts"]

    def restore(self, step: int, templates: dict[str, PyTree]) -> dict[str, PyTree]:
        """The trees, as NumPy arrays in the shape of the templates; DamagedError if they differ."""
        digests = self._meta(step)["digests"]
        return {name: self._tree(step, name, t, digests[name]) for name, t in templates.items()}

    def _meta(self, step: int) -> dict[str, Any]:
        import orbax.checkpoint as ocp

        try:
            wanted = ocp.args.Composite(meta=ocp.args.JsonRestore())
            with _quietly():
                meta = self.manager.restore(step, args=wanted)["meta"]
            described = {"facts": meta["facts"], "digests": meta["digests"]}
            whole = meta["digest"] == _text_digest(described)
        except Exception as error:  # orbax raises whatever its layers raise
            raise DamagedError(f"its description cannot be read ({_line(error)})") from error
        if not whole:
            raise DamagedError("its description is not what was saved")
        return described

    def _tree(self, step: int, name: str, template: PyTree, digests: dict[str, str]) -> PyTree:
        import orbax.checkpoint as ocp

        wanted = _named(template)
        if set(wanted) != set(digests):
            raise DamagedError(f"{name} holds other parts than this run has")
        found: dict[str, Any] = {
            key: np.empty(leaf.shape, leaf.dtype) for key, leaf in wanted.items() if not leaf.size
        }
        if len(found) < len(wanted):
            try:  # as it was saved: told of another dtype, orbax would cast to it
                args = ocp.args.Composite(**{name: ocp.args.StandardRestore()})
                with _quietly():
                    found |= self.manager.restore(step, args=args)[name]
            except Exception as error:
                raise DamagedError(f"{name} cannot be read ({_line(error)})") from error
        for key, leaf in wanted.items():
            if key not in found:
                raise DamagedError(f"{name}{key} is not there")
            got = np.asarray(found[key])
            if (got.shape, got.dtype) != (leaf.shape, leaf.dtype):
                there, here = (f"{x.dtype}{list(x.shape)}" for x in (got, leaf))
                raise DamagedError(f"{name}{key} is {there} there and {here} in this run")
            if _digest(got) != digests[key]:
                raise DamagedError(f"{name}{key} is not what was saved")
        leaves = [np.asarray(found[key]) for key in wanted]
        return jax.tree.unflatten(jax.tree.structure(template), leaves)


def open_store(directory: Path, keep: int = KEPT, *, only_read: bool = False) -> Store:
    """The checkpoints in a directory, which is made if need be; one that is only read stays."""
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.WARNING)  # orbax reports each step of each save
    logging.getLogger("asyncio").addFilter(_not_of_a_save)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=None if only_read else keep,
        read_only=only_read,
        save_interval_steps=0 if only_read else 1,  # or a warning says that it is set to 0
        enable_async_checkpointing=False,
        create=False,  # which would wait for processes that never come here
        multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes={0}),
    )
    if not only_read:
        directory.mkdir(exist_ok=True)
        _clear(directory)
    for path in _too_deep(directory):
        if only_read:
            raise UsageError(f"{path} is damaged, which hides the others; remove {path.parent}")
        path.unlink()  # its checkpoint, which is damaged, no longer keeps the others from opening
    with _quietly():  # it reads what may be damaged, and needs none of it
        return Store(ocp.CheckpointManager(directory.absolute(), options=options))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the tracebacks that orbax's threads log: what fails is raised here as well."""
    logger, hook = logging.getLogger("absl"), sys.unraisablehook
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)

    def others(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            hook(unraisable)

    sys.unraisablehook = others
    try:
        yield
        sys.unraisablehook = hook  # after a failure, they still come
    finally:
        logger.setLevel(level)


def _not_of_a_save(record: logging.LogRecord) -> bool:
    """Whether a message of asyncio is about anything else than a save that failed.

    A save that fails is raised; of some of orbax's futures the exception is never read besides, and
    asyncio complains when they are collected.
    """
    return "orbax" not in record.getMessage()


def _named(tree: PyTree) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _leaves(tree: PyTree) -> dict[str, np.ndarray]:
    return {key: np.asarray(leaf) for key, leaf in _named(tree).items()}


def _clear(directory: Path) -> None:
    """Remove what a save that did not end has left; the run's lock keeps others out.

    The threads of one that has just failed may still be writing for a moment.
    """
    for _ in range(50):
        left = list(directory.glob("*.orbax-checkpoint-tmp*"))
        if not left:
            return
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.1)


def _too_deep(directory: Path) -> list[Path]:
    """Descriptions at which orbax would end, whichever checkpoint is asked for: JSON that nests
    without end. Whatever else is wrong with one, it passes over."""
    found = []
    for path in directory.glob("*/_CHECKPOINT_METADATA"):
        try:
            json.loads(path.read_bytes())
        except RecursionError:
            found.append(path)
        except (OSError, ValueError):
            continue
    return found


def _sums(folder: Path) -> str:
    """The SHA-256 of each file, as sha256sum writes them."""
    lines = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        if not path.name.startswith(SUMS):
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{digest}  {path.relative_to(folder).as_posix()}\n")
    return "".join(lines)


def _digest(leaf: np.ndarray) -> str:
    content = f"{leaf.dtype}{leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes()
    return hashlib.sha256(content).hexdigest()


def _text_digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
