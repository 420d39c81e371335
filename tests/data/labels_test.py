"""Tests that labels of files keep their values or raise an error."""

import json
import re

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedjax_pfl.data import load
from tests.commands import message
from tests.data.sequences_test import leaf_of


def csv(folder, labels, test=None, **settings):
    """Loads a CSV file with the given labels, and a test file with the labels `test`."""

    def write(name, cells):
        path = folder / name
        path.write_text("a,label\n" + "".join(f"{i}.5,{cell}\n" for i, cell in enumerate(cells)))
        return str(path)

    test_setting = {"test": write("test.csv", test)} if test else {}
    return load(f"csv:{write('train.csv', labels)}", **test_setting, **settings)


def leaf(folder, labels):
    return leaf_of(folder, [[1.0, 2.0]] * len(labels), labels)


def lists(folder, labels, names=None):
    """Loads a Parquet file with the given labels and class names."""
    table = pa.table({"a": [[1, 2]] * len(labels), "label": labels})
    if names:
        features = {"label": {"_type": "ClassLabel", "names": names}}
        metadata = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": metadata})
    parquet.write_table(table, folder / "t.parquet")
    return load(f"parquet:{folder / 't.parquet'}")


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda at: leaf(at, [0, 2**32 + 1]), "leaf:.* label 4294967297 in example 1"),
        (lambda at: leaf(at, [0.9, 1.9]), r"leaf:.* label 0\.9 in example 0"),
        (lambda at: leaf(at, [0, -1]), "leaf:.* label -1 in example 1"),
        (lambda at: leaf(at, [0, 2**70]), "leaf:.* label 1180591620717411303424 in example 1"),
        (lambda at: leaf(at, [0, None]), "leaf:.* label None in example 1"),
        (lambda at: lists(at, [[0, 1], [1, 2**32 + 1]]), r"t\.parquet.* label 4294967297 in ex"),
        (lambda at: lists(at, [[0, 1], [1, -2]]), r"t\.parquet.* label -2 in example 1"),
        (lambda at: lists(at, [0.9, 1.0], ["x", "y"]), r"t\.parquet.* label 0\.9 in example 0"),
        (lambda at: lists(at, [0, 2], ["x", "y"]), r"t\.parquet.* label 2 in example 1"),
        (lambda at: lists(at, ["0", "0.0"]), r"t\.parquet.* '0' and '0\.0'"),
        (lambda at: csv(at, ["01", "1"]), r"train\.csv.* '01' and '1'"),
        (lambda at: csv(at, ["0", "1"], ["01", "0"]), r"test\.csv.* '1' and '01'"),
        (lambda at: csv(at, ["0", "1"], ["0.0", "1.0"]), r"test\.csv.* '0' and '0\.0'"),
        (lambda at: csv(at, ["0", "1", "0.0"]), r"train\.csv.* '0' and '0\.0'"),
        (lambda at: csv(at, ["0", "1", "1.0"], label_kind="class"), r"train\.csv.* '1' and '1\.0'"),
        (lambda at: csv(at, ["cat", "0", "0.0", "dog", "ox"]), r"train\.csv.* '0' and '0\.0'"),
        (lambda at: csv(at, ["0", "1"], ["2.0", "3.0"]), r"test\.csv.*'2\.0'.*csv\.label_kind"),
        (lambda at: csv(at, ["0", "1"], ["0.5", "1.5"]), r"test\.csv.*'0\.5'.*csv\.label_kind"),
        (
            lambda at: csv(at, ["no", "yes", "?"]),
            r"'label' has '\?' in 1 rows, the first is row 3,",
        ),
        (lambda at: csv(at, ["no", "yes"], ["na", "no"]), r"test\.csv.* 'na' in 1 rows, .* row 1,"),
        (lambda at: csv(at, ["1", "2", "NA"], label_kind="class"), "'NA' in 1 rows, .* row 3, as"),
        (lambda at: csv(at, ["1", "2", "K"]), r"label_kind=class reads a label as text"),
        (lambda at: csv(at, ["0", str(2**64)]), r"train\.csv.* 18446744073709551616.* 64 bits"),
    ],
)
def test_ambiguous_and_invalid_labels_are_refused(tmp_path, call, line):
    assert re.search(line, message(call, tmp_path))


def test_unambiguous_labels_keep_their_values(tmp_path):
    codes = csv(tmp_path, ["007", "010", "007"])
    assert (codes.y_train.tolist(), codes.outputs) == ([0, 1, 0], 2)
    large = csv(tmp_path, [str(2**63), str(2**64 - 1), str(2**63)])
    assert large.metadata["classes"] == [str(2**63), str(2**64 - 1)]
    mixed = csv(tmp_path, ["1", "2"], [str(2**64 - 1), str(2**64 - 2)])
    assert mixed.y_test.tolist() == [3, 2]
    prices = csv(tmp_path, ["1", "1.0", "2.5"])  # measurements
    assert prices.y_train[:, 0].tolist() == [1, 1, 2.5]
    number = csv(tmp_path, ["0", "1"], ["0.0", "1.5"], label_kind="number")
    assert number.y_test[:, 0].tolist() == [0, 1.5]
    classes = csv(tmp_path, ["0", "1"], ["2", "1"])
    assert (classes.outputs, classes.y_test.tolist()) == (3, [2, 1])
    grades = csv(tmp_path, ["1", "2", "3"], ["K", "1", "none"], label_kind="class")
    assert grades.metadata["classes"] == ["1", "2", "3", "K", "none"]
    assert (grades.y_train.tolist(), grades.y_test.tolist()) == ([0, 1, 2], [3, 0, 4])
    with_names = lists(tmp_path, [0, 1, 1], ["x", "y"])
    assert (with_names.outputs, with_names.y_train.dtype) == (2, np.int32)
