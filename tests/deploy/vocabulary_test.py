"""Classes and categories by the words that a file states, against tables worked out by hand."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedjax_pfl import data
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import examples, node_file, schema, vocabulary

ROWS = "city,age,kind,label\nBern,1,a,yes\nRome,2,b,no\nBern,3,b,yes\nOslo,4,a,no\n"
CITIES, KINDS = ["Paris", "Oslo", "Rome", "Bern"], ["b", "a"]


def loaded(tmp_path: Path, rows: str = ROWS, **settings: Any) -> Any:
    (tmp_path / "t.csv").write_text(rows)
    return data.load(f"csv:{tmp_path / 't.csv'}", **settings)


def test_classes_and_words_are_numbered_as_they_are_stated(tmp_path: Path):
    words = {"city": CITIES, "kind": KINDS}
    made = vocabulary.apply_vocabulary(loaded(tmp_path), ["no", "yes", "maybe"], words, False)
    wanted = [  # Paris, Oslo, Rome, Bern, age, b, a
        [0, 0, 0, 1, 1, 0, 1],
        [0, 0, 1, 0, 2, 1, 0],
        [0, 0, 0, 1, 3, 1, 0],
        [0, 1, 0, 0, 4, 0, 1],
    ]
    np.testing.assert_array_equal(made.x_train, wanted)
    assert made.x_train.dtype == loaded(tmp_path).x_train.dtype
    assert (made.y_train.tolist(), made.outputs) == ([1, 0, 1, 0], 3)
    assert made.normalise.features.tolist() == [False] * 4 + [True] + [False] * 2
    names = ["city=Paris", "city=Oslo", "city=Rome", "city=Bern", "age", "kind=b", "kind=a"]
    assert made.metadata == {"label": "label", "input": names, "classes": ["no", "yes", "maybe"]}


def test_an_index_is_the_place_among_the_stated_words(tmp_path: Path):
    words = {"city": CITIES, "kind": KINDS}
    made = vocabulary.apply_vocabulary(
        loaded(tmp_path, categories="index"), ["no", "yes"], words, True
    )
    np.testing.assert_array_equal(made.x_train, [[3, 1, 1], [2, 2, 0], [3, 3, 0], [1, 4, 1]])
    assert made.normalise.features.tolist() == [False, True, False]
    assert made.metadata["input"] == ["city", "age", "kind"]


def test_hashed_words_leave_nothing_but_their_place(tmp_path: Path):
    """Which is that of the first 8 bytes of SHA-256, modulo 5."""
    made = vocabulary.apply_vocabulary(
        loaded(tmp_path), ["no", "yes"], {"city": 5, "kind": KINDS}, False
    )
    for row, city in zip(made.x_train, ["Bern", "Rome", "Bern", "Oslo"], strict=True):
        place = int(hashlib.sha256(city.encode()).hexdigest()[:16], 16) % 5
        assert row[:5].tolist() == np.eye(5)[place].tolist()
    assert made.metadata["input"][:6] == [*(f"city#{i}" for i in range(5)), "age"]


def test_labels_that_are_whole_numbers_keep_their_values(tmp_path: Path):
    rows = "age,label\n1,7\n2,3\n3,7\n"
    made = vocabulary.apply_vocabulary(loaded(tmp_path, rows), 9, {}, False)
    assert (made.y_train.tolist(), made.outputs, "classes" in made.metadata) == (
        [7, 3, 7],
        9,
        False,
    )
    with pytest.raises(UsageError, match="has label 7, and labels is 7"):
        vocabulary.apply_vocabulary(loaded(tmp_path, rows), 7, {}, False)


@pytest.mark.parametrize(
    ("labels", "words", "line"),
    [
        (None, {}, 'add "labels"'),
        (["no"], {}, "class 'yes' is not listed"),
        (2, {}, "not integers"),
        (["no", "yes"], {"city": CITIES}, "column 'kind' is text"),
        (["no", "yes"], {"city": ["Bern"], "kind": KINDS}, "column 'city': word 'Oslo'"),
        (["no", "yes"], {"age": 4}, "no column of text 'age'"),
    ],
)
def test_what_is_not_stated_is_an_error(labels: Any, words: Any, line: str, tmp_path: Path):
    with pytest.raises(UsageError, match=line):
        vocabulary.apply_vocabulary(loaded(tmp_path), labels, words, False)


def test_text_of_a_nodes_own_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("abcabcabc" * 20)
    dataset = data.load(f"text:{tmp_path / 'a.txt'}", owner="file")
    with pytest.raises(UsageError, match="number its characters or words differently"):
        vocabulary.apply_vocabulary(dataset, 30, {}, False)


def test_only_numbers_that_are_normalised_are_summed(tmp_path: Path):
    """The sums of a column of categories would be counts of its words."""
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


def test_numbers_are_normalised_before_they_are_rounded(tmp_path: Path):
    """Seconds of 2023, of which float32 would keep one of 128."""
    start = 1_700_000_000
    rows = "".join(f"{start + i},{i},{i % 2}\n" for i in range(40))
    (tmp_path / "t.csv").write_text("time,count,label\n" + rows)
    content = {"dataset": f"csv:{tmp_path / 't.csv'}", "labels": 2, "test_fraction": 0.3}
    mine = examples.read(node_file.parse(json.loads(json.dumps(content)), "x"))
    assert mine.facts["stored_dtype"] == mine.facts["input_dtype"] == "float32"
    mean, deviation = [start + 10.0, 0.0], [2.0, 1.0]
    alike = {
        k: mine.facts[k]
        for k in (*schema.SHARED_FIELDS, *schema.SHARED_OPTIONAL_FIELDS)
        if k in mine.facts
    }
    description = {"counts": [mine.facts["counts"]], "alike": alike}
    description |= {"mean": mean, "deviation": deviation}
    x = examples.normalise(mine, description, 0).x
    assert x.dtype == np.float32
    assert sorted(x[:, 0].tolist()) == [(i - 10) / 2 for i in range(40)]
    np.testing.assert_array_equal(np.sort(x[:, 1]), np.arange(40))
