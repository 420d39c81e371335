"""Tests of `save` and `restore`."""

from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pfl as pfl
from fedjax_pfl.simulation.stores import to_arrays
from tests.commands import message

_SLOW = [
    pytest.param(store, marks=pytest.mark.slow("more stores")) for store in ("sharded", "host")
]


@pytest.mark.parametrize("store", ["device", *_SLOW])
def test_a_restored_simulation_goes_on_bit_for_bit(store: str, tmp_path: Path):
    data = pfl.partition(pfl.datasets.digits(), "classes", clients=3, per_client=2, examples=20)
    method = pfl.fedper(pfl.networks.MLP(outputs=10), pfl.local_sgd(0.1, steps=1), data.federation)
    simulation = pfl.Simulation(method, data, store=store)
    state, _ = simulation.run_round(simulation.init(), 0)
    pfl.save(tmp_path / "state.npz", state)
    expected, _ = simulation.run_round(state, 1)
    restored = pfl.restore(tmp_path / "state.npz", like=simulation.init())
    actual, _ = simulation.run_round(restored, 1)
    chex.assert_trees_all_equal(to_arrays(actual), to_arrays(expected))
    assert [path.name for path in tmp_path.iterdir()] == ["state.npz"]


@pytest.mark.parametrize("store", ["device", "host"])
def test_a_tree_may_hold_a_state(store: str, tmp_path: Path):
    data = pfl.partition(pfl.datasets.digits(), "classes", clients=3, per_client=2, examples=20)
    method = pfl.fedper(pfl.networks.MLP(outputs=10), pfl.local_sgd(0.1, steps=1), data.federation)
    state, path = pfl.Simulation(method, data, store=store).init(), tmp_path / "tree.npz"
    pfl.save(path, {"best": (state, 3), "none": None})
    restored = pfl.restore(path, like={"best": (state, 0), "none": None})
    chex.assert_trees_all_equal(restored["best"], (to_arrays(state), 3))


def test_dtypes_and_damaged_files(tmp_path: Path):
    path = tmp_path / "tree.npz"
    tree = {
        "half": jnp.array([1.5, -0.0], jnp.bfloat16),
        "scalar": np.int32(7),
        "nan": np.float32([[np.nan], [np.inf]]),
        "empty": np.zeros((0, 3), np.float32),
        "flags": np.array([True, False]),
    }
    pfl.save(path, tree)
    restored = pfl.restore(path, like=jax.tree.map(jnp.zeros_like, tree))
    for name, leaf in tree.items():
        assert restored[name].dtype == jnp.asarray(leaf).dtype
        assert restored[name].tobytes() == np.asarray(leaf).tobytes()
    line = message(pfl.restore, path, {**tree, "scalar": np.zeros(2, np.int32)})
    assert "['scalar'] (int32) does not have the shape [2]" in line
    line = message(pfl.restore, path, {**tree, "scalar": np.float32(0)})  # as many bytes
    assert "only the tree `like` has ['scalar'] (float32)" in line
    assert "only the tree `like` has ['more']" in message(pfl.restore, path, {**tree, "more": 1})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    assert "is damaged" in message(pfl.restore, path, tree)
    intact = bytearray(content)
    intact[len(content) // 2] ^= 1
    directory = content.rindex(b"PK\x01\x02")
    for position, change in ((6, 100), (8, 1), (8, 32), (10, 1)):  # version, flags and compression
        damaged = bytearray(intact)
        damaged[directory + position] ^= change
        path.write_bytes(bytes(damaged))
        assert "is damaged" in message(pfl.restore, path, tree)
    assert "No such file" in message(pfl.restore, tmp_path / "none.npz", tree)
    line = message(pfl.save, path, {"key": jax.random.key(0)})
    assert line.startswith("['key'] is a random key, which no file can hold; save jax.random.key")
    np.save(tmp_path / "array.npy", np.zeros(3))
    line = message(pfl.restore, tmp_path / "array.npy", tree)
    assert line == f"{tmp_path / 'array.npy'} holds one array; give a file that `save` wrote"


def test_a_file_that_cannot_be_written(tmp_path: Path):
    assert "cannot be written: No such file" in message(pfl.save, tmp_path / "no" / "a.npz", {})
    (tmp_path / "file").touch()
    line = message(pfl.save, tmp_path / "file" / "a.npz", {})
    assert "cannot be written: Not a directory" in line
    (tmp_path / "file").unlink()
    (tmp_path / "a.npz").mkdir()
    assert "cannot be written: Is a directory" in message(pfl.save, tmp_path / "a.npz", {})
    for path in ("", "/", tmp_path / "a\0b"):
        assert "names no file; choose one, such as state.npz" in message(pfl.save, path, {})
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]  # no part of a file
