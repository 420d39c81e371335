"""Tests with folders written by the package datasets; other tests imitate its layout."""

import numpy as np
import pytest

from fedjax_pfl.data import load

datasets = pytest.importorskip(
    "datasets", reason="datasets (extra hf) is not installed; `make test-newest` installs it"
)


def test_saved_and_parquet_folders_are_read(tmp_path):
    kinds = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=["cat", "dog"]),
        "who": datasets.Value("string"),
        "grid": datasets.Array2D((2, 2), "int32"),
    }
    pictures = np.arange(6 * 4 * 4 * 3, dtype=np.uint8).reshape(6, 4, 4, 3)
    columns = {
        "image": [datasets.Image().encode_example(picture) for picture in pictures],
        "label": [0, 1, 0, 1, 0, 1],
        "who": list("abcabc"),
        "grid": [[[i, 1], [2, 3]] for i in range(6)],
    }
    examples = datasets.Dataset.from_dict(columns, datasets.Features(kinds))
    datasets.DatasetDict(train=examples, test=examples.select([5])).save_to_disk(tmp_path / "saved")
    examples.to_parquet(tmp_path / "files" / "train-00000-of-00001.parquet")
    for folder in ("saved", "files"):
        dataset = load(f"hf:{tmp_path / folder}", input="image", owner="who")
        np.testing.assert_array_equal(dataset.x_train, pictures)
        assert dataset.metadata["classes"] == ["cat", "dog"]
        assert dataset.owner_train.tolist() == [0, 1, 2, 0, 1, 2]
        grid = load(f"hf:{tmp_path / folder}", input="grid")
        np.testing.assert_array_equal(grid.x_train[:, 0, 0], range(6))
    assert len(load(f"hf:{tmp_path / 'saved'}", input="grid").x_test) == 1
