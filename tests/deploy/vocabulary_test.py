"""Numbers for classes and categories, against exact tables."""

import hashlib

import numpy as np
import pytest

from fedjax_pfl import data
from fedjax_pfl.deploy import examples, node_file, schema, vocabulary
from tests.commands import message

ROWS = "city,age,kind,label\nBern,1,a,yes\nRome,2,b,no\nBern,3,b,yes\nOslo,4,a,no\n"
CITIES, KINDS = ["Paris", "Oslo", "Rome", "Bern"], ["b", "a"]


def load(tmp_path, rows=ROWS, **settings):
    (tmp_path / "t.csv").write_text(rows)
    return data.load(f"csv:{tmp_path / 't.csv'}", **settings)


def apply(dataset, labels, categories, index=False):
    return vocabulary.apply_vocabulary(dataset, labels, categories, index)


def test_classes_and_words_are_numbered_by_the_lists(tmp_path):
    dataset = apply(load(tmp_path), ["no", "yes", "maybe"], {"city": CITIES, "kind": KINDS})
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
    dataset = load(tmp_path, categories="index")
    dataset = apply(dataset, ["no", "yes"], {"city": CITIES, "kind": KINDS}, index=True)
    np.testing.assert_array_equal(dataset.x_train, [[3, 1, 1], [2, 2, 0], [3, 3, 0], [1, 4, 1]])
    assert dataset.normalise.features.tolist() == [False, True, False]
    assert dataset.metadata["input"] == ["city", "age", "kind"]


def test_hashed_words(tmp_path):
    """The index is the first 8 bytes of SHA-256 modulo 5."""
    dataset = apply(load(tmp_path), ["no", "yes"], {"city": 5, "kind": KINDS})
    for row, city in zip(dataset.x_train, ["Bern", "Rome", "Bern", "Oslo"], strict=True):
        place = int(hashlib.sha256(city.encode()).hexdigest()[:16], 16) % 5
        assert row[:5].tolist() == np.eye(5)[place].tolist()
    assert dataset.metadata["input"][:6] == [*(f"city#{i}" for i in range(5)), "age"]


def test_integer_labels_keep_their_values(tmp_path):
    integers = load(tmp_path, "age,label\n1,7\n2,3\n3,7\n")
    dataset = apply(integers, 9, {})
    assert (dataset.y_train.tolist(), dataset.outputs) == ([7, 3, 7], 9)
    assert "classes" not in dataset.metadata
    assert "has label 7, and labels is 7" in message(apply, integers, 7, {})


@pytest.mark.parametrize(
    ("labels", "categories", "line"),
    [
        (None, {}, 'add "labels"'),
        (["no"], {}, "class 'yes' is not listed"),
        (2, {}, "not integers"),
        (["no", "yes"], {"city": CITIES}, "column 'kind' is text"),
        (["no", "yes"], {"city": ["Bern"], "kind": KINDS}, "column 'city': word 'Oslo'"),
        (["no", "yes"], {"age": 4}, "no column of text 'age'"),
    ],
)
def test_unlisted_words_are_an_error(labels, categories, line, tmp_path):
    assert line in message(apply, load(tmp_path), labels, categories)


def test_labels_of_a_dataset_without_classes_are_refused(tmp_path):
    prices = load(tmp_path, "age,price\n1,7.5\n2,3.1\n", label="price", label_kind="number")
    assert apply(prices, None, {}).y_train.ravel().tolist() == [7.5, np.float32(3.1)]
    line = message(apply, prices, ["no", "yes"], {})
    assert "has no classes, and this node's file has labels; remove them, or set label_k" in line


def test_a_file_of_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("abcabcabc" * 20)
    dataset = data.load(f"text:{tmp_path / 'a.txt'}", owner="file")
    assert "would number its characters or words differently" in message(apply, dataset, 30, {})


def examples_of(tmp_path, rows, **content):
    """Reads the examples of a node with a table, by default of two integer classes."""
    (tmp_path / "t.csv").write_text(rows)
    shared = {"dataset": f"csv:{tmp_path / 't.csv'}", "test_fraction": 0.3}
    shared |= {} if "csv" in content else {"labels": 2}
    return examples.read(node_file.parse({**shared, **content}, "node.json"))


def test_owners_may_list_their_words_in_any_order(tmp_path):
    rows = "city,job,age,label\n" + "Bern,cook,2,0\nRome,clerk,4,1\n" * 20
    words = {"city": ["Bern", "Rome"], "job": 64}
    orders = (words, dict(reversed(words.items())), {**words, "city": ["Rome", "Bern"]})
    first, reordered, renumbered = (
        examples_of(tmp_path, rows, words=order).facts["input"] for order in orders
    )
    assert first == reordered != renumbered


def test_only_normalised_columns_are_summed(tmp_path):
    """Sums of a column of categories would count its words."""
    rows = "city,age,label\n" + "Bern,2,0\nRome,4,1\n" * 20
    facts = examples_of(tmp_path, rows, words={"city": ["Bern", "Rome"]}).facts
    assert facts["normalise"] == {"features": [False, False, True], "targets": False}
    assert (facts["sums"]["n"], len(facts["sums"]["mean"])) == (28, 1)
    assert 2 < facts["sums"]["mean"][0] < 4


def test_targets_of_clients_that_normalise_their_own_inputs_are_summed(tmp_path):
    """As in a simulation, where targets are normalised over the federation."""
    rows = "age,price\n" + "2,10\n4,30\n" * 20
    table = {"normalise": "client", "label": "price", "label_kind": "number"}
    mine = examples_of(tmp_path, rows, csv=table)
    assert mine.facts["normalise"] == {"features": [False], "targets": True}
    assert len(mine.facts["sums"]["mean"]) == 1
    used = np.asarray(mine.data.train.rows[0, : mine.data.train.size[0]])
    x = np.asarray(mine.data.x)[used]
    np.testing.assert_allclose([x.mean(), x.std()], [0, 1], atol=1e-6)
    y = np.asarray(mine.data.y)
    assert sorted(set(y[:, 0].tolist())) == [10, 30]  # not yet normalised
    (mean,), (deviation,) = mine.metadata["input_mean"], mine.metadata["input_deviation"]
    np.testing.assert_allclose(sorted(set((x[:, 0] * deviation + mean).round(5))), [2, 4])
    description = {"counts": [mine.facts["counts"]], "alike": schema.shared_fields(mine.facts)}
    description |= {"mean": [20.0], "deviation": [10.0]}
    np.testing.assert_allclose(
        sorted(set(examples.normalise(mine, description, 0).y[:, 0])), [-1, 1]
    )


def test_numbers_are_normalised_before_they_are_rounded(tmp_path):
    """For seconds of 2023, float32 has a resolution of 128 seconds."""
    start = 1_700_000_000
    rows = "".join(f"{start + i},{i},{i % 2}\n" for i in range(40))
    mine = examples_of(tmp_path, f"time,count,label\n{rows}")
    assert mine.facts["stored_dtype"] == mine.facts["input_dtype"] == "float32"
    description = {"counts": [mine.facts["counts"]], "alike": schema.shared_fields(mine.facts)}
    description |= {"mean": [start + 10.0, 0.0], "deviation": [2.0, 1.0]}
    x = examples.normalise(mine, description, 0).x
    assert x.dtype == np.float32
    assert sorted(x[:, 0].tolist()) == [(i - 10) / 2 for i in range(40)]
    np.testing.assert_array_equal(np.sort(x[:, 1]), np.arange(40))
