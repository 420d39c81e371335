import os
import sys

import numpy as np
import pytest
from PIL import Image

from fedjax_pfl.data import load, prepared, require_available
from fedjax_pfl.data.tfds_images import shrink
from tests.commands import message
from tests.data.folders import png, write

REAL = os.environ.get("TFDS_DATA_DIR") or os.path.expanduser("~/tensorflow_datasets")


def real(name):
    """Marks a test to be skipped if a dataset is not prepared on this machine."""
    return pytest.mark.skipif(
        not prepared.is_prepared(name, REAL),
        reason=f"no prepared {name}: set TFDS_DATA_DIR to a folder that has it",
    )


def pictures(n, shape=(6, 5, 1), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape)).astype(np.uint8)


def mnist(root, n=30, **options):
    splits = {
        "train": {"image": pictures(n), "label": np.arange(n) % 10},
        "test": {"image": pictures(10, seed=1), "label": np.arange(10)},
    }
    return write(root, "mnist", splits, **options), splits


def test_prepared_folders_are_read_without_tensorflow(tmp_path):
    _, splits = mnist(tmp_path)
    dataset = load("mnist", tmp_path)
    np.testing.assert_array_equal(dataset.x_train, splits["train"]["image"])
    np.testing.assert_array_equal(dataset.y_test, splits["test"]["label"])
    assert dataset.x_train.dtype == np.uint8
    assert dataset.y_train.dtype == np.int32
    assert dataset.outputs == 10
    assert "tensorflow" not in sys.modules


def test_newest_version_in_tfds_data_dir_is_read(tmp_path, monkeypatch):
    mnist(tmp_path, version="3.0.9")
    mnist(tmp_path, n=50, version="3.0.10")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    assert len(load("mnist").x_train) == 50


def test_fraction_reads_a_random_sample(tmp_path):
    _, splits = mnist(tmp_path)
    part = load("mnist", tmp_path, fraction=0.29)
    assert len(part.x_train) == 8  # of 30
    assert len(part.x_test) == 2  # of 10
    repeated, different = (load("mnist", tmp_path, fraction=0.29, fraction_seed=s) for s in (0, 1))
    np.testing.assert_array_equal(part.x_train, repeated.x_train)
    assert not np.array_equal(part.x_train, different.x_train)
    train = splits["train"]
    for image, label in zip(part.x_train, part.y_train, strict=True):
        assert train["label"][(train["image"] == image).all((1, 2, 3))] == label


def test_joined_decoding_equals_pillow():
    for shape in ((7, 4, 1), (5, 9, 3)):
        images = np.concatenate([pictures(5, shape), np.full((2, *shape), 255, np.uint8)])
        # With a smooth image every filter of PNG occurs.
        images[0] = np.add.outer(np.arange(shape[0]), np.arange(shape[1]))[..., None]
        np.testing.assert_array_equal(prepared.decode([png(i) for i in images]), images)


def test_images_with_other_headers_are_decoded_separately():
    images = pictures(3)
    palette = Image.fromarray(images[0, :, :, 0]).convert("P")
    files = [png(images[0]), png(np.asarray(palette)[..., None], compress_level=0)]
    np.testing.assert_array_equal(prepared.decode(files)[1], np.asarray(palette)[..., None])
    colour = np.repeat(images, 3, -1)
    mixed = [png(colour[0]), png(np.concatenate([colour[1], colour[1][..., :1]], -1))]  # RGB, RGBA
    np.testing.assert_array_equal(prepared.decode(mixed), colour[:2])


def test_emnist_is_transposed_and_letters_count_from_zero(tmp_path):
    images = pictures(26, (4, 4, 1))
    columns = {"image": images, "label": np.arange(1, 27)}
    write(tmp_path, "emnist/letters", {"train": columns, "test": columns})
    dataset = load("emnist_letters", tmp_path)
    np.testing.assert_array_equal(dataset.x_train, images.swapaxes(1, 2))
    np.testing.assert_array_equal(dataset.y_train, np.arange(26))


def test_emnist_digits_are_read_from_byclass_if_only_that_is_prepared(tmp_path):
    images = pictures(30, (4, 4, 1))
    labels = np.tile([0, 9, 10], 10)  # 10 is not a digit
    columns = {"image": images, "label": labels}
    write(tmp_path, "emnist/byclass", {"train": columns, "test": columns})
    expected = images.swapaxes(1, 2)[labels < 10]
    require_available("emnist_digits", tmp_path)
    dataset = load("emnist_digits", tmp_path)
    assert dataset.outputs == 10
    np.testing.assert_array_equal(dataset.x_train, expected)
    np.testing.assert_array_equal(dataset.y_test, np.tile([0, 9], 10))
    half = load("emnist_digits", tmp_path, fraction=0.5)
    assert len(half.y_train) == len(half.y_test) == 10
    assert all(any((image == digit).all() for digit in expected) for image in half.x_train)
    # The folder of emnist/digits takes precedence.
    digits = {"image": images[:5], "label": np.arange(5)}
    write(tmp_path, "emnist/digits", {"train": digits, "test": digits})
    np.testing.assert_array_equal(load("emnist_digits", tmp_path).y_train, np.arange(5))
    # No digit in byclass, or neither folder.
    third = tmp_path / "other"
    letters = {"image": images, "label": labels + 10}
    write(third, "emnist/byclass", {"train": letters, "test": letters})
    line = message(load, "emnist_digits", third)
    assert "no example of its first 10 classes in split train" in line
    assert "pip install tensorflow" in message(load, "emnist_digits", tmp_path / "nowhere")


def test_superclasses_of_cifar100_are_read_from_the_data(tmp_path):
    classes = np.arange(100)
    images = pictures(100, (6, 5, 3))
    columns = {"image": images, "label": classes, "coarse_label": classes // 5}
    write(tmp_path, "cifar100", {"train": columns, "test": columns})
    np.testing.assert_array_equal(load("cifar100", tmp_path).coarse, classes // 5)
    line = message(lambda: load("cifar100", tmp_path, fraction=0.5))
    assert "50 classes have no training example" in line


def test_omniglot_numbers_characters_within_alphabets(tmp_path):
    # Alphabet 4 has characters 7, 9, 11 and is in both sets but read once; alphabet 2 has 5.
    small1 = {"image": pictures(3, (105, 105, 3)), "label": [9, 7, 11], "alphabet": [4, 4, 4]}
    small2 = {"image": pictures(2, (105, 105, 3)), "label": [5, 9], "alphabet": [2, 4]}
    write(tmp_path, "omniglot", {"small1": small1, "small2": small2})
    dataset = load("omniglot", tmp_path)
    assert dataset.x_train.shape == (4, 28, 28, 1)
    np.testing.assert_array_equal(dataset.owner_train, [1, 1, 1, 0])
    np.testing.assert_array_equal(dataset.y_train, [1, 0, 2, 0])
    np.testing.assert_array_equal(dataset.owner_classes, [[True, False, False], [True] * 3])
    assert dataset.x_test is None
    assert dataset.owner_names.tolist() == ["2", "4"]
    names = {"alphabet": ["Avesta", "Bengali", "Cyrillic", "Futurama", "Greek"]}
    write(tmp_path, "omniglot", {"small1": small1, "small2": small2}, version="2.0.0", names=names)
    assert load("omniglot", tmp_path).owner_names.tolist() == ["Cyrillic", "Greek"]


def test_shrink_by_hand():
    image = np.array([[0, 30, 60], [90, 120, 150], [180, 210, 240]], np.uint8)
    # Each of 2x2 pixels covers 1.5x1.5: weights are 2/3 for outer and 1/3 for middle lines.
    small = shrink(image[None, :, :, None], 2)[0, :, :, 0]
    np.testing.assert_array_equal(small, [[40, 80], [160, 200]])


def test_a_missing_dataset_raises_instructions(tmp_path):
    line = message(load, "cifar10", tmp_path)
    for part in ("-m pip install tensorflow", "download_and_prepare", "162 MiB", "TFDS_DATA"):
        assert part in line


def record(folder, split="train"):
    return folder / f"mnist-{split}.array_record-00000-of-00001"


def truncate(folder):
    os.truncate(record(folder), record(folder).stat().st_size - 70_000)


def overwrite(folder):
    with open(record(folder), "r+b") as file:
        file.seek(200)
        file.write(b"not a record" * 100)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        overwrite,
        lambda folder: os.truncate(record(folder), 0),
        lambda folder: record(folder).unlink(),
        lambda folder: (folder / "dataset_info.json").unlink(),
        lambda folder: (folder / "dataset_info.json").write_text("{"),
        lambda folder: (folder / "features.json").unlink(),
        lambda folder: (folder / "features.json").write_text("{"),
    ],
)
def test_a_damaged_folder_raises_one_line(tmp_path, damage):
    folder, _ = mnist(tmp_path)
    damage(folder)
    line = message(load, "mnist", tmp_path)
    assert "damaged or half written: delete it" in line
    assert str(folder) in line


TWO, TEN = pictures(2), np.arange(10)


@pytest.mark.parametrize(
    ("train", "test", "line"),
    [
        ({"image": TWO}, {"image": TWO}, "a record has no feature label"),
        ({"image": TWO, "label": [0, 1]}, None, "no examples of split test"),
        ({"image": TWO, "label": [0, 10]}, {"image": TWO, "label": [0, 1]}, "run from 0 to 10"),
        (
            {"image": pictures(10), "label": TEN},
            {"image": pictures(10, (5, 5, 1)), "label": TEN},
            "with 1 channels: the folder holds another dataset",
        ),
        (
            {"image": pictures(10, (6, 5, 3)), "label": TEN},
            {"image": pictures(10, (6, 5, 3)), "label": TEN},
            "with 1 channels: the folder holds another dataset",
        ),
    ],
)
def test_records_of_another_dataset_are_refused(tmp_path, train, test, line):
    write(tmp_path, "mnist", {"train": train} | ({"test": test} if test else {}))
    assert line in message(load, "mnist", tmp_path)


def test_missing_records_raise(tmp_path):
    mnist(tmp_path, declared={"train": 31})
    assert "damaged or half written" in message(load, "mnist", tmp_path)


@real("cifar100")
def test_real_cifar100():
    dataset = load("cifar100", REAL)
    assert dataset.x_train.shape[1:] == (32, 32, 3)
    np.testing.assert_array_equal(np.bincount(dataset.coarse), np.full(20, 5))
    assert dataset.coarse[0] == 4  # apple: fruit and vegetables
    x = dataset.x_train.astype(np.float64) * dataset.scale + dataset.shift
    np.testing.assert_allclose(x.mean((0, 1, 2)), 0, atol=0.02)
    np.testing.assert_allclose(x.std((0, 1, 2)), 1, atol=0.01)


@real("omniglot")
def test_real_omniglot():
    dataset = load("omniglot", REAL)
    assert len(dataset.owner_classes) >= 8
    # Twenty drawings of every character.
    characters = dataset.owner_train * 100 + dataset.y_train
    assert set(np.unique(characters, return_counts=True)[1]) == {20}
