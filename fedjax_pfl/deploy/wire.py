"""Binary format of messages: JSON facts, and trees of arrays with name, dtype and shape.

Nothing is pickled or executed. A reader names the arrays that it expects; others are an error.

A message consists of the line `fedjax_pfl 1`, a length, a JSON envelope, a length, a JSON head that
lists the arrays, and their little-endian bytes. A repeated message may have another envelope. The
digest covers the rest.
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
_MAX_HEAD_BYTES = 16_000_000  # bytes of JSON: a line for each array
DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64",
)  # fmt: skip


class Message(NamedTuple):
    """A decoded message. `read_tree` turns its arrays into trees."""

    envelope: dict[str, Any]  # JSON data that may differ in a repetition: the server's start
    facts: dict[str, Any]  # JSON data, such as the message's kind and round
    arrays: dict[str, np.ndarray]  # by group and path, such as upload/params/fc1/kernel
    digest: str  # SHA-256 of the message without the envelope


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree, keyed by path such as params/fc1/kernel.

    Raises ValueError for equal paths.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in leaves:
            raise ValueError(f"two leaves of a tree have the path {name}")
        leaves[name] = leaf
    return leaves


def encode(
    facts: Mapping[str, Any],
    trees: Mapping[str, PyTree] | None = None,
    envelope: Mapping[str, Any] | None = None,
) -> bytes:
    """Encodes a message to bytes; equal arguments give equal bytes.

    Raises ValueError for a dtype that cannot be sent.

    Args:
      facts: JSON data of the message, such as its kind and round.
      trees: Trees of arrays by group name, such as `upload`.
      envelope: JSON data that the digest of the message does not cover.
    """
    listed, parts = [], []
    for group, tree in (trees or {}).items():
        for name, leaf in leaves_by_path(tree).items():
            array = np.asarray(leaf)
            if array.dtype.name not in DTYPES:
                raise ValueError(f"{group}/{name} is {array.dtype}, which cannot be sent")
            listed.append([f"{group}/{name}", array.dtype.name, list(array.shape)])
            parts.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    head = _json({"facts": dict(facts), "arrays": listed})
    header = _json(dict(envelope or {}))
    lengths = _LENGTH.pack(len(header)), _LENGTH.pack(len(head))
    return b"".join([_MAGIC, lengths[0], header, lengths[1], head, *parts])


def decode(content: bytes, max_bytes: int, check: schema.Check | None = None) -> Message:
    """Decodes a message; raises InvalidError if it is malformed.

    Args:
      content: Received bytes.
      max_bytes: Maximum length.
      check: Check of the message's facts, its JSON data, such as `schema.REQUEST`; None: no check.
    """
    if len(content) > max_bytes:
        raise InvalidError(f"it has {len(content):,} bytes; the maximum is {max_bytes:,}")
    if not content.startswith(_MAGIC):
        raise InvalidError("it does not begin as a message does")
    envelope, head_start = _read_object(content, len(_MAGIC))
    head, offset = _read_object(content, head_start)
    facts, entries = head.get("facts"), head.get("arrays")
    if not isinstance(facts, dict) or not isinstance(entries, list):
        raise InvalidError("its head has no facts or no list of arrays")
    schema.ENVELOPE(envelope, "envelope")
    if check is not None:
        check(facts, "message")
    arrays: dict[str, np.ndarray] = {}
    for entry in entries:
        name, dtype, shape = _check_entry(entry)
        if name in arrays:
            raise InvalidError(f"{name} is listed twice")
        size = np.dtype(dtype).itemsize * math.prod(shape)
        if size > len(content) - offset:
            raise InvalidError(f"{name} is longer than the message")
        piece = content[offset : offset + size]
        array = np.frombuffer(piece, np.dtype(dtype).newbyteorder("<"))
        if dtype == "bool" and np.any(np.frombuffer(piece, np.uint8) > 1):
            raise InvalidError(f"{name} has bytes that are neither true nor false")
        arrays[name] = array.reshape(shape).astype(dtype)
        offset += size
    if offset != len(content):
        raise InvalidError(f"it has {len(content) - offset} bytes after its last array")
    digest = hashlib.sha256(content[head_start:]).hexdigest()
    return Message(envelope=envelope, facts=facts, arrays=arrays, digest=digest)


def response_facts(request: Message) -> dict[str, Any]:
    """Returns the JSON data by which a response belongs to one request only.

    They are kind, run, client and round of the request, and its digest as `request`.
    """
    names = [name for name in ("kind", "run", "client", "round") if name in request.facts]
    return {**{name: request.facts[name] for name in names}, "request": request.digest}


def read_response(content: bytes, max_bytes: int, expected: Mapping[str, Any]) -> Message:
    """Decodes a response; raises InvalidError if it refuses or belongs to another request.

    Args:
      content: Received bytes.
      max_bytes: Maximum length.
      expected: The facts that the response must repeat, see `response_facts`.
    """
    response = decode(content, max_bytes, schema.RESPONSE)
    if "why" in response.facts:
        raise InvalidError(f"it has refused: {response.facts['why']}")
    for field, value in expected.items():
        if response.facts.get(field) != value:
            raise InvalidError(f"its {field} is not {value!r}")
    return response


def read_tree(message: Message, group: str, template: PyTree) -> PyTree:
    """Returns a group of arrays as a tree; raises InvalidError if they do not fit the template.

    Args:
      message: The decoded message.
      group: Name of the group, such as `upload`.
      template: Tree of arrays or shapes with the expected paths, shapes and dtypes.
    """
    expected = {f"{group}/{name}": leaf for name, leaf in leaves_by_path(template).items()}
    received_names = {name for name in message.arrays if name.startswith(f"{group}/")}
    for name in sorted(received_names ^ set(expected)):
        raise InvalidError(f"{name} is {'missing' if name in expected else 'not expected'}")
    for name, leaf in expected.items():
        array = message.arrays[name]
        if (array.shape, array.dtype.name) != (tuple(leaf.shape), np.dtype(leaf.dtype).name):
            received, required = (f"{x.dtype}{list(x.shape)}" for x in (array, leaf))
            raise InvalidError(f"{name} is {received}, and {required} is expected")
    return jax.tree.unflatten(
        jax.tree.structure(template), [message.arrays[name] for name in expected]
    )


def check_array_groups(message: Message, *groups: str) -> None:
    """Raises InvalidError if a message has arrays outside the groups with these names."""
    for name in message.arrays:
        if name.partition("/")[0] not in groups:
            raise InvalidError(f"{name} is not expected")


def _json(content: Any) -> bytes:
    """Encodes data as JSON; equal data gives equal bytes."""
    return json.dumps(content, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()


def _read_object(content: bytes, offset: int) -> tuple[dict[str, Any], int]:
    """Reads a JSON object from a message: its length, at byte `offset`, then the text.

    Returns the object and the offset of the byte after it. Raises InvalidError for other content.
    """
    start = offset + _LENGTH.size
    if start > len(content):
        raise InvalidError("it is cut off")
    (length,) = _LENGTH.unpack_from(content, offset)
    if length > min(_MAX_HEAD_BYTES, len(content) - start):
        raise InvalidError("it is cut off, or its head is too long")
    try:
        text = content[start : start + length].decode()
        parsed = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        raise InvalidError("its head is not JSON") from None
    if not isinstance(parsed, dict):
        raise InvalidError("its head is not a JSON object")
    return parsed, start + length


def _reject_constant(word: str) -> None:
    """Raises ValueError for NaN and Infinity, which Python would read."""
    raise ValueError(word)


def _check_entry(entry: Any) -> tuple[str, str, list[int]]:
    """Returns name, dtype and shape from an array's entry in the head.

    Raises InvalidError if the entry is malformed or the array is too large.
    """
    try:
        name, dtype, shape = entry
    except (TypeError, ValueError):
        raise InvalidError("its head describes an array wrongly") from None
    lengths: list[Any] = shape if isinstance(shape, list) else [None]
    are_lengths = all(type(n) is int and 0 <= n < 2**40 for n in lengths) and len(lengths) <= 32
    if not isinstance(name, str) or dtype not in DTYPES or not are_lengths:
        raise InvalidError("its head describes an array wrongly")
    # NumPy applies its limit to the product without lengths of 0.
    if math.prod(max(n, 1) for n in lengths) > 2**40:
        raise InvalidError("its head describes an array that is too large")
    return name, dtype, lengths
