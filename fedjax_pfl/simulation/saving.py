"""Saves a state to a file and restores it, bit for bit."""

import contextlib
import os
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.errors import UsageError, first_line
from fedjax_pfl.simulation import stores


def save(path: str | os.PathLike[str], state: Any) -> None:
    """Writes a tree of arrays and states of a `Simulation` with any store to one .npz file.

    The file is complete or absent: an interrupted call keeps the previous one. Raises UsageError if
    the file cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/state.npz", {"rounds": np.arange(3)})
    ...     restore(f"{folder}/state.npz", like={"rounds": np.zeros(3, int)})["rounds"]
    array([0, 1, 2])
    """
    arrays = {name: np.asarray(leaf) for name, leaf in _named_leaves(_to_arrays(state)).items()}
    path = Path(path)
    if not path.name or "\0" in path.name:
        raise UsageError(f"{str(path)!r} names no file; choose one, such as state.npz")
    partial = path.with_name(f".{path.name}.partial")
    # NumPy's files cannot name dtypes such as bfloat16, so bytes are stored.
    content: dict[str, Any] = {name: _as_bytes(array) for name, array in arrays.items()}
    try:
        with open(partial, "wb") as file:
            np.savez(file, allow_pickle=False, **content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or first_line(error)}"
        ) from None
    finally:
        with contextlib.suppress(OSError):  # the folder of the file may be no folder
            partial.unlink()


def restore(path: str | os.PathLike[str], like: Any) -> Any:
    """Reads a tree that `save` wrote.

    Raises UsageError if the file is damaged or its tree differs from `like`.

    Args:
      path: The file.
      like: A tree with the same structure, shapes and dtypes, such as `simulation.init()`; the
        stores of both simulations may differ.

    Returns:
      The saved tree, with NumPy arrays.
    """
    like = _to_arrays(like)
    leaves = _named_leaves(like)
    try:
        with open(path, "rb") as content:  # NumPy leaves a damaged file open
            file = np.load(content, allow_pickle=False)
            stored = {name: file[name] for name in getattr(file, "files", ())}
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or first_line(error)}") from None
    except (ValueError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} is damaged: {first_line(error)}") from None
    if isinstance(file, np.ndarray):
        raise UsageError(f"{path} holds one array; give a file that `save` wrote")
    if different := sorted(stored.keys() ^ leaves.keys()):
        owner = path if different[0] in stored else "the tree `like`"
        raise UsageError(
            f"{path} was saved from another method or network: only {owner} has {different[0]}"
        )
    arrays = []
    for name, leaf in leaves.items():
        shape, dtype = np.shape(leaf), np.asarray(leaf).dtype
        if stored[name].shape != (*shape, dtype.itemsize):
            raise UsageError(
                f"{path} was saved from another method or network: {name} does not have the shape "
                f"{list(shape)}"
            )
        arrays.append(stored[name].reshape(-1).view(dtype).reshape(shape))
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


def check_not_used_up(state: Any) -> None:
    """Raises UsageError for a state that `Simulation.run_round` has used up.

    XLA reuses the memory of its arrays; a call with such arrays can crash the process. Rows on the
    host or on disk are those of a later round.
    """

    def is_used_up(leaf: Any) -> bool:
        if isinstance(leaf, stores.ClientStore):
            return leaf.is_used_up
        return isinstance(leaf, jax.Array) and leaf.is_deleted()

    if any(map(is_used_up, jax.tree.leaves(state))):
        raise UsageError(
            "this state was used up by run_round, which reuses its memory; use the state that "
            "run_round returned, or keep a copy before it: jax.device_get(state), or "
            "pfl.save(path, state) if the store is 'host' or 'disk'"
        )


def _to_arrays(tree: Any) -> Any:
    """Returns a tree with arrays [N, ...] of all clients in its states, which may be of any store.

    Other parts of the tree are unchanged.
    """

    def is_state(node: Any) -> bool:
        return isinstance(node, State)

    check_not_used_up(tree)
    return jax.tree.map(
        lambda node: stores.to_arrays(node) if is_state(node) else node, tree, is_leaf=is_state
    )


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the arrays of a tree by path and dtype, such as ".server['bias'] (float32)"."""
    leaves_by_path = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        place = jax.tree_util.keystr(path)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise UsageError(
                f"{place} is a random key, which no file can hold; save jax.random.key_data of it"
            )
        leaves_by_path[f"{place} ({np.asarray(leaf).dtype.name})"] = leaf
    return leaves_by_path


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array, uint8 [*shape, bytes of an element]."""
    contiguous = np.ascontiguousarray(array).reshape(-1)
    return contiguous.view(np.uint8).reshape(*array.shape, array.dtype.itemsize)
