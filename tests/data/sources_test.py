import re

import numpy as np
import pytest

from fedjax_pfl.data import arrays, load, source_settings
from tests.commands import message


def test_digits_are_standardised():
    dataset = load("digits")
    assert dataset.x_train.shape == (1797, 8, 8, 1)
    assert dataset.x_train.dtype == np.uint8
    assert dataset.x_test is None
    np.testing.assert_array_equal(np.bincount(dataset.y_train)[:3], [178, 182, 177])
    x = dataset.x_train.astype(np.float64) * dataset.scale + dataset.shift
    assert abs(x.mean()) < 1e-4
    assert abs(x.std() - 1) < 1e-4


def test_fraction_is_exact():
    assert len(load("digits", fraction=0.1).x_train) == 179
    part = load("synthetic", fraction=0.29, examples=100, test_examples=50)
    assert len(part.x_train) == 29  # 0.29 * 100 is 28.999... in binary
    assert len(part.x_test) == 14
    full = load("synthetic", examples=100, test_examples=50)
    rows = {tuple(x.ravel()) for x in full.x_train}
    assert {tuple(x.ravel()) for x in part.x_train} <= rows


def test_synthetic_is_deterministic_balanced_and_learnable():
    def make(**settings):
        return load("synthetic", shape=(4, 3), classes=5, examples=500, **settings)

    dataset = make()
    np.testing.assert_array_equal(dataset.x_train, make().x_train)
    assert not np.array_equal(dataset.x_train, make(seed=1).x_train)
    np.testing.assert_array_equal(np.bincount(dataset.y_train), 100)
    centres = np.stack([dataset.x_train[dataset.y_train == c].mean(0) for c in range(5)])
    distance = ((dataset.x_test[:, None] - centres) ** 2).sum((2, 3))
    assert (distance.argmin(1) == dataset.y_test).mean() > 0.8
    assert make(test_examples=0).x_test is None


def test_arrays_converts_types_and_scales_pixels():
    dataset = arrays(np.zeros((4, 2, 2, 1), np.uint8), np.array([0, 2, 1, 1], np.int64))
    assert dataset.outputs == 3
    assert dataset.x_train.dtype == np.uint8
    np.testing.assert_allclose(dataset.scale, 1 / 255)
    assert dataset.y_train.dtype == np.int32
    floats = arrays(np.zeros((4, 2)), np.zeros(4, int), np.ones((1, 2)), np.zeros(1, int))
    assert floats.x_train.dtype == np.float32
    assert floats.scale is None
    assert len(floats.x_test) == 1


def test_real_labels_become_one_target():
    dataset = arrays(X, np.array([0.5, 1, 2, 3]), X, np.array([2.5, 1, 2, 3], np.float16))
    assert dataset.y_train.shape == dataset.y_test.shape == (4, 1)
    assert (dataset.y_train.dtype, dataset.outputs) == (np.float32, 1)
    assert dataset.y_test[0, 0] == 2.5


def test_outputs_may_exceed_the_distinct_labels():
    assert arrays(X, np.array([0, 999, 1, 1])).outputs == 1000
    assert arrays(X, np.array([0, 5000, 1, 1]), outputs=5001).outputs == 5001


X, Y = np.zeros((4, 3)), np.array([0, 1, 1, 0])
CODES = np.array([1, 2 * 10**9, 1, 1])
HOLES = np.where(np.arange(12).reshape(4, 3) == 7, np.nan, 0)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: arrays(X, Y[:3]), "x has 4 examples and y 3"),
        (lambda: arrays(X[:0], Y[:0]), "x has 0 examples"),
        (lambda: arrays(X[:, 0], Y), r"x is \[4\] and y \[4\]"),
        (lambda: arrays(1.0, Y), r"x is \[\] and y \[4\]; use"),
        (lambda: arrays(1.0, 1), r"y is int64 \[\]; use integer classes"),
        (lambda: arrays(X[:, :0], Y), r"x is \[4, 0\]; an example needs at least one number"),
        (lambda: arrays(X, Y.astype(bool)), "use integer classes"),
        (lambda: arrays(X, Y, outputs=10**9), "outputs is 1000000000; use an integer from 1"),
        (lambda: arrays(X, Y, outputs=2.0), "outputs is 2.0; use an integer from 1"),
        (lambda: arrays(X, CODES), "2 different labels is 2,000,000,000, .* number the labels"),
        (lambda: arrays(X, CODES % 10**6 + 10**6), "labels is 1,000,001, .* outputs=1000002 if"),
        (lambda: arrays(X, X[:, 0], X, Y), "equal shapes in train and test"),
        (lambda: arrays(X, Y - 1), "2 labels are not classes from 0 to 0, the first is -1"),
        (lambda: arrays(X, Y, outputs=1), "2 labels are not classes from 0 to 0"),
        (lambda: arrays(X, HOLES), "y has 1 values that are not finite"),
        (lambda: arrays(X.astype(str), Y), "use numbers"),
        (lambda: arrays(X, Y, X), "both x_test and y_test"),
        (lambda: arrays(X, Y, X[:, :2], Y), "equal shapes in train and test"),
        (lambda: arrays(X, Y, X, Y + 1), r"\(test\): 2 labels are not classes"),
        (lambda: arrays(X, Y, coarse=np.array([1, 1])), "coarse must number"),
        (lambda: arrays(X, Y, coarse=["animal", "plant"]), "coarse must number"),
        (lambda: arrays(X, Y, coarse=[0.0, 1.0]), "coarse must number"),
        (lambda: arrays(X, Y, owners=np.array([0, 1])), r"names, or integers from 0 \[4\]"),
        (lambda: arrays(X, Y, owners=np.array([0, 0, 1, -1])), "names, or integers from 0"),
        (lambda: arrays(X, Y, owners=np.array([0, 0, 1, 0.5])), "names, or integers from 0"),
        (
            lambda: arrays(X, Y, owners=["a", "a", " ", "b"]),
            "a name of 0 characters that starts with ''; use 1 to 80",
        ),
        (lambda: arrays(X, Y, owners=["a", "a", "b\nc", "b"]), "printable characters"),
        (lambda: arrays(X, Y, X, Y, owners=list("aabb"), owners_test=Y), "must both be names"),
        (lambda: arrays(X, Y, x_test=X, y_test=Y, owners_test=Y), "without owners; give both"),
        (lambda: arrays(X, Y, owners=Y, owner_classes=np.ones((3, 2))), "owner_classes must be"),
        (lambda: arrays(X, Y, owner_classes=np.ones((2, 2))), "owner_classes must be"),
        (
            lambda: arrays(X, Y, owners=Y, owner_classes=[[1, 0], [1, 0]]),
            "example 1 has class 1, which owner_classes denies its owner",
        ),
        (lambda: arrays([[1.0], [1.0, 2.0]], [0, 1]), "arrays: x is not an array: .* equally long"),
        (lambda: arrays(X, Y, [[1.0], [1.0, 2.0]], Y), "arrays: x_test is not an array"),
        (lambda: arrays(X, Y, owners=[["a"], []]), "arrays: owners is not an array"),
        (lambda: arrays(X, Y, coarse=[[0], [1, 2]]), "arrays: coarse is not an array"),
        (lambda: load("synthetic", shape=5), "synthetic.shape is 5; it must be of type tuple"),
        (lambda: load("csv:a.csv", label=3), "csv.label is 3; it must be of type str"),
        (lambda: load("csv:a.csv", normalise_label="no"), "is 'no'; it must be of type bool"),
        (lambda: load("text:a.txt", length=4.5), "text.length is 4.5; it must be of type int"),
        (lambda: load("digits", fraction="x"), "fraction=x must be greater than 0"),
        (lambda: load("digit"), "did you mean digits"),
        (lambda: load("digits", fraction=0.0), "fraction=0.0"),
        (lambda: load("digits", noise=1), "it takes none"),
        (lambda: load("csv"), "write csv:PATH"),
        (lambda: load("digits:here"), "dataset digits takes no path, got 'here'"),
        (lambda: load("cvs:here"), "did you mean csv"),
        (lambda: load("synthetic", nois=1), "it takes shape, classes"),
        (lambda: load("synthetic", examples=3), "use positive numbers"),
        (lambda: load("synthetic", shape=()), r"shape=\(\).*at least one in shape"),
        (lambda: load("synthetic", seed=-1), "seed=-1"),
        (lambda: load("synthetic", noise=1e300), r"noise=1e\+300"),
        (lambda: load("synthetic", shape=(10**4,) * 3), "use fewer examples or a smaller shape"),
    ],
)
def test_invalid_arguments_raise_one_line(call, line):
    assert re.search(line, message(call))


def test_source_settings_are_read_from_signatures():
    assert source_settings("synthetic")["shape"] == (8, 8, 1)
    assert source_settings("cifar10") == source_settings("digits") == {}
    assert source_settings("csv") == {**source_settings("parquet"), "test": ""}  # without path
