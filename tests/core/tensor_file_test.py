"""Tests of reading arrays from a safetensors file."""

import chex
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core import tensor_file

TYPES = (
    *(bool, jnp.bfloat16, np.float16, np.float32, np.float64),
    *(np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
)


def test_arrays_of_all_types_and_shapes_come_back(tmp_path):
    arrays = {np.dtype(t).name: np.arange(6).reshape(2, 3).astype(t) for t in TYPES}
    arrays |= {"scalar": np.array(2.5), "empty": np.zeros((0, 3), np.float32)}
    path = tmp_path / "a.safetensors"
    path.write_bytes(tensor_file.safetensors_package().numpy.save(arrays))
    read = tensor_file.read(path)
    chex.assert_trees_all_equal_shapes_and_dtypes(read, arrays)
    chex.assert_trees_all_equal(read, arrays)
