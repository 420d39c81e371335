"""Safetensors files, against the reference implementation, and damaged ones."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedjax_pfl.core import tensor_file
from fedjax_pfl.core.errors import UsageError

ARRAYS = {
    "a/b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "é": np.array(True),
    "empty": np.zeros((0, 3), np.float64),
    "bytes": np.arange(3, dtype=np.uint8),
    "big": np.arange(3, dtype=">i8"),
    "half": np.arange(2, dtype=np.float16).reshape(1, 2, 1),
}


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], strict=name != "big")


def test_files_are_those_of_the_reference_implementation(tmp_path):
    (tmp_path / "a").write_bytes(tensor_file.encode(ARRAYS, {"k": "v"}))
    assert_equal(load_file(tmp_path / "a"), ARRAYS)
    save_file({k: v for k, v in ARRAYS.items() if k != "big"}, tmp_path / "b", {"k": "v"})
    for name in "ab":
        arrays, metadata = tensor_file.read(tmp_path / name)
        assert metadata == {"k": "v"}
        assert_equal(arrays, {k: v for k, v in ARRAYS.items() if k in arrays})
    content = tensor_file.encode({"x": jnp.ones(3, jnp.bfloat16), "y": np.ones((2, 4)).T})
    (tmp_path / "c").write_bytes(content)
    arrays, _ = tensor_file.read(tmp_path / "c")
    assert arrays["x"].dtype == jnp.bfloat16
    assert arrays["y"].shape == (4, 2)


def content(header, data=bytes(8)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **others):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **others}


DAMAGED = {
    "no complete safetensors file": [b"", b"\x05", content({})[:-9], b"\xff" * 20],
    "cannot be read": [content(b"\xff"), content(b"[" * 100_000), content(b"1" * 10_000)],
    "no JSON object": [content([])],
    "no texts by name": [content({"__metadata__": {"a": 1}})],
    "has a name twice": [content(b'{"a": 1, "a": 1}')],
    "has no dtype, shape and data_offsets": [content({"a": 1}), content({"a": entry(x=1)})],
    "is not known": [content({"a": entry("F4")}), content({"a": entry([])})],
    "no whole numbers": [
        content({"a": entry(shape=(-2,))}),
        content({"a": entry(shape=(True, 2))}),
        content({"a": entry(offsets=(0, 8, 8))}),
        content({"a": {**entry(), "shape": 2}}),
    ],
    "does not have its bytes": [
        content({"a": entry(offsets=(8, 0))}),
        content({"a": entry(offsets=(4, 12))}),
        content({"a": entry(shape=(2**62, 2**62))}),
    ],
    "overlap or leave bytes out": [
        content({}),
        content({"a": entry(), "b": entry()}),
        content({"a": entry(shape=(1,), offsets=(4, 8))}),
    ],
    "cannot be read: ": [content({"a": entry(shape=(0, 2**70), offsets=(0, 0))}, b"")],
}


@pytest.mark.parametrize("line", DAMAGED)
def test_damaged_files_are_refused_in_one_line(line, tmp_path):
    for damaged in DAMAGED[line]:
        (tmp_path / "x").write_bytes(damaged)
        with pytest.raises(UsageError, match=line) as error:
            tensor_file.read(tmp_path / "x")
        assert "\n" not in str(error.value)
