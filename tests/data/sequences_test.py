"""Tests of text, LEAF's files, and windows over time."""

import json
import os
import re

import numpy as np
import pytest

from fedjax_pfl.data import federate, load, require_available
from fedjax_pfl.presets.fedmn import get_config
from fedjax_pfl.runs.build import build
from fedjax_pfl.runs.example_facts import example_facts
from tests.commands import message

PLAY = """First Citizen:
abcab

All:
ba

First Citizen:
c
"""


def test_a_file_whose_name_cannot_be_printed_is_refused(tmp_path):
    """No table of clients could have its name."""
    for name in (b"a.txt", b"caf\xe9.txt"):
        (tmp_path / os.fsdecode(name)).write_text("a play")
    line = message(lambda: load(f"text:{tmp_path}", owner="file"))
    assert "/caf\\udce9.txt' has characters that cannot be printed; rename it" in line


def test_text_by_speaker(tmp_path):
    (tmp_path / "play.txt").write_text(PLAY)
    dataset = load(f"text:{tmp_path / 'play.txt'}", length=4)
    # Token 0 is none, 1 to 4 are \n a b c. "abcab\nc" is cut into abca and b\n, shifted by 1.
    assert dataset.metadata["tokens"] == ["", "\n", "a", "b", "c"]
    assert dataset.owner_names.tolist() == ["All", "First Citizen"]
    np.testing.assert_array_equal(dataset.x_train, [[3, 0, 0, 0], [2, 3, 4, 2], [3, 1, 0, 0]])
    np.testing.assert_array_equal(dataset.y_train, [[2, -1, -1, -1], [3, 4, 2, 3], [1, 4, -1, -1]])
    np.testing.assert_array_equal(dataset.owner_train, [0, 1, 1])
    assert dataset.x_train.dtype == dataset.y_train.dtype == np.int32
    assert dataset.outputs == 5


def test_text_by_file(tmp_path):
    for name, content in (("a.txt", "xyz"), ("b.txt", "zz")):
        (tmp_path / name).write_text(content)
    dataset = load(f"text:{tmp_path}", owner="file", length=8)
    assert [name.split("/")[-1] for name in dataset.owner_names] == ["a.txt", "b.txt"]
    assert dataset.y_train[:, :3].tolist() == [[2, 3, -1], [3, -1, -1]]
    line = message(load, f"text:{tmp_path}")
    assert re.search(r"no speech: .* set text\.owner to file", line)


def test_speeches_stay_integers_after_partition():
    dataset = load("speeches")
    assert (len(dataset.owner_names), dataset.x_train.shape[1]) == (12, 64)
    data, federation = federate(dataset, "natural", clients=12)
    assert (data.x.dtype, data.y.dtype, data.y.shape[1]) == (np.int32, np.int32, 64)
    assert federation.owners[0] == "CORIOLANUS"
    assert federation.outputs == len(federation.metadata["tokens"]) == 61
    assert federation.class_counts is None
    half = load("speeches", fraction=0.5)
    assert len(half.owner_names) == 6  # with all their examples


def leaf_folder(root, train, test):
    for part, users in (("train", train), ("test", test)):
        (root / part).mkdir(parents=True)
        for i, (user, (x, y)) in enumerate(users.items()):  # one file per user
            content = {"users": [user], "user_data": {user: {"x": x, "y": y}}}
            (root / part / f"all_data_{i}.json").write_text(json.dumps(content))
    return f"leaf:{root}"


def test_femnist_reads_leafs_folder_in_data_dir(tmp_path):
    """The FedMN preset makes each writer a client and splits 80/20."""
    images = np.random.default_rng(0).random((4, 10, 784)).round(3)
    labels = [0, 61, 3, 3, 5, 1, 2, 4, 9, 8]
    train, test = (
        {f"w{i}": (x[part].tolist(), labels[part]) for i, x in enumerate(images)}
        for part in (slice(8), slice(8, None))
    )
    assert re.search(r"no FEMNIST in .*preprocess\.sh", message(load, "femnist", tmp_path))
    assert "no FEMNIST" in message(require_available, "femnist", tmp_path)
    leaf_folder(tmp_path / "femnist", train, test)
    require_available("femnist", tmp_path)
    dataset = load("femnist", tmp_path)
    assert (dataset.x_train.shape, dataset.outputs) == ((32, 28, 28, 1), 62)
    assert dataset.owner_names.tolist() == ["w0", "w1", "w2", "w3"]
    x = dataset.x_train * dataset.scale + dataset.shift
    np.testing.assert_allclose((x.mean(), x.std()), (0, 1), atol=1e-5)
    assert len(np.unique(load("femnist", tmp_path, fraction=0.5).owner_train)) == 2
    preset = get_config("femnist-n3")
    preset.data_dir = str(tmp_path)
    preset.fedmn.update(width=2, hidden=2, x_size=2, y_size=2)
    built = build(preset)
    assert "digest" in example_facts(built)  # so another sample of LEAF's files is noticed
    federation = built.phases[-1].inputs.federation
    np.testing.assert_array_equal(federation.counts, [8, 8, 8])
    assert (federation.input_shape, federation.outputs) == ((28, 28, 1), 62)


def test_leaf_images_keep_users_and_split(tmp_path):
    black, white = [0.0] * 784, [1.0] * 784
    train = {"f1": ([black, white], [3, 61]), "f0": ([white], [0])}
    dataset = load(leaf_folder(tmp_path, train, {"f0": ([black], [1]), "f1": ([white], [3])}))
    assert (dataset.x_train.shape, dataset.outputs) == ((3, 28, 28, 1), 62)
    assert dataset.x_train.dtype == np.float32
    assert dataset.x_train[:, 0, 0, 0].tolist() == [0, 1, 1]
    assert dataset.owner_names[dataset.owner_train].tolist() == ["f1", "f1", "f0"]
    data, federation = federate(dataset, "natural", clients=2, split="official")
    assert federation.owners == ("f0", "f1")
    assert (data.train.size.tolist(), data.test.size.tolist()) == ([1, 2], [1, 1])
    assert data.y[data.test.rows[0, 0]] == 1


def test_leaf_encodes_characters_and_tweets(tmp_path):
    train, test = {"R": (["ab", "ba"], ["c", "a"])}, {"R": (["bc"], ["a"])}
    dataset = load(leaf_folder(tmp_path / "plays", train, test))
    assert dataset.x_train.tolist() == [[1, 2], [2, 1]]
    assert (dataset.y_train.tolist(), dataset.y_test.tolist()) == ([[-1, 3], [-1, 1]], [[-1, 1]])
    assert dataset.outputs == 4
    every = load(f"leaf:{tmp_path / 'plays'}", every_position=True)
    assert every.y_train.tolist() == [[2, 3], [1, 1]]
    empty = {"R": ([""], ["a"])}
    line = message(load, leaf_folder(tmp_path / "empty", empty, empty))
    assert line.endswith("all texts are empty")
    line = message(lambda: federate(dataset, "natural", clients=1))  # the default split is pooled
    assert "would train on parts of the test windows: use split=official" in line
    assert "validation windows" in message(
        lambda: federate(dataset, "natural", clients=1, split="official", validation_fraction=0.5)
    )

    def tweet(text):
        return ["1", "Mon", "NO_QUERY", "me", text]

    train = {"me": ([tweet("Good good day!"), tweet("bad day")], [1, 0])}
    tweets = leaf_folder(tmp_path / "tweets", train, {"me": ([tweet("day of rest")], [1])})
    two = load(tweets, length=3, words=4)
    assert two.metadata["tokens"] == ["", "?", "day", "good"]  # most frequent in the training set
    assert two.x_train.tolist() == [[3, 3, 2], [1, 2, 0]]
    assert (two.x_test.tolist(), two.outputs) == ([[2, 1, 1]], 2)
    assert two.y_train.tolist() == [[-1, -1, 1], [-1, 0, -1]]  # at the last word of a tweet


def test_windows_are_within_training_or_test_rows_of_one_owner(tmp_path):
    rows = "".join(f"{'ab'[i]},{10 * i + t},{t}.5\n" for t in range(10) for i in range(2))
    (tmp_path / "s.csv").write_text(f"who,v,next\n{rows}")
    path = f"windows:{tmp_path / 's.csv'}"
    dataset = load(path, owner="who", label="next", length=3, stride=2, horizon=1, test_share=0.4)
    # Six of ten rows are for training: windows start at 0 and 2, labels follow one row later.
    assert dataset.x_train[..., 0].tolist() == [[0, 1, 2], [2, 3, 4], [10, 11, 12], [12, 13, 14]]
    assert dataset.y_train[:, 0].tolist() == [3.5, 5.5, 3.5, 5.5]
    assert dataset.x_test[..., 0].tolist() == [[6, 7, 8], [16, 17, 18]]
    assert dataset.y_test[:, 0].tolist() == [9.5, 9.5]
    assert (dataset.owner_train.tolist(), dataset.owner_test.tolist()) == ([0, 0, 1, 1], [0, 1])
    assert dataset.overlapping
    line = message(lambda: federate(dataset, "natural", clients=2))
    assert re.search(r"overlap.* use split=official", line)
    official = {"clients": 2, "split": "official"}
    line = message(lambda: federate(dataset, "natural", validation_fraction=0.2, **official))
    assert re.search(r"overlap.* use validation_fraction=0", line)
    data, _ = federate(dataset, "natural", **official)
    x = data.x[data.train.rows[:, :2]]
    np.testing.assert_allclose([x.mean(), x.std()], [0, 1], atol=1e-6)
    line = message(lambda: load(path, owner="who", label="next", length=30))
    assert "no owner has rows for a window of 30" in line
    assert "use 1 or more" in message(lambda: load(path, stride=0))


def test_classes_of_sensors_differ():
    dataset = load("sensors")
    assert (dataset.x_train.shape[1:], dataset.outputs) == ((32, 3), 3)
    assert len(dataset.owner_names) == 12
    assert np.bincount(dataset.y_train).min() > 50
    motion = dataset.x_train.std(1)[:, 0]  # only noise for class 0, rest
    assert np.median(motion[dataset.y_train == 0]) < 0.5 < np.median(motion[dataset.y_train == 2])


def test_a_byte_order_mark_is_not_a_character(tmp_path):
    (tmp_path / "a.txt").write_text("ROMEO:\nhello\n", "utf-8-sig")
    (tmp_path / "b.txt").write_text("ROMEO:\nhello\n", "utf-8")
    dataset = load(f"text:{tmp_path}", length=4)
    assert dataset.owner_names.tolist() == ["ROMEO"]
    assert "\ufeff" not in dataset.metadata["tokens"]


def test_tables_of_scikit_learn():
    wine, diabetes = load("wine"), load("diabetes")
    assert (wine.x_train.shape, wine.outputs) == ((178, 13), 3)
    assert (diabetes.x_train.shape, diabetes.y_train.dtype) == ((442, 10), np.float32)
    assert diabetes.y_train[:3, 0].tolist() == [151, 75, 141]
    assert diabetes.normalise.targets
    assert not load("diabetes", normalise="none").normalise
    data, federation = federate(diabetes, "iid", clients=4)
    assert 140 < federation.metadata["target_mean"][0] < 165
    assert abs(data.y.mean()) < 0.1


def test_half_a_surrogate_pair_is_a_character(tmp_path):
    dataset = leaf_of(tmp_path, ["a\ud83d"], ["a"])
    assert dataset.metadata["tokens"] == ["", "a", "\ud83d"]
    np.testing.assert_array_equal(dataset.x_train, [[1, 2]])


def leaf_of(root, x, y):
    """Loads a LEAF folder of one user with equal training and test set."""
    return load(leaf_folder(root / "leaf", {"u": (x, y)}, {"u": (x, y)}))


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda root: load(f"leaf:{root}"), r"no \*.json in its folder train"),
        (lambda root: load(f"text:{root}"), r"no file that ends with \.txt"),
        (lambda root: load(f"text:{root}", owner="me"), "owner is 'me'; choose speaker or"),
        (lambda root: load("speeches", length=0), "length=0; use 1 or more"),
        (lambda root: load("sensors", rows=9), "at least ten times as many rows"),
        (lambda root: leaf_of(root, [[1], [1, 2]], [0, 1]), "not lists of equally many numbers"),
        (lambda root: leaf_of(root, [[1]], [0, 1]), "a file of LEAF: user u has 1 x and 2 y"),
        (lambda root: leaf_of(root, [[1]], ["a"]), "label 'a' in example 0 is not an integer"),
        (lambda root: leaf_of(root, [[1]], [[0]]), "labels are lists; use one integer"),
        (lambda root: leaf_of(root, [[1], [2]], [0, [1]]), "labels are not integers"),
        (lambda root: leaf_of(root, ["ab"], [1]), "labels are not one character each"),
        (lambda root: leaf_of(root, ["ab", [1]], ["a", "b"]), "some examples are text and others"),
        (lambda root: leaf_of(root, [[*"abcd", "e"], [*"abcd", 5]], [0, 1]), "no list of 5 texts"),
        (lambda root: leaf_of(root, [[*"abcd", "e"], 5], [0, 1]), "no list of 5 texts"),
    ],
)
def test_invalid_files_and_settings_raise_one_line(tmp_path, call, line):
    assert re.search(line, message(call, tmp_path))
