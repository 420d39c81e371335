"""Examples that stay in their files."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from fedjax_pfl import data
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data.dataset import digest
from fedjax_pfl.data.mapped import is_mapped
from fedjax_pfl.settings import custom
from fedjax_pfl.simulation import forecast
from fedjax_pfl.simulation.cohort_examples import cohort_data

CLIENTS = 20
SHARES = {"clients": CLIENTS, "test_fraction": 0.25}


def saved(folder: Path, x: np.ndarray, y: np.ndarray) -> str:
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    return f"npy:{folder}"


def test_what_is_not_read_takes_no_memory(tmp_path: Path):
    """Half a gigabyte of images, of which the file has holes only, for twenty clients."""
    n, rng = 10_000, np.random.default_rng(0)
    shape = (n, 128, 128, 3)
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint8, shape)[7] = 9
    np.save(tmp_path / "y.npy", rng.integers(0, 5, n))
    tracemalloc.start()
    examples, federation, _ = data.federate(data.load(f"npy:{tmp_path}"), "iid", **SHARES)
    _, most = tracemalloc.get_traced_memory()
    part = cohort_data(examples, np.array([3]), 500, test=False)
    tracemalloc.stop()
    assert most < 5e6
    assert is_mapped(examples.x)
    assert np.asarray(part.x).nbytes == 500 * 128 * 128 * 3
    assert federation.counts.sum() == 7500
    total, sent, mapped = forecast.example_bytes(examples, 2)
    assert mapped == n * 128 * 128 * 3
    assert sent < total / 8


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64", "int64"])
def test_they_are_those_in_memory(tmp_path: Path, dtype: str):
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 250, (300, 4)).astype(dtype), rng.integers(0, 3, 300)
    kept = data.federate(
        data.arrays(x, y), "classes", **SHARES, settings={"per_client": 2, "examples": 10}
    )
    read = data.load(saved(tmp_path, x, y))
    assert is_mapped(read.x_train) == (dtype in ("uint8", "float32"))  # as training takes them
    there = data.federate(read, "classes", **SHARES, settings={"per_client": 2, "examples": 10})
    for ids in ([0, 4], [19]):
        mapped_batch, memory_batch = (
            cohort_data(each[0], np.array(ids), 60, test=True) for each in (kept, there)
        )
        for a, b in zip(mapped_batch[:2], memory_batch[:2], strict=True):
            np.testing.assert_array_equal(a, b)
    assert custom.dataset_digest(read._replace(name="arrays")) == custom.dataset_digest(
        data.arrays(x, y)
    )
    assert digest([x[::2], y]) == digest([np.ascontiguousarray(x[::2]), y])


def test_owners_and_a_fraction(tmp_path: Path):
    x, y = np.arange(40, dtype=np.float32).reshape(20, 2), np.tile([0, 1], 10)
    name = saved(tmp_path, x, y)
    np.save(tmp_path / "owner.npy", np.repeat(["ann", "bob"], 10))
    dataset = data.load(name)
    assert list(dataset.owner_names) == ["ann", "bob"]
    np.testing.assert_array_equal(dataset.owner_train, np.repeat([0, 1], 10))
    assert len(data.load(name, fraction=0.5).x_train) == 10


def test_what_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match=r"npy:.*: x.npy cannot be read \(No such file"):
        data.load(f"npy:{tmp_path}")
    np.save(tmp_path / "x.npy", np.array([{}, {}]), allow_pickle=True)
    with pytest.raises(UsageError, match=r"x\.npy cannot be read"):
        data.load(f"npy:{tmp_path}")
    x = np.ones((30, 2), np.float32)
    x[[20, 25], 1] = np.nan
    with pytest.raises(
        UsageError, match="x has 2 values that are not finite, the first in example 20"
    ):
        data.load(saved(tmp_path, x, np.zeros(30, int)))
