"""Tests of partitions of PFLlib and FL-bench, and of pickles with plain values only."""

import gzip
import json
import os
import pickle
import shlex
from pathlib import Path

import numpy as np
import pytest

from fedjax_pfl import data
from fedjax_pfl.data import foreign_partitions, plain_pickle
from tests.commands import message, run_here

RNG = np.random.default_rng(0)
SIZES = {"train": (4, 3), "test": (2, 1)}


def pfllib(folder: Path, shape: tuple[int, ...] = (3, 5, 4)) -> dict[tuple[str, int], dict]:
    """Writes two clients as PFLlib does. Returns their examples."""
    folder.mkdir(exist_ok=True)
    config = {"num_clients": 2, "num_classes": 4, "partition": "dir"}
    (folder / "config.json").write_text(json.dumps(config))
    contents = {}
    for part, sizes in SIZES.items():
        (folder / part).mkdir(exist_ok=True)
        for client, n in enumerate(sizes):
            contents[part, client] = {"x": RNG.normal(size=(n, *shape)), "y": RNG.integers(0, 4, n)}
            np.savez_compressed(folder / part / f"{client}.npz", data=contents[part, client])
    return contents


def test_examples_of_pfllib(tmp_path, capsys):
    contents = pfllib(tmp_path / "cifar")
    out = tmp_path / "my examples"
    run_here("import-partition", tmp_path / "cifar", f"--out={out}")
    text = capsys.readouterr().out
    assert text.startswith(
        "PFLlib: 2 clients, 4 classes, 7 training and 3 test examples of shape [5, 4, 3], float32"
    )
    words = shlex.split(text)
    settings = dict(word[9:].split("=") for word in words if word.startswith("--config."))
    assert settings.pop("algorithm") == "fedavg"
    dataset, clients = data.load(settings.pop("dataset")), int(settings.pop("clients"))
    examples, federation = data.federate(dataset, clients=clients, **settings)
    assert federation.clients == 2
    for (part, client), expected in contents.items():
        split = examples.train if part == "train" else examples.test
        rows = np.asarray(split.rows)[client, : np.asarray(split.size)[client]]
        x = np.moveaxis(expected["x"], 1, -1).astype(np.float32)
        first_values = [np.argsort(values[:, 0, 0, 0]) for values in (examples.x[rows], x)]
        np.testing.assert_array_equal(examples.x[rows][first_values[0]], x[first_values[1]])
        np.testing.assert_array_equal(
            examples.y[rows][first_values[0]], expected["y"][first_values[1]]
        )
    (written := tmp_path / "file").touch()
    assert "/file/new cannot be written (Not a directory)" in message(
        run_here, "import-partition", tmp_path / "cifar", f"--out={written}/new"
    )
    assert "exists; choose a new folder" in message(
        run_here, "import-partition", tmp_path / "cifar", f"--out={out}"
    )


def test_a_client_without_test_examples_may_have_labels_of_any_type(tmp_path):
    pfllib(tmp_path)
    empty = {"x": np.zeros((0, 3, 5, 4)), "y": np.array([], object)}
    np.savez(tmp_path / "test" / "1.npz", data=empty)
    assert set(foreign_partitions.read(tmp_path).test.owner.tolist()) == {0}


def test_classes_without_examples_stay(tmp_path):
    """PFLlib states nine classes, and clients have four of them."""
    pfllib(tmp_path / "cifar")
    config = tmp_path / "cifar" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_classes": 9}))
    foreign_partitions.write(foreign_partitions.read(tmp_path / "cifar"), out := tmp_path / "out")
    assert data.load(f"npy:{out}").outputs == 9
    np.save(out / "outputs.npy", [9.0, 1.0])
    assert message(data.load, f"npy:{out}") == (
        f"npy:{out}: outputs.npy has float64 [2]; use one integer"
    )


def test_texts_of_pfllib_lose_their_lengths(tmp_path):
    pfllib(tmp_path)
    tokens = [([3, 1, 0], 2), ([2, 2, 2], 3)]
    x = np.empty((2, 2), object)
    x[:] = tokens
    for part in SIZES:
        for client in range(2):
            content = {"x": x if client else tokens, "y": [0, 1]}
            np.savez_compressed(tmp_path / part / f"{client}.npz", data=content)
    train = foreign_partitions.read(tmp_path).train
    np.testing.assert_array_equal(train.x, [[3, 1, 0], [2, 2, 2]] * 2)
    assert (train.x.dtype, train.owner.tolist()) == (np.int32, [0, 0, 1, 1])


def idx(path: Path, array: np.ndarray) -> None:
    """Writes bytes in the IDX format, compressed."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def fl_bench(folder: Path, examples: str) -> tuple[np.ndarray, np.ndarray]:
    """Writes twelve examples and a partition as FL-bench does. Returns x and y."""
    folder.mkdir()
    y = np.arange(12) % 3
    x = RNG.integers(0, 256, (12, 32, 32, 3) if examples == "cifar" else (12, 28, 28, 1), np.uint8)
    if examples == "femnist":
        np.save(folder / "data.npy", x.reshape(12, 784) / 255)
        np.save(folder / "targets.npy", y)
    elif examples in ("mnist", "emnist"):
        (raw := folder / examples.upper() / "raw").mkdir(parents=True)
        parts = ("train", "t10k")
        if examples == "emnist":  # all of its splits are unpacked; this one was divided
            parts = ("emnist-mnist-train", "emnist-mnist-test")
            (folder / "args.json").write_text('{"emnist_split": "mnist"}')
            for part in ("train", "test"):
                idx(raw / f"emnist-balanced-{part}-images-idx3-ubyte.gz", x[::-1, ..., 0])
                idx(raw / f"emnist-balanced-{part}-labels-idx1-ubyte.gz", y[::-1])
        for part, rows in zip(parts, (slice(8), slice(8, 12)), strict=True):
            idx(raw / f"{part}-images-idx3-ubyte.gz", x[rows, ..., 0])
            idx(raw / f"{part}-labels-idx1-ubyte.gz", y[rows])
    else:
        (batches := folder / "cifar-10-batches-py").mkdir()
        names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
        for i, name in enumerate(names):
            rows = slice(2 * i, 2 * i + 2)
            pixels = x[rows].transpose(0, 3, 1, 2).reshape(2, -1)
            content = pickle.dumps({"data": pixels, "labels": y[rows].tolist()}, protocol=2)
            (batches / name).write_bytes(content)
    indices = [
        {"train": np.array([0, 11, 2]), "val": np.array([5]), "test": np.array([7])},
        {"train": [1, 4], "val": [], "test": [3, 6]},
    ]
    partition = {"separation": {"train": [0, 1], "total": 2}, "data_indices": indices}
    (folder / "partition.pkl").write_bytes(pickle.dumps(partition))
    return x, y


@pytest.mark.parametrize("examples", ["femnist", "mnist", "emnist", "cifar"])
def test_examples_of_fl_bench(tmp_path, examples):
    folder = tmp_path / "training" / examples  # only the part of the file's name is replaced
    folder.parent.mkdir()
    x, y = fl_bench(folder, examples)
    partition = foreign_partitions.read(folder)
    scale = 255 if examples == "femnist" else 1
    for part, rows in ((partition.train, [0, 11, 2, 5, 1, 4]), (partition.test, [7, 3, 6])):
        np.testing.assert_allclose(part.x * scale, x[rows], rtol=1e-6)
        np.testing.assert_array_equal(part.y, y[rows])
    assert partition.train.owner.tolist() == [0, 0, 0, 0, 1, 1]
    assert partition.classes == 3


def test_labels_that_fl_bench_changed_are_refused(tmp_path):
    fl_bench(tmp_path / "emnist", "emnist")
    (tmp_path / "emnist" / "args.json").write_text("{}")
    line = message(foreign_partitions.read, tmp_path / "emnist")
    assert "splits balanced, mnist, and its args.json does not say" in line
    fl_bench(folder := tmp_path / "cifar100", "cifar")
    (folder / "cifar-10-batches-py").rename(folder / "cifar-100-python")
    (folder / "cifar-100-python" / "data_batch_1").rename(folder / "cifar-100-python" / "train")
    (folder / "args.json").write_text('{"super_class": true}')
    assert "has superclasses as labels" in message(foreign_partitions.read, folder)
    (folder / "args.json").write_text("{")
    assert "args.json cannot be read" in message(foreign_partitions.read, folder)


class Harmful:
    """A value whose pickle calls a function."""

    def __reduce__(self):
        return os.system, ("touch /tmp/harmful",)


class Constructed:
    """A value whose pickle constructs something from a function, its arguments and a state."""

    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return self.parts


OUTSIDE = (3, "|", None, ("a",), {"a": (np.dtype("f8"), 1000)}, 4, 1, 0)  # of four bytes


@pytest.mark.parametrize("protocol", range(2, 6))
def test_pickles_of_plain_values(protocol):
    value = {"a": [1, 2.5, "text", b"\xff\x00", None, True], 3: np.arange(4.0), "n": np.int64(7)}
    value["more"] = [np.asfortranarray(np.arange(6).reshape(2, 3)), np.array(["a", "bc"]), (1, [2])]
    value["empty"] = np.zeros((0, 3), np.int32)
    objects = np.array([[{"x": np.ones(2, ">f4")}], [None]], object)
    read = plain_pickle.loads(pickle.dumps({**value, "objects": objects}, protocol=protocol))
    read_objects = read.pop("objects")
    assert read_objects.shape == (2, 1)
    np.testing.assert_equal(read_objects.tolist(), objects.tolist())
    np.testing.assert_equal(read, value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"x": Harmful()}, "system, which is no plain value"),
        ({"x": Path("a")}, "which is no plain value"),
        (Constructed(np.ndarray, ((1,), np.dtype("O"), b"A" * 8)), "cannot be read"),
        (Constructed(np.dtype, ("V4", False, True), OUTSIDE), "an array of the dtype 'V4'"),
        (Constructed(np.dtype, ("f4", False, True), OUTSIDE), "a dtype with fields"),
        ({"x": np.dtype("f4")}, "a dtype or an array without content"),
        ({"x": {1, 2}}, "it has a set, which is no plain value"),
        (np.array(Harmful()), "system, which is no plain value"),
        ([1], "an array [1] of int64, not one object"),
    ],
)
def test_other_pickles_are_refused(tmp_path, value, words):
    pfllib(tmp_path)
    np.savez(tmp_path / "train" / "1.npz", data=value)
    line = message(foreign_partitions.read, tmp_path)
    assert str(tmp_path / "train" / "1.npz") in line
    assert words in line


def test_damaged_folders_are_refused(tmp_path):
    folder = tmp_path / "data"
    assert "neither config.json and train/0.npz (PFLlib)" in message(
        foreign_partitions.read, folder
    )
    pfllib(folder)
    (folder / "test" / "1.npz").write_bytes((folder / "test" / "1.npz").read_bytes()[:100])
    assert "1.npz cannot be read" in message(foreign_partitions.read, folder)
    (folder / "test" / "1.npz").unlink()
    assert "1.npz cannot be read: No such file" in message(foreign_partitions.read, folder)
    np.savez(folder / "test" / "1.npz", data={"x": np.zeros((1, 3, 5, 4)), "y": [9]})
    assert "labels outside 0 to 3" in message(foreign_partitions.read, folder)
    np.savez(folder / "test" / "1.npz", data={"x": np.zeros((1, 3)), "y": [1]})
    assert "different shapes" in message(foreign_partitions.read, folder)
    np.savez(folder / "test" / "1.npz", data={"x": [1]})
    assert "has no x and y" in message(foreign_partitions.read, folder)
    np.savez(folder / "test" / "1.npz", data={"x": np.zeros(3), "y": [0, 1, 1]})
    assert "test/1.npz: inputs are no array" in message(foreign_partitions.read, folder)
    np.savez(folder / "train" / "1.npz", data={"x": np.zeros((0, 5, 4, 3)), "y": []})
    np.savez(folder / "test" / "1.npz", data={"x": np.zeros((1, 3, 5, 4)), "y": [1]})
    assert "client 1 has no training examples" in message(foreign_partitions.read, folder)
    (folder / "config.json").write_text('{"num_clients": 0}')
    assert "num_clients is 0" in message(foreign_partitions.read, folder)

    fl_bench(tmp_path / "bench", "mnist")
    path = tmp_path / "bench" / "partition.pkl"
    content = pickle.loads(path.read_bytes())
    content["data_indices"][1]["test"] = [12]
    path.write_bytes(pickle.dumps(content))
    assert "client 1 has examples that are not among the 12" in message(
        foreign_partitions.read, path.parent
    )
    content["data_indices"][1] = {"train": [], "val": [], "test": [3]}
    path.write_bytes(pickle.dumps(content))
    assert "no training examples, as in FL-bench" in message(foreign_partitions.read, path.parent)
    path.write_bytes(pickle.dumps([1]))
    assert "is no partition of FL-bench" in message(foreign_partitions.read, path.parent)

    bench = tmp_path / "femnist"
    fl_bench(bench, "femnist")
    np.save(bench / "targets.npy", np.zeros(13, int))
    assert "has 12 inputs and 13 labels" in message(foreign_partitions.read, bench)
    for labels in (np.array(["a"] * 12), np.array(3)):
        np.save(bench / "targets.npy", labels)
        assert "targets.npy: labels are not one integer" in message(foreign_partitions.read, bench)
    (bench / "targets.npy").unlink()
    assert f"{bench} cannot be read: [Errno 2]" in message(foreign_partitions.read, bench)
    np.save(bench / "targets.npy", np.zeros(12, int))
    for wrong in (np.array(["a"] * 12), np.zeros((0, 784))):
        np.save(bench / "data.npy", wrong)
        assert message(foreign_partitions.read, bench) == f"{bench / 'data.npy'} has no numbers"

    cifar = tmp_path / "cifar10"
    fl_bench(cifar, "cifar")
    batch = cifar / "cifar-10-batches-py" / "data_batch_2"
    for damaged in ([1], {b"data": [1]}, {"data": np.zeros((2, 5)), "labels": [0, 1]}):
        batch.write_bytes(pickle.dumps(damaged))
        assert "cifar-10-batches-py has no images of CIFAR" in message(
            foreign_partitions.read, cifar
        )
