"""Checkpoints of a run: the state, the best state, and what has been counted and measured so far.

orbax writes them, each whole or not at all. Leaves are stored by name with a digest each: orbax
alone restores damaged bytes, and other shapes and dtypes, without a word.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

PyTree = Any


class DamagedError(Exception):
    """A checkpoint that does not hold what was saved; says which part of it."""


class Store(NamedTuple):
    """Where a run's checkpoints are."""

    manager: ocp.CheckpointManager

    def save(self, step: int, trees: dict[str, PyTree], facts: dict[str, Any]) -> None:
        """Write a checkpoint; when this returns, it is on disk and older ones may be gone."""
        leaves = {name: _leaves(tree) for name, tree in trees.items()}
        digests = {
            name: {key: _digest(leaf) for key, leaf in part.items()}
            for name, part in leaves.items()
        }
        items = {name: ocp.args.StandardSave(part) for name, part in leaves.items() if part}
        described = {"facts": facts, "digests": digests}
        meta = ocp.args.JsonSave(described | {"digest": _text_digest(described)})
        self.manager.save(step, args=ocp.args.Composite(meta=meta, **items))
        self.manager.wait_until_finished()

    def drop(self, step: int) -> None:
        """Remove a damaged checkpoint: its round will be saved again."""
        self.manager.delete(step)

    def steps(self) -> list[int]:
        """Rounds of which there is a checkpoint, newest first."""
        return sorted(self.manager.all_steps(), reverse=True)

    def facts(self, step: int) -> dict[str, Any]:
        """What was counted and measured until then."""
        return self._meta(step)["facts"]

    def restore(self, step: int, templates: dict[str, PyTree]) -> dict[str, PyTree]:
        """The trees, as NumPy arrays in the shape of the templates; DamagedError if they differ."""
        digests = self._meta(step)["digests"]
        return {name: self._tree(step, name, t, digests[name]) for name, t in templates.items()}

    def _meta(self, step: int) -> dict[str, Any]:
        try:
            wanted = ocp.args.Composite(meta=ocp.args.JsonRestore())
            meta = self.manager.restore(step, args=wanted)["meta"]
            described = {"facts": meta["facts"], "digests": meta["digests"]}
            whole = meta["digest"] == _text_digest(described)
        except Exception as error:  # orbax raises whatever its layers raise
            raise DamagedError(f"its description cannot be read ({_line(error)})") from error
        if not whole:
            raise DamagedError("its description is not what was saved")
        return described

    def _tree(self, step: int, name: str, template: PyTree, digests: dict[str, str]) -> PyTree:
        wanted = {key: np.empty(leaf.shape, leaf.dtype) for key, leaf in _named(template).items()}
        if set(wanted) != set(digests):
            raise DamagedError(f"{name} holds other parts than this run has")
        if not wanted:
            return template
        try:
            args = ocp.args.Composite(**{name: ocp.args.StandardRestore(wanted)})
            found = self.manager.restore(step, args=args)[name]
        except Exception as error:
            raise DamagedError(f"{name} cannot be read ({_line(error)})") from error
        for key, leaf in wanted.items():
            got = np.asarray(found[key])
            if got.shape != leaf.shape or got.dtype != leaf.dtype or _digest(got) != digests[key]:
                raise DamagedError(f"{name}{key} is not what was saved")
        leaves = [np.asarray(found[key]) for key in _named(template)]
        return jax.tree.unflatten(jax.tree.structure(template), leaves)


def open_store(directory: Path, keep: int = 2) -> Store:
    """The checkpoints in a directory, which is made if need be."""
    logging.getLogger("absl").setLevel(logging.WARNING)  # orbax reports each step of each save
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    return Store(ocp.CheckpointManager(directory.absolute(), options=options))


def _named(tree: PyTree) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _leaves(tree: PyTree) -> dict[str, np.ndarray]:
    return {key: np.asarray(leaf) for key, leaf in _named(tree).items()}


def _digest(leaf: np.ndarray) -> str:
    content = f"{leaf.dtype}{leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes()
    return hashlib.sha256(content).hexdigest()


def _text_digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
