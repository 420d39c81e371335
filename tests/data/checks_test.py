"""Tests of messages about invalid examples, which name client, field and column."""

import re

import numpy as np
import pytest

from fedjax_pfl.data import arrays, federate
from fedjax_pfl.data.checks import describe_holder
from fedjax_pfl.data.dataset import Dataset
from tests.commands import message

X = np.arange(48, dtype=np.float32).reshape(12, 4)
Y = np.arange(12) % 3
TOKENS = np.arange(60).reshape(12, 5) % 7
OWNERS = ["Bern", "Bern", "Cairo", "Cairo"] * 3


def with_value(values, place, value):
    changed = np.array(values)
    changed[place] = value
    return changed


def test_the_holder_of_an_example_is_named():
    data, federation = federate(arrays(X, Y, owners=OWNERS), "natural", clients=2)
    assert re.fullmatch(
        r"one of the \w+ examples of client .*", describe_holder(data, federation, 0)
    )
    assert describe_holder(data, federation, 12) == "example 12 of no client"


def test_tokens_and_labels_keep_their_types():
    tokens = arrays(TOKENS, np.roll(TOKENS, -1, 1))
    assert (tokens.x_train.dtype, tokens.y_train.dtype, tokens.outputs) == ("int32", "int32", 7)
    assert tokens.scale is None
    larger = arrays(TOKENS, np.roll(TOKENS, -1, 1), TOKENS + 3, TOKENS)
    assert larger.outputs == 10  # of tokens of the test set too
    # Inputs and labels share a vocabulary.
    assert arrays(TOKENS + 3, np.roll(TOKENS, -1, 1)).outputs == 10
    small = arrays(TOKENS.astype(np.uint8), np.roll(TOKENS, -1, 1), TOKENS.astype(np.uint8), TOKENS)
    assert (small.x_train.dtype, small.x_test.dtype, small.scale) == ("int32", "int32", None)
    labels = arrays(X, TOKENS > 3)
    assert (labels.x_train.dtype, labels.y_train.dtype, labels.outputs) == ("float32", "bool", 5)
    data, federation = federate(tokens, "iid", clients=3)
    assert (data.x.dtype, data.y.dtype) == ("int32", "int32")
    assert (federation.input_dtype, federation.positions, federation.outputs) == ("int32", (5,), 7)
    assert federation.examples(2).dtype == "int32"
    _, federation = federate(labels, "iid", clients=3)
    assert (federation.input_dtype, federation.positions, federation.outputs) == ("float32", (), 5)
    image = arrays(np.zeros((4, 2, 2, 1), np.uint8), np.arange(4) % 2)
    assert federate(image, "iid", clients=2)[1].input_dtype == "float32"


def test_unsigned_labels_are_classes():
    for dtype in (np.uint8, np.uint64):
        dataset = arrays(X, Y.astype(dtype))
        assert (dataset.y_train.tolist(), dataset.outputs) == (Y.tolist(), 3)
        assert dataset.y_train.dtype == "int32"


def test_owners_of_two_integer_types_keep_their_numbers():
    owners = np.array([3, 2**60 + 1])
    x, y = np.ones((2, 1)), [0, 1]
    dataset = arrays(x, y, x, y, owners=owners.astype(np.uint64), owners_test=owners)
    assert dataset.owner_names.tolist() == ["3", str(2**60 + 1)]
    np.testing.assert_array_equal(dataset.owner_test, [0, 1])


def test_owner_names_are_stripped():
    dataset = arrays(X[:3], Y[:3], owners=["Bern", "Bern ", "\tCairo"])
    assert dataset.owner_names.tolist() == ["Bern", "Cairo"]
    assert dataset.owner_train.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            lambda: arrays(with_value(X, (5, 2), np.inf), Y, owners=OWNERS),
            "arrays (train): x has 1 values that are not finite, the first in example 5 (owner "
            "Bern), column 2; remove or replace them",
        ),
        (
            lambda: arrays(TOKENS, with_value(TOKENS, (6, 1), 70), outputs=7, owners=OWNERS),
            "arrays (train): 1 labels are not classes from 0 to 6 or -1 (no label), the "
            "first is 70 in example 6 (owner Cairo), column 1",
        ),
        (
            lambda: arrays(TOKENS + 2**31, Y),
            "arrays (train): x has integers from 2,147,483,648 to 2,147,483,654, beyond 32 bits; "
            "give real numbers, or number them from 0",
        ),
        (
            lambda: arrays(np.ma.masked_less(X, X.mean()), Y),
            "arrays: x has masked values; remove or fill these examples",
        ),
        (
            lambda: arrays(X, TOKENS > 3, X, TOKENS),
            "arrays (test): y is int32, but bool in train; use one type",
        ),
        (
            lambda: arrays(np.uint8(X), Y, X / 48, Y),
            "arrays: x is uint8 and x_test float32; give both as uint8, which is scaled to [0, 1], "
            "both as other integers, or both as real numbers",
        ),
        (
            lambda: arrays(np.int64(X), Y, np.float64(X), Y),
            "arrays: x is int64 and x_test float64; give both as uint8, which is scaled to [0, 1], "
            "both as other integers, or both as real numbers",
        ),
        (
            lambda: arrays(X, Y, scale=np.ones(5)),
            "arrays: scale is [1. 1. 1. 1. 1.]; use a finite number, or an array of them with the "
            "shape of an example, [4], or of its last axes",
        ),
        (
            lambda: arrays(X, Y, shift=np.nan),
            "arrays: shift is nan; use a finite number, or an array of them with the shape of an "
            "example, [4], or of its last axes",
        ),
        (
            lambda: arrays(X, Y, scale="a"),
            "arrays: scale is a; use a finite number, or an array of them with the shape of an "
            "example, [4], or of its last axes",
        ),
        (
            lambda: arrays(X, X[:, :1], outputs=3),
            "arrays: outputs is 3 and y has 1 columns; leave outputs out",
        ),
    ],
)
def test_messages_about_arrays(call, line):
    assert message(call) == line


def unchecked(x, y, outputs=3):
    """Returns a dataset as a source builds it, without the checks of `arrays`."""
    owner = np.repeat(np.arange(3, dtype=np.int32), 4)
    names = np.array(["Amsterdam", "Bern", "Cairo"])
    return Dataset("mine", x, y, None, None, outputs, owner_train=owner, owner_names=names)


@pytest.mark.parametrize(
    ("dataset", "line"),
    [
        (
            unchecked(with_value(X, (9, 1), np.nan), Y.astype(np.int32)),
            r"mine: one of the (training|test) examples of client 2 \(Cairo\): x has 1 values that "
            r"are not finite, the first, column 1; remove or replace them",
        ),
        (
            unchecked(X, with_value(TOKENS, (4, 3), -7).astype(np.int32), 7),
            r"mine: one of the (training|test) examples of client 1 \(Bern\): 1 labels are not "
            r"classes from 0 to 6 or -1 \(no label\), the first is -7, column 3",
        ),
        (
            unchecked(X, with_value(TOKENS, slice(0, 4), -1).astype(np.int32), 7),
            r"mine: client 0 \(Amsterdam\): y is -1, no label, in all of its 3 training examples; "
            "leave it out",
        ),
        (
            unchecked(X, (Y - 1).astype(np.int32)),
            "mine: 4 labels are not classes from 0 to 2, the first is -1 in example 0",
        ),
        (
            unchecked(X.astype(np.float16), Y.astype(np.int32)),
            "mine: x is float16; it must be uint8, int32, float32",
        ),
    ],
)
def test_messages_about_datasets_of_sources(dataset, line):
    error = message(lambda: federate(dataset, "natural", clients=3))
    assert re.fullmatch(line, error), error
