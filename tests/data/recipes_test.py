"""Tests that the commands in docs/recipes.md read small files of the published layouts."""

import gzip
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from fedjax_pfl.data import archives, load
from fedjax_pfl.presets import baseline
from fedjax_pfl.runs import build
from fedjax_pfl.settings import configuration
from tests.commands import message
from tests.data import tokens_test

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
COMMANDS = dict(re.findall(r"## ([^\n]+)\n.*?```sh\n(.*?)```", PAGE, re.DOTALL))
RNG = np.random.default_rng(0)
FEDBN = [
    "bird",
    "feather",
    "headphones",
    "ice_cream",
    "teapot",
    "tiger",
    "whale",
    "windmill",
    "wine_glass",
    "zebra",
]


def save_images(folder, n, size=5):
    Path(folder).mkdir(parents=True, exist_ok=True)
    for i in range(n):
        pixels = RNG.integers(0, 255, (size, size + i % 2, 3), np.uint8)
        Image.fromarray(pixels).save(Path(folder, f"{i}.png"))


def tiny_imagenet():
    root = Path("tiny-imagenet-200")
    for i in range(10):
        save_images(root / "train" / f"n0{i}" / "images", 60)
    save_images(root / "val" / "images", 40)
    lines = [f"{i}.png\tn0{i % 10}\t0\t0\t9\t9\n" for i in range(40)]
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    save_images(root / "test" / "images", 1)


def cinic():
    for part in ("train", "valid", "test"):
        for name in ("cat", "dog"):
            save_images(f"CINIC-10/{part}/{name}", 60)


def domains(root, names, classes, n=4):
    for domain in names:
        for name in classes:
            save_images(f"{root}/{domain}/{name}", n)


def domain_net():
    names = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
    domains("DomainNet", names, [*FEDBN, "zigzag"])
    for domain in names:
        lines = [f"{domain}/{name}/{i}.png 7\n" for name in FEDBN for i in range(2)]
        Path("DomainNet", f"{domain}_test.txt").write_text("".join(lines))


def digit_five(n=12):
    root = Path("Digit-Five")
    root.mkdir()
    y, one_hot = np.arange(n) % 10, np.eye(10)[np.arange(n) % 10]
    labels = {"label_train": one_hot, "label_test": one_hot}

    def pixels(*shape):
        return RNG.integers(0, 255, shape, np.uint8)

    def save(file, **content):
        savemat(root / file, content)

    sets = {f"{p}_32": pixels(n, 32, 32).astype(float) for p in ("train", "test")}
    save("mnist_data.mat", **labels, **sets)
    save("mnistm_with_label.mat", **labels, train=pixels(n, 28, 28, 3), test=pixels(n, 28, 28, 3))
    for part in ("train", "test"):
        x = pixels(32, 32, 3, n)
        save(f"svhn_{part}_32x32.mat", X=x, y=np.where(y, y, 10)[:, None])
        save(f"synth_{part}_32x32.mat", X=x, y=y[:, None])
    usps = np.empty((2, 2), object)
    for i in range(2):
        usps[i, 0], usps[i, 1] = RNG.random((n, 1, 28, 28)), np.where(y, y, 10)[:, None]
    save("usps_28x28.mat", dataset=usps)


def med_mnist():
    parts = {}
    for part, n in (("train", 150), ("val", 50), ("test", 100)):
        parts[f"{part}_images"] = RNG.integers(0, 255, (n, 28, 28, 3), np.uint8)
        parts[f"{part}_labels"] = (np.arange(n) % 3)[:, None].astype(np.uint8)
    np.savez("pathmnist.npz", **parts)


def har(folder="UCI HAR Dataset"):
    root = Path(folder)
    for part, subjects in (("train", range(1, 22)), ("test", range(22, 31))):
        (root / part / "Inertial Signals").mkdir(parents=True)
        subject = np.repeat(list(subjects), 7)
        n = len(subject)
        np.savetxt(root / part / f"subject_{part}.txt", subject, "%d")
        np.savetxt(root / part / f"y_{part}.txt", 1 + np.arange(n) % 6, "%d")
        np.savetxt(root / part / f"X_{part}.txt", RNG.random((n, 7)), " %.7e")
        for kind in ("body_acc", "body_gyro", "total_acc"):
            for axis in "xyz":
                file = root / part / "Inertial Signals" / f"{kind}_{axis}_{part}.txt"
                np.savetxt(file, RNG.random((n, 32)), " %.7e")
    names = ["WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING"]
    lines = [f"{i} {name}\n" for i, name in enumerate(names, 1)]
    (root / "activity_labels.txt").write_text("".join(lines))


def pamap2(folder="PAMAP2_Dataset/Protocol"):
    Path(folder).mkdir(parents=True)
    for subject in range(101, 110):
        rows = RNG.random((900, 54))
        rows[:, 1] = np.repeat([0, 1, 4, 0, 24], [100, 300, 280, 20, 200])
        rows[150, 4], rows[:, 2] = np.nan, np.nan
        np.savetxt(Path(folder, f"subject{subject}.dat"), rows, "%.4g")


def amazon():
    lines = [
        {"rating": float(1 + i % 5), "title": "so", "text": "good bad", "user_id": f"u{i % 60}"}
        for i in range(60 * 21)
    ]
    with gzip.open("All_Beauty.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, lines)))


def femnist():
    for part, n in (("train", 3), ("test", 1)):
        users = {f"f{i}": {"x": [[0.5] * 784] * n, "y": [i % 62] * n} for i in range(62)}
        Path("femnist/data", part).mkdir(parents=True)
        content = {"users": list(users), "user_data": users}
        Path("femnist/data", part, "all.json").write_text(json.dumps(content))


PACS = ("art_painting", "cartoon", "photo", "sketch")
OFFICE = ("amazon", "caltech", "dslr", "webcam")
# What writes the files, number of classes, a class name (or None), and the name of an owner.
RECIPES = {
    "Tiny-ImageNet": (tiny_imagenet, 10, "n01", None),
    "CINIC-10": (cinic, 2, "cat", None),
    "PACS": (lambda: domains("kfold", PACS, ("dog", "guitar")), 2, "dog", "photo"),
    "Office-Caltech-10": (
        lambda: domains("office_caltech_10", OFFICE, ("bike", "mug")),
        *(2, "bike", "dslr"),
    ),
    "DomainNet": (domain_net, 10, "zebra", "sketch"),
    "Digit-5": (digit_five, 10, None, "usps"),
    "MedMNIST": (med_mnist, 3, None, None),
    "HAR (UCI smartphones)": (har, 6, "SITTING", "30"),
    "PAMAP2": (pamap2, 3, "rope jumping", "subject109"),
    "AG News": (lambda: tokens_test.write_news(Path("ag_news_csv"), 800), 4, "1", None),
    "Amazon reviews": (amazon, 5, "5.0", None),
    "FEMNIST": (femnist, 62, None, None),
}


def test_every_recipe_is_tested():
    assert set(COMMANDS) == set(RECIPES)
    assert len(PAGE.split()) <= 1500


@pytest.mark.slow("a command for each recipe")
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_command_of_a_recipe_reads_its_files(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write, outputs, class_name, owner = RECIPES[recipe]
    write()
    words = shlex.split(COMMANDS[recipe].replace("\\\n", " "))
    assert words[:2] == ["fedjax-pfl", "baseline"]
    config = baseline.get_config(words[2].removeprefix("--config=baseline:"))
    for word in words[3:]:
        name, text = word.removeprefix("--config.").split("=", 1)
        value = int(text) if text.isdigit() else text
        value = float(text) if re.fullmatch(r"\d+\.\d+", text) else value
        group, _, last = name.rpartition(".")
        configuration.override(config, {group: {last: value}} if group else {last: value})
    federation = build.build(config).federation
    assert (federation.clients, federation.outputs) == (config.clients, outputs)
    assert federation.counts.min() > 0
    if class_name:
        assert class_name in federation.metadata["classes"]
    if owner:
        assert owner in federation.owners


def test_details_of_readers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    digit_five()
    digits = load("digit5:Digit-Five", size=8)
    assert digits.x_train.shape == (60, 8, 8, 3)
    assert digits.y_train.tolist() == [*range(10), 0, 1] * 5
    for values in (0.9, 300.0, -1.0):
        line = message(archives._resize, "digit5", np.full((1, 4, 4, 1), values), 4)
        assert (
            line == f"digit5: images have values from {values:g} to {values:g}, not from 0 to 255"
        )
    np.savez(
        "chest.npz",
        train_images=np.zeros((4, 5, 5), np.uint8),
        train_labels=np.eye(4, 3, dtype=int),
    )
    chest = load("npz:chest.npz")
    assert (chest.x_train.shape, chest.y_train.dtype, chest.x_test) == ((4, 5, 5, 1), bool, None)
    har()
    every = load("har:UCI HAR Dataset", signals=False, overlap=True)
    assert (every.x_train.shape, every.overlapping) == ((147, 7), True)
    half = load("har:UCI HAR Dataset", signals=False)
    assert not half.overlapping
    by_subject = every.x_train.reshape(21, 7, 7)[:, ::2]  # also the first window of each subject
    np.testing.assert_array_equal(half.x_train, by_subject.reshape(84, 7))
    assert np.unique(half.owner_test, return_counts=True)[1].tolist() == [4] * 9
    pamap2()
    recordings = load("pamap2:PAMAP2_Dataset/Protocol", length=100)
    assert recordings.x_train.shape == (9 * (3 + 2 + 2), 100, 27)
    assert recordings.y_train[:7].tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert recordings.x_train[0, 50, 0] == recordings.x_train[0, 49, 0]  # the missing number
    Path("UCI HAR Dataset/test/y_test.txt").write_text("1\n")
    Path("PAMAP2_Dataset/Protocol/subject101.dat").write_text("1 2\n")
    Path("Digit-Five/usps_28x28.mat").unlink()
    Path("bad.npz").write_bytes(b"no")
    Path("cut.npz").write_bytes(Path("chest.npz").read_bytes()[:200])
    for name, line in (
        ("har:UCI HAR Dataset", "files of test have different numbers of rows"),
        ("har:Digit-Five", "has no file y_train.txt"),
        ("pamap2:PAMAP2_Dataset/Protocol", "subject101.dat has 2 columns instead of 54"),
        ("pamap2:Digit-Five", "no file that ends with .dat"),
        ("digit5:Digit-Five", "has no file usps_28x28.mat"),
        ("npz:bad.npz", "cannot be read as a NumPy archive"),
        ("npz:cut.npz", "cannot be read as a NumPy archive"),
        ("npz:none.npz", "there is no such file"),
    ):
        assert line in message(load, name)
    assert "no arrays val_images" in message(lambda: load("npz:chest.npz", train="val"))


def test_a_part_is_not_in_both_sets(tmp_path):
    parts = {f"{key}_{part}": np.zeros((4, 2)) for part in ("train", "test") for key in "xy"}
    np.savez(tmp_path / "a.npz", **parts)
    name = f"npz:{tmp_path / 'a.npz'}"
    line = message(lambda: load(name, train="train,test"))
    assert "npz.train and npz.test both name 'test'" in line
    dataset = load(name, train="train,test", test="")
    assert (len(dataset.x_train), dataset.x_test) == (8, None)


def test_damaged_matlab_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    digit_five()
    file = Path("Digit-Five/mnist_data.mat")
    savemat(file, {"train_32": np.zeros(9999)}, do_compression=True)
    for content in (b"", file.read_bytes()[:-4] + bytes(4)):  # the last four are a checksum
        file.write_bytes(content)
        assert "a file is not one of Digit-Five" in message(load, "digit5:Digit-Five")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"x_val": np.zeros((4, 2)), "y_val": np.zeros(5, int)}, "x_val is [4, 2] and y_val [5]"),
        ({"x_val": 3.0, "y_val": 1}, "x_val is [] and y_val []"),
        ({"x_val": np.zeros((4, 2)), "y_val": np.zeros((4, 2), int)}, "different shapes or types"),
        ({"x_val": np.zeros((4, 2), np.uint8), "y_val": np.zeros(4, int)}, "shapes or types"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(tmp_path, content, line):
    train = {"x_train": np.zeros((6, 2)), "y_train": np.zeros(6, int)}
    np.savez(tmp_path / "a.npz", **train, **content)
    name = f"npz:{tmp_path / 'a.npz'}"
    assert line in message(lambda: load(name, train="train,val"))
    assert "npz.train names no part" in message(lambda: load(name, train=""))


def test_labels_that_a_cast_would_change_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    digit_five()
    y = np.full((12, 1), 13)
    savemat("Digit-Five/svhn_train_32x32.mat", {"X": np.zeros((32, 32, 3, 12), np.uint8), "y": y})
    images = {"train_images": np.zeros((4, 5, 5), np.uint8)}
    np.savez("two.npz", **images, train_labels=2 * np.eye(4, 3, dtype=int))
    har()
    lines = Path("UCI HAR Dataset/train/y_train.txt").read_text().replace("1", "1.9", 1)
    Path("UCI HAR Dataset/train/y_train.txt").write_text(lines)
    pamap2()
    rows = np.loadtxt("PAMAP2_Dataset/Protocol/subject101.dat")
    for value, line in ((np.nan, "label nan in example 5"), (1.5, "label 1.5 in example 5")):
        rows[5, 1] = value
        np.savetxt("PAMAP2_Dataset/Protocol/subject101.dat", rows)
        assert line in message(load, "pamap2:PAMAP2_Dataset/Protocol")
    for name, line in (
        ("digit5:Digit-Five", "digit5:Digit-Five: label 13 in example 0 is not an integer"),
        ("npz:two.npz", "label 2 in example 0 is not an integer from 0 to 1"),
        ("har:UCI HAR Dataset", "y_train.txt: label 1.89"),
    ):
        assert line in message(load, name)
    y[:] = 10
    savemat("Digit-Five/svhn_train_32x32.mat", {"X": np.zeros((32, 32, 3, 11), np.uint8), "y": y})
    assert "svhn has 11 images and 12 labels" in message(load, "digit5:Digit-Five")
