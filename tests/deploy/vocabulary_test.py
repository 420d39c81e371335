"""Numbers for classes and categories, against tables worked out by hand."""

import hashlib
import json

import numpy as np
import pytest

from fedjax_pfl import data
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import examples, node_file, schema, vocabulary

ROWS = "city,age,kind,label\nBern,1,a,yes\nRome,2,b,no\nBern,3,b,yes\nOslo,4,a,no\n"
CITIES, KINDS = ["Paris", "Oslo", "Rome", "Bern"], ["b", "a"]


def load(tmp_path, rows=ROWS, **settings):
    (tmp_path / "t.csv").write_text(rows)
    return data.load(f"csv:{tmp_path / 't.csv'}", **settings)


def test_classes_and_words_are_numbered_by_the_lists(tmp_path):
    vocabularies = {"city": CITIES, "kind": KINDS}
    dataset = vocabulary.apply_vocabulary(
        load(tmp_path), ["no", "yes", "maybe"], vocabularies, False
    )
    expected = [  # Paris, Oslo, Rome, Bern, age, b, a
        [0, 0, 0, 1, 1, 0, 1],
        [0, 0, 1, 0, 2, 1, 0],
        [0, 0, 0, 1, 3, 1, 0],
        [0, 1, 0, 0, 4, 0, 1],
    ]
    np.testing.assert_array_equal(dataset.x_train, expected)
    assert dataset.x_train.dtype == load(tmp_path).x_train.dtype
    assert (dataset.y_train.tolist(), dataset.outputs) == ([1, 0, 1, 0], 3)
    assert dataset.normalise.features.tolist() == [False] * 4 + [True] + [False] * 2
    names = ["city=Paris", "city=Oslo", "city=Rome", "city=Bern", "age", "kind=b", "kind=a"]
    assert dataset.metadata == {"label": "label", "input": names, "classes": ["no", "yes", "maybe"]}


def test_an_index_is_the_position_in_the_list(tmp_path):
    vocabularies = {"city": CITIES, "kind": KINDS}
    dataset = vocabulary.apply_vocabulary(
        load(tmp_path, categories="index"), ["no", "yes"], vocabularies, True
    )
    np.testing.assert_array_equal(dataset.x_train, [[3, 1, 1], [2, 2, 0], [3, 3, 0], [1, 4, 1]])
    assert dataset.normalise.features.tolist() == [False, True, False]
    assert dataset.metadata["input"] == ["city", "age", "kind"]


def test_hashed_words(tmp_path):
    """The index is the first 8 bytes of SHA-256 modulo 5."""
    dataset = vocabulary.apply_vocabulary(
        load(tmp_path), ["no", "yes"], {"city": 5, "kind": KINDS}, False
    )
    for row, city in zip(dataset.x_train, ["Bern", "Rome", "Bern", "Oslo"], strict=True):
        place = int(hashlib.sha256(city.encode()).hexdigest()[:16], 16) % 5
        assert row[:5].tolist() == np.eye(5)[place].tolist()
    assert dataset.metadata["input"][:6] == [*(f"city#{i}" for i in range(5)), "age"]


def test_labels_that_are_whole_numbers_keep_their_values(tmp_path):
    rows = "age,label\n1,7\n2,3\n3,7\n"
    dataset = vocabulary.apply_vocabulary(load(tmp_path, rows), 9, {}, False)
    assert (dataset.y_train.tolist(), dataset.outputs, "classes" in dataset.metadata) == (
        [7, 3, 7],
        9,
        False,
    )
    with pytest.raises(UsageError, match="has label 7, and labels is 7"):
        vocabulary.apply_vocabulary(load(tmp_path, rows), 7, {}, False)


@pytest.mark.parametrize(
    ("labels", "vocabularies", "line"),
    [
        (None, {}, 'add "labels"'),
        (["no"], {}, "class 'yes' is not listed"),
        (2, {}, "not integers"),
        (["no", "yes"], {"city": CITIES}, "column 'kind' is text"),
        (["no", "yes"], {"city": ["Bern"], "kind": KINDS}, "column 'city': word 'Oslo'"),
        (["no", "yes"], {"age": 4}, "no column of text 'age'"),
    ],
)
def test_unlisted_words_are_an_error(labels, vocabularies, line, tmp_path):
    with pytest.raises(UsageError, match=line):
        vocabulary.apply_vocabulary(load(tmp_path), labels, vocabularies, False)


def test_a_file_of_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("abcabcabc" * 20)
    dataset = data.load(f"text:{tmp_path / 'a.txt'}", owner="file")
    with pytest.raises(UsageError, match="number its characters or words differently"):
        vocabulary.apply_vocabulary(dataset, 30, {}, False)


def test_only_normalised_columns_are_summed(tmp_path):
    """Sums of a column of categories would count its words."""
    (tmp_path / "t.csv").write_text("city,age,label\n" + "Bern,2,0\nRome,4,1\n" * 20)
    content = {
        "dataset": f"csv:{tmp_path / 't.csv'}",
        "labels": 2,
        "words": {"city": ["Bern", "Rome"]},
        "test_fraction": 0.3,
    }
    facts = examples.read(node_file.parse(json.loads(json.dumps(content)), "x")).facts
    assert facts["normalise"] == {"features": [False, False, True], "targets": False}
    assert (facts["sums"]["n"], len(facts["sums"]["mean"])) == (28, 1)
    assert 2 < facts["sums"]["mean"][0] < 4


def test_numbers_are_normalised_before_they_are_rounded(tmp_path):
    """For seconds of 2023, float32 has a resolution of 128 seconds."""
    start = 1_700_000_000
    rows = "".join(f"{start + i},{i},{i % 2}\n" for i in range(40))
    (tmp_path / "t.csv").write_text("time,count,label\n" + rows)
    content = {"dataset": f"csv:{tmp_path / 't.csv'}", "labels": 2, "test_fraction": 0.3}
    mine = examples.read(node_file.parse(json.loads(json.dumps(content)), "x"))
    assert mine.facts["stored_dtype"] == mine.facts["input_dtype"] == "float32"
    mean, deviation = [start + 10.0, 0.0], [2.0, 1.0]
    shared = schema.shared_fields(mine.facts)
    description = {"counts": [mine.facts["counts"]], "alike": shared}
    description |= {"mean": mean, "deviation": deviation}
    x = examples.normalise(mine, description, 0).x
    assert x.dtype == np.float32
    assert sorted(x[:, 0].tolist()) == [(i - 10) / 2 for i in range(40)]
    np.testing.assert_array_equal(np.sort(x[:, 1]), np.arange(40))
