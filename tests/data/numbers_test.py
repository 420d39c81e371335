"""Tests that large numbers in tables stay distinct, although training uses float32."""

import re

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedjax_pfl.data import arrays, federate, load
from fedjax_pfl.data.numbers import as_float, moments
from tests.commands import message

SECONDS = 1_700_000_000 + np.arange(100)  # Unix time; only 2 distinct values in float32


def table(folder, ending):
    """Writes a file with columns time (Unix seconds) and label. Returns its dataset name."""
    late = (np.arange(100) >= 50).astype(int)
    path = folder / f"times.{ending}"
    if ending == "csv":
        rows = "".join(f"{t},{y}\n" for t, y in zip(SECONDS, late, strict=True))
        path.write_text(f"time,label\n{rows}")
        return f"csv:{path}"
    lists = [[float(t), float(t) + 0.5] for t in SECONDS]
    time = SECONDS if ending == "parquet" else lists
    parquet.write_table(pa.table({"time": time, "label": late}), path)
    return f"parquet:{path}"


def inputs(data):
    """Returns the sorted training inputs of all clients as float64, and their rows."""
    rows = np.concatenate(
        [data.train.rows[i, : data.train.size[i]] for i in range(len(data.train.size))]
    )
    return np.sort(data.x[np.sort(rows)].astype(np.float64), 0), rows


@pytest.mark.parametrize("ending", ["csv", "parquet", "lists.parquet"])
def test_unix_seconds_stay_distinct(tmp_path, ending):
    dataset = load(table(tmp_path, ending))
    data, federation = federate(dataset, "iid", clients=2, test_fraction=0.2)
    assert data.x.dtype == np.float32
    x, rows = inputs(data)
    assert len(np.unique(x[:, 0])) == len(rows)
    mean, deviation = (np.array(federation.metadata[f"input_{k}"]) for k in ("mean", "deviation"))
    raw = np.sort(x * deviation + mean, 0)
    assert set(np.round(raw[:, 0]).astype(int)) <= set(SECONDS.tolist())
    np.testing.assert_allclose(raw, np.round(2 * raw) / 2, atol=1e-5)
    np.testing.assert_allclose([x.mean(), x.std()], [0, 1], atol=1e-6)


def test_normalisation_by_client_precedes_rounding(tmp_path):
    rows = "".join(f"{'ab'[i % 2]},{(i % 2) * 1.7e9 + i},{i % 3}\n" for i in range(80))
    (tmp_path / "far.csv").write_text(f"who,time,label\n{rows}")
    dataset = load(f"csv:{tmp_path / 'far.csv'}", owner="who", normalise="client")
    data, _ = federate(dataset, "natural", clients=2, test_fraction=0.5)
    assert data.scale is None
    for i in range(2):
        train = data.x[data.train.rows[i, : data.train.size[i]]]
        assert len(np.unique(train)) == len(train) == 20
        np.testing.assert_allclose([train.mean(), train.std()], [0, 1], atol=1e-6)
        test = data.x[data.test.rows[i, : data.test.size[i]]]
        assert abs(test.mean()) < 2
    shared = {"clients": 2, "split": "shared"}
    assert "split=pooled" in message(lambda: federate(dataset, "natural", **shared))


def test_windows_and_targets_keep_precision(tmp_path):
    rows = "".join(f"{t},{t}.5\n" for t in SECONDS)
    (tmp_path / "s.csv").write_text(f"time,next\n{rows}")
    dataset = load(f"windows:{tmp_path / 's.csv'}", label="next", length=2, stride=2)
    data, federation = federate(dataset, "iid", clients=1, split="official")
    train = data.train.rows[0, : data.train.size[0]]
    facts = federation.metadata
    x = data.x[train][:, :, 0].astype(np.float64) * facts["input_deviation"][0]
    np.testing.assert_allclose(np.diff(x), 1, rtol=1e-5)  # a second
    target = data.y[train, 0].astype(np.float64) * facts["target_deviation"][0]
    expected = x[:, 1] + facts["input_mean"][0] + 0.5
    np.testing.assert_allclose(target + facts["target_mean"][0], expected, rtol=0, atol=1e-4)


def numbers_in(folder, cells):
    """Loads a CSV file with the given numbers and two classes."""
    rows = "".join(f"{cell},{i % 2}\n" for i, cell in enumerate(cells))
    (folder / "a.csv").write_text(f"id,label\n{rows}")
    return load(f"csv:{folder / 'a.csv'}")


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda at: load(table(at, "csv"), normalise="none"), "'time' has 100 .* only 2"),
        (
            lambda at: load(
                table(at, "csv"), label="time", label_kind="number", normalise_label=False
            ),
            "'time'",
        ),
        (lambda at: arrays(SECONDS[:, None] + 0.0, np.arange(100)), "x has 100 .* only 2"),
        (lambda at: arrays(np.arange(1, 9)[:, None] * 1e-50, np.arange(8)), "x has 8 .* only 1"),
        # Integers beyond float64, and a number beyond float32.
        (lambda at: numbers_in(at, range(2**60, 2**60 + 10)), "'id' has 10 .* only 1"),
        (lambda at: numbers_in(at, [1.5, 1e39]), "'id' is not finite in 1 rows, .* row 2"),
    ],
)
def test_rounding_that_merges_numbers_is_refused(tmp_path, call, line):
    assert re.search(line, message(call, tmp_path))


def test_moments_of_chunks_equal_numpy(monkeypatch):
    monkeypatch.setattr("fedjax_pfl.data.numbers.CHUNK_BYTES", 64)  # bytes: four rows
    values = np.random.default_rng(0).normal(5, 2, (33, 2))
    rows = np.arange(3, 33)
    mean, deviation = moments(values, rows)
    np.testing.assert_allclose(mean, values[3:].mean(0), rtol=1e-14)
    np.testing.assert_allclose(deviation, values[3:].std(0), rtol=1e-14)


def test_exact_rounding_is_allowed():
    exact = np.array([[16_000_000.0], [16_000_001.0]])  # float32 is exact up to 2^24
    np.testing.assert_array_equal(as_float("x", exact, np.float32), exact)
    constant = np.full((3, 1), 1_000_000.1)
    assert as_float("x", constant, np.float32).dtype == np.float32
