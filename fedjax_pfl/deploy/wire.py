"""Messages between machines: plain facts, and trees of arrays by name, dtype and shape.

Nothing is pickled or executed. A reader states which arrays it expects and takes no others.

A message is the line `fedjax_pfl 1`, a length, a JSON envelope, a length, a JSON head that lists
the arrays, and their little-endian bytes. A repeated message may have another envelope; the rest,
and so the digest, stays the same.
"""

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.core.algorithm import PyTree
from fedjax_pfl.deploy import schema
from fedjax_pfl.deploy.schema import InvalidError

_MAGIC = b"fedjax_pfl 1\n"
_LENGTH = struct.Struct("<Q")
_MOST_HEAD = 16_000_000  # bytes of JSON: a line for each array
DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64",
)  # fmt: skip


class Message(NamedTuple):
    """A decoded message; its arrays are still without a tree."""

    envelope: dict[str, Any]
    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]
    digest: str  # of all but the envelope


def named(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree by path, such as params/fc1/kernel."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in found:
            raise ValueError(f"two leaves of a tree are called {name}")
        found[name] = leaf
    return found


def encode(
    facts: Mapping[str, Any],
    trees: Mapping[str, PyTree] | None = None,
    envelope: Mapping[str, Any] | None = None,
) -> bytes:
    """Encodes a message; the same arguments give the same bytes."""
    listed, parts = [], []
    for word, tree in (trees or {}).items():
        for name, leaf in named(tree).items():
            array = np.asarray(leaf)
            if array.dtype.name not in DTYPES:
                raise ValueError(f"{word}/{name} is {array.dtype}, which cannot travel")
            listed.append([f"{word}/{name}", array.dtype.name, list(array.shape)])
            parts.append(_little(array).tobytes())
    head = _json({"facts": dict(facts), "arrays": listed})
    around = _json(dict(envelope or {}))
    lengths = _LENGTH.pack(len(around)), _LENGTH.pack(len(head))
    return b"".join([_MAGIC, lengths[0], around, lengths[1], head, *parts])


def decode(content: bytes, most: int, form: Any = None) -> Message:
    """Reads a message of at most `most` bytes; raises InvalidError for anything else.

    Args:
      form: of its facts, see `schema`; None leaves them unchecked.
    """
    if len(content) > most:
        raise InvalidError(f"it has {len(content):,} bytes, and at most {most:,} are expected")
    if not content.startswith(_MAGIC):
        raise InvalidError("it does not begin as a message does")
    envelope, at = _object(content, len(_MAGIC))
    begun = at
    head, at = _object(content, at)
    facts, listed = head.get("facts"), head.get("arrays")
    if not isinstance(facts, dict) or not isinstance(listed, list):
        raise InvalidError("its head has no facts or no list of arrays")
    schema.check(schema.ENVELOPE, envelope, "envelope")
    if form is not None:
        schema.check(form, facts, "message")
    arrays: dict[str, np.ndarray] = {}
    for entry in listed:
        name, dtype, shape = _described(entry)
        if name in arrays:
            raise InvalidError(f"{name} is there twice")
        size = np.dtype(dtype).itemsize
        for length in shape:
            size *= length
        if size > len(content) - at:
            raise InvalidError(f"{name} is longer than the message")
        piece = content[at : at + size]
        array = np.frombuffer(piece, np.dtype(dtype).newbyteorder("<"))
        if dtype == "bool" and np.any(np.frombuffer(piece, np.uint8) > 1):
            raise InvalidError(f"{name} has bytes that are neither true nor false")
        arrays[name] = array.reshape(shape).astype(dtype)
        at += size
    if at != len(content):
        raise InvalidError(f"{len(content) - at} bytes stand behind its last array")
    return Message(envelope, facts, arrays, hashlib.sha256(content[begun:]).hexdigest())


def tree(message: Message, word: str, template: PyTree) -> PyTree:
    """Returns the arrays under a word as a tree of the template's names, shapes and dtypes."""
    wanted = {f"{word}/{name}": leaf for name, leaf in named(template).items()}
    got = {name for name in message.arrays if name.startswith(f"{word}/")}
    for name in sorted(got ^ set(wanted)):
        raise InvalidError(f"{name} is {'missing' if name in wanted else 'not expected'}")
    for name, leaf in wanted.items():
        array = message.arrays[name]
        if (array.shape, array.dtype.name) != (tuple(leaf.shape), np.dtype(leaf.dtype).name):
            there, here = (f"{x.dtype}{list(x.shape)}" for x in (array, leaf))
            raise InvalidError(f"{name} is {there}, and {here} is expected")
    return jax.tree.unflatten(
        jax.tree.structure(template), [message.arrays[name] for name in wanted]
    )


def only(message: Message, *words: str) -> None:
    """Raises InvalidError if there are arrays under other words."""
    for name in message.arrays:
        if name.partition("/")[0] not in words:
            raise InvalidError(f"{name} is not expected")


def _json(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()


def _little(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))


def _object(content: bytes, at: int) -> tuple[dict[str, Any], int]:
    """Reads the JSON object whose length stands at `at`; returns it and its end."""
    behind = at + _LENGTH.size
    if behind > len(content):
        raise InvalidError("it is cut off")
    (length,) = _LENGTH.unpack_from(content, at)
    if length > min(_MOST_HEAD, len(content) - behind):
        raise InvalidError("it is cut off, or its head is too long")
    try:
        found = json.loads(content[behind : behind + length].decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise InvalidError("its head is no JSON") from None
    if not isinstance(found, dict):
        raise InvalidError("its head is no JSON object")
    return found, behind + length


def _refuse(word: str) -> None:
    raise ValueError(word)


def _described(entry: Any) -> tuple[str, str, list[int]]:
    try:
        name, dtype, shape = entry
    except (TypeError, ValueError):
        raise InvalidError("its head describes an array wrongly") from None
    lengths: list[Any] = shape if isinstance(shape, list) else [None]
    whole = all(type(n) is int and 0 <= n < 2**40 for n in lengths) and len(lengths) <= 32
    if not isinstance(name, str) or dtype not in DTYPES or not whole:
        raise InvalidError("its head describes an array wrongly")
    if math.prod(max(n, 1) for n in lengths) > 2**40:  # NumPy counts so, even if one length is 0
        raise InvalidError("its head describes an array that is too large")
    return name, dtype, lengths
