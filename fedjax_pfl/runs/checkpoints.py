"""Checkpoints of a run: state, best state, counters and metrics, written by orbax.

A checkpoint has a digest of every leaf and a list of its files' digests. Orbax alone restores
damaged bytes, and arrays of other shapes and dtypes, without an error. Orbax is imported in
functions because the import takes a third of a second.
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

from fedjax_pfl.core.errors import UsageError, first_line

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

PyTree = Any
MAX_CHECKPOINTS = 2  # if the newest is damaged, there is another
SUMS = "SHA256SUMS"  # file in the checkpoint's folder; `sha256sum -c` reads it too


class DamagedError(Exception):
    """A checkpoint has changed since it was saved. The message names the damaged part."""


class Store(NamedTuple):
    """Checkpoints of a run in a folder, each with the number of a finished round (`step`)."""

    manager: ocp.CheckpointManager  # Orbax's manager of the folder

    def save(self, step: int, trees: dict[str, PyTree], facts: dict[str, Any]) -> None:
        """Writes a checkpoint to disk and removes all but the newest `keep` of `open_store`.

        If this fails, it raises OSError and earlier checkpoints remain.

        Args:
          step: Round of the checkpoint.
          trees: Trees of arrays by name, such as "state".
          facts: Counters and metrics, plain data for JSON.
        """
        import orbax.checkpoint as ocp

        leaves = {name: _by_path(jax.tree.map(np.asarray, tree)) for name, tree in trees.items()}
        digests = {
            name: {path: _digest(leaf) for path, leaf in tree_leaves.items()}
            for name, tree_leaves in leaves.items()
        }
        stored = {  # orbax refuses empty arrays
            name: {path: leaf for path, leaf in tree_leaves.items() if leaf.size}
            for name, tree_leaves in leaves.items()
        }
        items = {name: ocp.args.StandardSave(tree) for name, tree in stored.items() if tree}
        content = {"facts": facts, "digests": digests}
        meta = ocp.args.JsonSave(content | {"digest": _json_digest(content)})
        try:
            with _quietly():
                self.manager.save(step, args=ocp.args.Composite(meta=meta, **items))
                self.manager.wait_until_finished()
                temporary = self._folder(step) / f"{SUMS}.part"
                temporary.write_text(_sums(self._folder(step)))
                os.replace(temporary, temporary.with_suffix(""))
        except Exception as error:
            _remove_temporary(self.folder)
            if number := re.search(r"os_error_code='(\d+)'", str(error)):  # from tensorstore
                raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
            raise

    @property
    def folder(self) -> Path:
        """Returns the folder of all checkpoints."""
        return Path(self.manager.directory)

    @property
    def rows(self) -> Path:
        """Returns the folder next to the checkpoints with files of off-device client state."""
        return self.folder.parent / "rows"

    def _folder(self, step: int) -> Path:
        return self.folder / str(step)

    def drop(self, step: int) -> None:
        """Removes a checkpoint."""
        self.manager.delete(step)

    def steps(self) -> list[int]:
        """Returns the rounds of all checkpoints, newest first."""
        return sorted(self.manager.all_steps(), reverse=True)

    def check(self, step: int) -> None:
        """Raises DamagedError if a file has changed since it was written.

        A process that was killed during a save may leave no list of files. Then only the digests
        of the leaves are checked, by `restore`.
        """
        folder = self._folder(step)
        try:
            expected = (folder / SUMS).read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise DamagedError(f"{SUMS} cannot be read ({error.strerror})") from error
        try:
            actual = _sums(folder).encode()
        except OSError as error:
            raise DamagedError(f"a file cannot be read ({error.strerror})") from error
        written, found = set(expected.splitlines()), set(actual.splitlines())
        changed = sorted(
            line[66:].decode(errors="replace")
            for line in written ^ found
            # File managers and network file systems leave hidden files, which do no harm.
            if line in written or not Path(os.fsdecode(line[66:])).name.startswith(".")
        )
        if changed or (written == found and actual != expected):
            raise DamagedError(f"{changed[0] if changed else SUMS} is not what was written")

    def facts(self, step: int) -> dict[str, Any]:
        """Returns the facts of a checkpoint, as plain data.

        These are the fields of `run_state.Position`, `config` and, with off-device storage, `rows`.
        """
        return self._meta(step)["facts"]

    def restore(self, step: int, templates: dict[str, PyTree]) -> dict[str, PyTree]:
        """Returns the trees that `save` wrote at round `step`, as NumPy arrays, by name.

        Raises DamagedError if they are damaged or do not have the structure, shapes and dtypes of
        `templates`, trees by name.
        """
        digests = self._meta(step)["digests"]
        return {name: self._tree(step, name, t, digests[name]) for name, t in templates.items()}

    def _meta(self, step: int) -> dict[str, Any]:
        """Returns `facts` of a checkpoint, and `digests`: {tree: {path of a leaf: digest}}.

        Raises DamagedError if they cannot be read.
        """
        import orbax.checkpoint as ocp

        try:
            args = ocp.args.Composite(meta=ocp.args.JsonRestore())
            with _quietly():
                meta = self.manager.restore(step, args=args)["meta"]
            content = {"facts": meta["facts"], "digests": meta["digests"]}
            is_intact = meta["digest"] == _json_digest(content)
        except Exception as error:  # orbax raises any exception of its layers
            raise DamagedError(
                f"its description cannot be read ({first_line(error)[:200]})"
            ) from error
        if not is_intact:
            raise DamagedError("its description is not what was saved")
        return content

    def _tree(self, step: int, name: str, template: PyTree, digests: dict[str, str]) -> PyTree:
        """Returns the tree `name` as NumPy arrays; raises DamagedError if leaves are not as saved.

        `template` has its structure, shapes and dtypes; `digests` are by path of the leaf.
        """
        import orbax.checkpoint as ocp

        expected = _by_path(template)
        if set(expected) != set(digests):
            raise DamagedError(f"{name} holds other parts than this run has")
        arrays: dict[str, Any] = {
            path: np.empty(leaf.shape, leaf.dtype)
            for path, leaf in expected.items()
            if not leaf.size
        }
        if len(arrays) < len(expected):
            try:  # without a template: orbax would cast to its dtypes
                args = ocp.args.Composite(**{name: ocp.args.StandardRestore()})
                with _quietly():
                    arrays |= self.manager.restore(step, args=args)[name]
            except Exception as error:
                raise DamagedError(f"{name} cannot be read ({first_line(error)[:200]})") from error
        for path, leaf in expected.items():
            if path not in arrays:
                raise DamagedError(f"{name}{path} is missing")
            array = np.asarray(arrays[path])
            if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
                saved, current = (f"{x.dtype}{list(x.shape)}" for x in (array, leaf))
                raise DamagedError(f"{name}{path} is {saved} there and {current} in this run")
            if _digest(array) != digests[path]:
                raise DamagedError(f"{name}{path} is not what was saved")
        leaves = [np.asarray(arrays[path]) for path in expected]
        return jax.tree.unflatten(jax.tree.structure(template), leaves)


def open_store(directory: Path, keep: int = MAX_CHECKPOINTS, *, read_only: bool = False) -> Store:
    """Opens the checkpoints in a directory, which is created unless `read_only`.

    The newest `keep` of them remain when one is saved. Removes what an unfinished save left. Raises
    UsageError if a damaged entry hides the others.
    """
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.WARNING)  # orbax logs each step of each save
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_not_from_save)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=None if read_only else keep,
        read_only=read_only,
        save_interval_steps=0 if read_only else 1,  # avoids a warning
        enable_async_checkpointing=False,
        create=False,  # otherwise waits for other processes
        multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes={0}),
    )
    if not read_only:
        directory.mkdir(exist_ok=True)
        _remove_temporary(directory)
    for path in filter(_is_too_deep, directory.glob("*/_CHECKPOINT_METADATA")):
        if read_only:
            raise UsageError(f"{path} is damaged, which hides the others; remove {path.parent}")
        path.unlink()  # lets orbax open the other checkpoints
    with _quietly():  # damaged descriptions are logged, but not needed
        return Store(ocp.CheckpointManager(directory.absolute(), options=options))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Hides the tracebacks that Orbax's threads log, while the context lasts.

    A failed save raises its error too, so the log only repeats it.
    """
    logger, hook = logging.getLogger("absl"), sys.unraisablehook
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)

    def ignore_closed_loop(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            hook(unraisable)

    sys.unraisablehook = ignore_closed_loop
    try:
        yield
        sys.unraisablehook = hook  # stays after a failure: the threads still report it
    finally:
        logger.setLevel(level)


def _is_not_from_save(record: logging.LogRecord) -> bool:
    """Returns False for a log record about a failed save, which the logger then drops.

    Orbax never reads the exceptions of some of its futures, and asyncio logs that. Its threads log
    theirs, some of them after the save has raised the same error.
    """
    return not re.search("orbax|_SignalingThread", record.getMessage())


def _by_path(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree by path, as `keystr` formats it."""
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _remove_temporary(directory: Path) -> None:
    """Removes folders of saves that did not finish from the folder of all checkpoints.

    Retries for 5 seconds, because threads of a failed save may still write.
    """
    for _ in range(50):
        if not (paths := list(directory.glob("*.orbax-checkpoint-tmp*"))):
            return
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.1)


def _is_too_deep(path: Path) -> bool:
    """Returns True if a checkpoint's description, a JSON file, is nested too deeply to parse.

    Such a description stops orbax from opening any checkpoint; it ignores other damage.
    """
    try:
        json.loads(path.read_bytes())
    except RecursionError:
        return True
    except (OSError, ValueError):
        return False
    return False


def _sums(folder: Path) -> str:
    """Returns the SHA-256 of each file below `folder` as lines of sha256sum, except `SUMS`."""
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


def _json_digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
