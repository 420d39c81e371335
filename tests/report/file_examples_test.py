"""Tests of rows and pairs of runs whose examples come from files."""

import json

import pytest

from fedjax_pfl.report import comparison, comparison_page
from tests.report.comparison_test import rows_of, settings, write_run


def digest_rows(folder, *runs):
    """Returns the rows of runs (method, digest of the examples, which may be None)."""
    for i, (algorithm, digest) in enumerate(runs):
        path = write_run(folder / str(i), [0.5, 0.6], settings(algorithm, dataset="csv:t.csv"))
        if digest is not None:
            (path / "data.json").write_text(json.dumps({"digest": digest}))
    return rows_of(*(folder / str(i) for i in range(len(runs))))


@pytest.mark.parametrize(
    ("digests", "outcome"),
    [
        (("a", "a"), (0.0, 1.0, 2, 0, 0)),
        (("a", "b"), "other examples"),
        (("a", None), "other examples"),
        ((None, None), "examples unknown"),
    ],
)
def test_runs_are_paired_only_if_their_examples_are_known_and_equal(tmp_path, digests, outcome):
    rows = digest_rows(tmp_path, ("fedavg", digests[0]), ("local", digests[1]))
    assert comparison.paired_test(rows[1], rows[0], "before") == outcome
    assert isinstance(outcome, tuple) or outcome in comparison_page.text(rows)


def test_equal_settings_on_other_examples_are_two_rows(tmp_path):
    rows = digest_rows(tmp_path, ("fedavg", "a"), ("fedavg", "b"))
    assert [row.label for row in rows] == ["examples=a", "examples=b"]


def test_partitions_of_a_file_are_one_row_and_paired_by_seed(tmp_path):
    """Digests of a file's examples depend on the partition."""

    def write(name, algorithm, seed, digest, partition_seed):
        config = settings(algorithm, seed=seed, partition_seed=partition_seed, dataset="csv:t.csv")
        path = write_run(tmp_path / name, [0.5 + 0.1 * seed, 0.6], config)
        (path / "data.json").write_text(json.dumps({"digest": digest}))
        return path

    paths = [
        write(f"{algorithm}{seed}", algorithm, seed, f"partition{seed}", seed)
        for algorithm in ("fedavg", "local")
        for seed in (0, 1)
    ]
    rows = rows_of(*paths)
    assert [(row.label, len(row.runs)) for row in rows] == [("FedAvg", 2), ("Local", 2)]
    assert comparison.paired_test(*rows, "before").pairs == 2
    changed = write("changed", "local", 1, "other", 1)
    rows = rows_of(*paths[:3], changed)
    assert comparison.paired_test(*rows, "before") == "other examples"
    assert "examples=partition0, other" in rows[1].label
    same_seed = write("same seed", "local", 1, "partition2", 2)
    assert len(rows_of(paths[3], same_seed)) == 2
    (tmp_path / "local1" / "data.json").unlink()
    assert len(rows_of(*paths)) == 3  # unknown examples may be other ones
