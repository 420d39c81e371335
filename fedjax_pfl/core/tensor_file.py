"""Reads and writes `.safetensors` files: arrays by name, and texts by name as metadata.

A file has the length of the header in 8 bytes, the header in JSON, and the little-endian data of
all arrays without gaps. Nothing in a file is executed.

References: https://huggingface.co/docs/safetensors, the format.
"""

import itertools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core.errors import UsageError, first_line

_DTYPES = {
    **{f"{k}{8 * n}": np.dtype(f"<{k.lower()}{n}") for k in "IU" for n in (1, 2, 4, 8)},
    **{f"F{8 * n}": np.dtype(f"<f{n}") for n in (2, 4, 8)},
    "BF16": np.dtype(jnp.bfloat16),
    "BOOL": np.dtype(bool),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes, as in the reference implementation


def encode(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """Returns the content of a file with these arrays, sorted by name, and metadata."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    data, end = list[bytes](), 0
    for name, array in sorted(arrays.items()):
        little = np.asarray(array, np.dtype(array.dtype).newbyteorder("<"))
        data.append(little.tobytes())
        offsets = [end, end := end + little.nbytes]
        entry = {"dtype": _NAMES[little.dtype], "shape": little.shape, "data_offsets": offsets}
        header[name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    return b"".join([len(text).to_bytes(8, "little"), text, *data])


def read(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Returns the arrays and the metadata of a file; UsageError if it is damaged."""
    try:
        return _decode(Path(path).read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or first_line(error)}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}") from None


def _decode(content: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Returns the arrays and the metadata in a file's content; ValueError if it is damaged."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(_MAX_HEADER, len(content) - 8):
        raise ValueError("it is no complete safetensors file")
    header = json.loads(content[8 : 8 + length], object_pairs_hook=_unique)
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(type(v) is str for v in metadata.values()):
        raise ValueError("its metadata are no texts by name")
    data, spans, arrays = memoryview(content)[8 + length :], [(0, 0)], {}
    for name, entry in header.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{name!r} has no dtype, shape and data_offsets")
        dtype, shape, offsets = (entry[key] for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ValueError(f"{name!r} has the dtype {dtype!r}, which is not known")
        if not (_are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
            raise ValueError(f"{name!r} has a shape or offsets that are no whole numbers")
        begin, end = offsets
        if not begin <= end <= len(data) or end - begin != (
            math.prod(shape) * _DTYPES[dtype].itemsize
        ):
            raise ValueError(f"{name!r} of shape {shape} does not have its bytes in the file")
        arrays[name] = np.frombuffer(data[begin:end], _DTYPES[dtype]).reshape(shape)
        spans.append((begin, end))
    spans = [*sorted(spans), (len(data), len(data))]
    if any(a[1] != b[0] for a, b in itertools.pairwise(spans)):
        raise ValueError("its arrays overlap or leave bytes out")
    return arrays, metadata


def _are_counts(values: Any) -> bool:
    """Returns True for a list of integers of at least 0."""
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a dict of pairs; raises ValueError for a repeated name."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("its header has a name twice")
    return entries
