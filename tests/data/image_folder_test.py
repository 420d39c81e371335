"""Tests of images in folders of classes, owners and parts."""

import re

import numpy as np
import pytest
from PIL import Image

from fedjax_pfl.data import load
from tests.commands import message


def image_folder(root, *paths):
    for value, path in enumerate(paths):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 6, 3), 40 * value, np.uint8)).save(root / path)
    return f"images:{root}"


def test_image_folders_are_classes_and_owners(tmp_path):
    dataset = load(image_folder(tmp_path / "a", "cat/1.png", "dog/1.png", "dog/2.jpg"), size=2)
    assert (dataset.x_train.shape, dataset.y_train.tolist()) == ((3, 2, 2, 3), [0, 1, 1])
    assert dataset.x_train[1, 0, 0].tolist() == [40, 40, 40]
    assert dataset.metadata == {"classes": ["cat", "dog"]}
    paths = ("train/bo/cat/1.png", "train/al/cat/1.png", "test/al/dog/1.png")
    two = load(image_folder(tmp_path / "b", *paths), size=2, colour="gray", folders="owner,class")
    assert two.x_test.shape == (1, 2, 2, 1)
    assert two.owner_names[two.owner_train].tolist() == ["al", "bo"]
    owner_list = tmp_path / "owners.csv"
    owner_list.write_text("file,owner\ncat/1.png,bo\ndog/1.png,al\ndog/2.jpg,bo\n")
    three = load(f"images:{tmp_path / 'a'}", owner=str(owner_list))
    assert three.owner_names[three.owner_train].tolist() == ["bo", "al", "bo"]
    owner_list.write_text("file,owner\ncat/1.png,bo\ndog/1.png,al\ndog/2.jpg,bo\ncat/1.png,al\n")
    line = message(lambda: load(f"images:{tmp_path / 'a'}", owner=str(owner_list)))
    assert "two owners for 'cat/1.png'" in line


def test_hidden_folders_are_not_classes(tmp_path):
    paths = ("cat/1.png", "dog/1.png", ".ipynb_checkpoints/1.png", "cat/._1.png")
    dataset = load(image_folder(tmp_path, *paths), size=2)
    assert (dataset.metadata["classes"], dataset.y_train.tolist()) == (["cat", "dog"], [0, 1])


def values(dataset, part="train"):
    """Returns the class name and the grey value of each image of a set."""
    x, y = getattr(dataset, f"x_{part}"), getattr(dataset, f"y_{part}")
    names = dataset.metadata["classes"]
    return [(names[i], int(image[0, 0, 0]) // 40) for i, image in zip(y, x, strict=True)]


def test_levels_and_parts_are_chosen(tmp_path):
    paths = ("a/cat/train/0.png", "a/cat/valid/1.png", "b/dog/train/2.png", "b/dog/test/3.png")
    name = image_folder(tmp_path, *paths)
    options = {"size": 2, "folders": "owner,class,part"}
    dataset = load(name, **options)
    assert values(dataset) == [("cat", 0), ("dog", 2)]
    assert values(dataset, "test") == [("dog", 3)]
    assert dataset.owner_names[dataset.owner_test].tolist() == ["b"]
    dataset = load(name, **options, train="train, test", test="valid")
    assert values(dataset) == [("cat", 0), ("dog", 2), ("dog", 3)]
    assert values(dataset, "test") == [("cat", 1)]
    dataset = load(name, **options, classes="dog")
    assert (dataset.outputs, values(dataset)) == (1, [("dog", 2)])
    assert load(name, size=2, folders="other,class,other").owner_train is None


def test_text_files_list_test_images(tmp_path):
    name = image_folder(tmp_path / "a", "x/cat/0.png", "x/dog/1.png", "y/cat/2.png", "y/dog/3.png")
    (tmp_path / "a" / "x_test.txt").write_text("x/dog/1.png 1\n")
    (tmp_path / "a" / "y_test.txt").write_text("y/cat/2.png 0\n\n")
    dataset = load(name, size=2, folders="owner,class", test="*_test.txt")
    assert (values(dataset), values(dataset, "test")) == (
        [("cat", 0), ("dog", 3)],
        [("dog", 1), ("cat", 2)],
    )
    assert dataset.owner_names[dataset.owner_test].tolist() == ["x", "y"]
    # The folder of the test set has no folders of classes, as in Tiny-ImageNet.
    paths = ("train/n1/images/a.png", "train/n2/images/b.png", "val/images/c.png")
    name = image_folder(tmp_path / "b", *paths)
    (tmp_path / "b" / "val" / "notes.txt").write_text("c.png\tn2\t0\t0\t9\t9\n")
    dataset = load(name, size=2, folders="class,other", test="val/notes.txt")
    assert (values(dataset), values(dataset, "test")) == ([("n1", 0), ("n2", 1)], [("n2", 2)])
    (tmp_path / "b" / "val" / "notes.txt").write_text("d.png n2\n")
    line = message(lambda: load(name, folders="class,other", test="val/notes.txt"))
    assert "notes.txt lists 'd.png', and there is no such file" in line


def test_listed_test_images_are_not_trained_on(tmp_path, monkeypatch):
    """Lists may have absolute paths, or paths through other folders."""
    image_folder(tmp_path / "a", "cat/0.png", "cat/1.png", "dog/2.png", "dog/3.png")
    monkeypatch.chdir(tmp_path)
    lines = [f"{tmp_path}/a/cat/1.png cat", "dog/../dog/3.png dog", "dog/3.png dog"]
    (tmp_path / "a" / "test.txt").write_text("\n".join(lines))
    dataset = load("images:a", size=2, test="test.txt")
    assert values(dataset) == [("cat", 0), ("dog", 2)]
    assert values(dataset, "test") == [("cat", 1), ("dog", 3)]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"colour": "red"}, "colour is 'red'; choose rgb or"),
        ({"folders": "owner,class"}, "has no images OWNER/CLASS/FILE"),
        ({"folders": "class,kind"}, "images.folders is 'kind'; choose"),
        ({"folders": "class,class"}, "has class twice"),
        ({"folders": "owner"}, "has no level class"),
        ({"folders": "owner,class", "owner": "o.csv"}, "exclude each other"),
        ({"train": "valid"}, "has no folder 'valid' to train on"),
        ({"train": ""}, "images.train names no part; "),
        ({"train": ","}, "images.train names no part; "),
        ({"test": "lists/*.txt"}, "names 'lists/.*.txt', and there is no such file"),
        ({"classes": "cat,dog,cat"}, "images.classes names a class twice; name it once"),
        ({"classes": "cat,dot"}, "names 'dot', which is no class; there are cat, dog"),
    ],
)
def test_invalid_settings_raise_one_line(tmp_path, options, line):
    name = image_folder(tmp_path, "cat/0.png", "dog/1.png")
    assert re.search(line, message(lambda: load(name, **options)))


def test_folders_and_files_without_images_raise_one_line(tmp_path):
    assert "has no images CLASS/FILE" in message(load, f"images:{tmp_path}")
    name = image_folder(tmp_path, "train/cat/0.png", "train/dog/1.png")
    assert "images.test names 'val'" in message(lambda: load(name, test="val"))
    for options in ({"train": "train,test"}, {"test": "train"}, {"train": "train,train"}):
        line = message(lambda options=options: load(name, **options))
        assert "images.train and images.test name" in line
    (tmp_path / "train" / "owl").mkdir()
    assert "class 'owl' has no images; remove its folder" in message(load, name)
    (tmp_path / "train" / "owl" / "2.png").write_bytes(b"no image")
    assert "owl/2.png cannot be read as an image" in message(load, name)
