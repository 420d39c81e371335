"""Tests of examples that are mapped from files."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from fedjax_pfl import data
from fedjax_pfl.data.dataset import digest
from fedjax_pfl.data.mapped import is_mapped
from fedjax_pfl.settings import custom
from fedjax_pfl.simulation import forecast
from fedjax_pfl.simulation.cohort_examples import cohort_data
from tests.commands import message

CLIENTS = 20
SHARES = {"clients": CLIENTS, "test_fraction": 0.25}


def save(folder: Path, x: np.ndarray, y: np.ndarray) -> str:
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    return f"npy:{folder}"


def test_unread_examples_take_no_memory(tmp_path: Path):
    """Half a gigabyte of images in a sparse file, for twenty clients."""
    n, rng = 10_000, np.random.default_rng(0)
    shape = (n, 128, 128, 3)
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint8, shape)[7] = 9
    np.save(tmp_path / "y.npy", rng.integers(0, 5, n))
    tracemalloc.start()
    examples, federation = data.federate(data.load(f"npy:{tmp_path}"), "iid", **SHARES)
    _, peak = tracemalloc.get_traced_memory()
    part = cohort_data(examples, np.array([3]), 500, test=False)
    tracemalloc.stop()
    assert peak < 5e6
    assert is_mapped(examples.x)
    assert np.asarray(part.x).nbytes == 500 * 128 * 128 * 3
    assert federation.counts.sum() == 7500
    total, sent, mapped = forecast.example_bytes(examples, 2)
    assert mapped == n * 128 * 128 * 3
    assert sent < total / 8


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64", "int64"])
def test_mapped_examples_equal_examples_in_memory(tmp_path: Path, dtype: str):
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 250, (300, 4)).astype(dtype), rng.integers(0, 3, 300)
    dataset = data.load(save(tmp_path, x, y))
    assert is_mapped(dataset.x_train) == (dtype in ("uint8", "float32"))  # the types for training
    settings = {"per_client": 2, "examples": 10}
    in_memory, mapped = (
        data.federate(d, "classes", **SHARES, settings=settings)[0]
        for d in (data.arrays(x, y), dataset)
    )
    for ids in ([0, 4], [19]):
        batches = (cohort_data(d, np.array(ids), 60, test=True)[:2] for d in (in_memory, mapped))
        for a, b in zip(*batches, strict=True):
            np.testing.assert_array_equal(a, b)
    expected = custom.dataset_digest(data.arrays(x, y))
    assert custom.dataset_digest(dataset._replace(name="arrays")) == expected
    assert digest([x[::2], y]) == digest([np.ascontiguousarray(x[::2]), y])


def test_npy_owners_and_fraction(tmp_path: Path):
    x, y = np.arange(40, dtype=np.float32).reshape(20, 2), np.tile([0, 1], 10)
    name = save(tmp_path, x, y)
    np.save(tmp_path / "owner.npy", np.repeat(["ann", "bob"], 10))
    dataset = data.load(name)
    assert list(dataset.owner_names) == ["ann", "bob"]
    np.testing.assert_array_equal(dataset.owner_train, np.repeat([0, 1], 10))
    assert len(data.load(name, fraction=0.5).x_train) == 10
    # Owners of the test set alone are sampled as well.
    owned = data.arrays(x, y, x, y, owners=np.repeat([0, 1], 10), owners_test=np.repeat([2, 3], 10))
    half = data.dataset.subset(owned, lambda n: np.arange(n)[1::2])
    assert (len(half.x_train), len(half.x_test)) == (10, 10)
    assert (set(half.owner_train), set(half.owner_test)) == ({0}, {1})
    assert half.owner_names.tolist() == ["1", "3"]
    for seed in range(8):
        rows = np.random.default_rng([seed, 0xF7AC]).choice(4, 1)
        sample = {"fraction": 0.25, "fraction_seed": seed, "sources": {"owned": lambda: owned}}
        if rows[0] < 2:
            assert len(data.load("owned", **sample).x_train) == 10
        else:
            line = message(lambda options=sample: data.load("owned", **options))
            assert line == "fraction=0.25 leaves no training examples; use a larger fraction"


def test_a_sample_of_owners_keeps_their_names_and_classes():
    owners, classes = np.repeat([0, 1, 2, 3], 5), np.eye(4, dtype=bool)
    dataset = data.arrays(np.ones((20, 2)), owners, owners=owners, owner_classes=classes)
    sample = data.dataset.subset(dataset, lambda n: np.array([1, 3]))
    examples, federation = data.federate(sample, "natural", clients=2)
    assert federation.owners == ("1", "3")
    np.testing.assert_array_equal(examples.classes, classes[[1, 3]])


def test_unreadable_files_are_named(tmp_path: Path):
    name = f"npy:{tmp_path}"
    assert "x.npy cannot be read (No such file" in message(data.load, name)
    np.save(tmp_path / "x.npy", np.array([{}, {}]), allow_pickle=True)
    assert "x.npy cannot be read" in message(data.load, name)
    x = np.ones((30, 2), np.float32)
    x[[20, 25], 1] = np.nan
    line = message(data.load, save(tmp_path, x, np.zeros(30, int)))
    assert "x has 2 values that are not finite, the first in example 20" in line
