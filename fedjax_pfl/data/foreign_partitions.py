"""Clients' examples as PFLlib and FL-bench write them, as a dataset whose owners are the clients.

PFLlib writes config.json and train/CLIENT.npz and test/CLIENT.npz, each with the pickled dict
{"x", "y"}. FL-bench writes partition.pkl with indices of the training, validation and test examples
of each client, next to the examples: data.npy and targets.npy (FEMNIST, CelebA, synthetic),
raw/xdata.npy and raw/ydata.npy (MedMNIST, COVID-19), or the files that torchvision downloads
(MNIST, FashionMNIST, EMNIST, CIFAR-10, CIFAR-100). Its training set comes first in these indices.

Images get their channels last. Examples are stored as float32 or uint8, tokens as int32.
"""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.core.errors import UsageError, first_line
from fedjax_pfl.data import plain_pickle

_PARTS = ("train", "test")


class Examples(NamedTuple):
    """Examples of all clients of a training or a test set."""

    x: np.ndarray  # [n, ...]: float32, uint8, or int32 tokens
    y: np.ndarray  # int32 [n]: class
    owner: np.ndarray  # int32 [n]: client that holds the example


class Partition(NamedTuple):
    """Training and test examples of clients, as another library divided them."""

    library: str  # PFLlib or FL-bench
    train: Examples
    test: Examples
    classes: int  # number of classes


def read(folder: Path) -> Partition:
    """Reads a folder of PFLlib or FL-bench; raises UsageError if it is neither."""
    if (folder / "partition.pkl").is_file():
        return read_fl_bench(folder)
    if (folder / "train").is_dir() and (folder / "config.json").is_file():
        return read_pfllib(folder)
    raise UsageError(
        f"{folder} has neither config.json and train/0.npz (PFLlib) nor partition.pkl (FL-bench)"
    )


def read_pfllib(folder: Path) -> Partition:
    """Reads a dataset's folder of PFLlib: config.json, train/CLIENT.npz and test/CLIENT.npz."""
    try:
        config = json.loads((folder / "config.json").read_text())
        clients, classes = int(config["num_clients"]), config.get("num_classes")
        if clients < 1:
            raise ValueError(f"num_clients is {clients}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{folder / 'config.json'} cannot be read: {first_line(error)}") from None
    parts = list[Examples]()
    for part in _PARTS:
        examples = list[tuple[np.ndarray, np.ndarray]]()
        for client in range(clients):
            path = folder / part / f"{client}.npz"
            content = plain_pickle.load_npz(path, "data")
            if not isinstance(content, dict) or not {"x", "y"} <= content.keys():
                raise UsageError(f"{path} has no x and y")
            x, y = _inputs(path, content["x"]), _labels(path, content["y"])
            if len(x) != len(y):
                raise UsageError(f"{path} has {len(x)} inputs and {len(y)} labels")
            examples.append((x, y))
        parts.append(_concatenate(f"{folder / part}", examples))
    largest = int(max(part.y.max(initial=0) for part in parts))
    classes = largest + 1 if classes is None else int(classes)  # older files have no num_classes
    partition = Partition("PFLlib", train=parts[0], test=parts[1], classes=classes)
    return _check(folder, partition, clients)


def read_fl_bench(folder: Path) -> Partition:
    """Reads a dataset's folder of FL-bench, appending validation examples to training ones.

    Raises UsageError for a client without training examples.
    """
    path = folder / "partition.pkl"
    try:
        clients = plain_pickle.load(path)["data_indices"]
        numbers = range(len(clients))  # a list, or a dict with numbers as keys
        indices = [
            {name: np.asarray(clients[i][name], np.int64) for name in ("train", "val", "test")}
            for i in numbers
        ]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UsageError(f"{path} is no partition of FL-bench: {first_line(error)}") from None
    x, y = _fl_bench_examples(folder)
    if len(x) != len(y):
        raise UsageError(f"{folder} has {len(x)} inputs and {len(y)} labels")
    for i, parts in enumerate(indices):
        rows = np.concatenate(list(parts.values()))
        if rows.ndim != 1 or (len(rows) and not 0 <= rows.min() <= rows.max() < len(y)):
            raise UsageError(f"{path}: client {i} has examples that are not among the {len(y)}")
        if not len(parts["train"]):
            raise UsageError(
                f"{path}: client {i} has no training examples, as in FL-bench's split by "
                "users; divide the data by samples"
            )
    rows_of = {
        "train": [np.append(parts["train"], parts["val"]) for parts in indices],
        "test": [parts["test"] for parts in indices],
    }
    train, test = (
        _concatenate(str(path), [(x[rows], y[rows]) for rows in rows_of[part]]) for part in _PARTS
    )
    partition = Partition("FL-bench", train, test, classes=int(y.max()) + 1)
    return _check(folder, partition, len(indices))


def write(partition: Partition, folder: Path) -> None:
    """Writes the files that the dataset npy:FOLDER reads to a new folder."""
    folder.mkdir(parents=True)
    for suffix, examples in (("", partition.train), ("_test", partition.test)):
        for name, array in examples._asdict().items():
            np.save(folder / f"{name}{suffix}.npy", array)
    np.save(folder / "outputs.npy", partition.classes)  # some may have no example here


def _concatenate(label: str, examples: Sequence[tuple[np.ndarray, np.ndarray]]) -> Examples:
    """Joins the pairs (x, y) of clients 0, 1, ... to one set of examples.

    Messages of UsageError begin with `label`.
    """
    xs, ys = zip(*examples, strict=True)
    filled = [x for x in xs if len(x)]  # an empty client's x may have no shape
    if len({x.shape[1:] for x in filled}) != 1:
        raise UsageError(f"{label}: examples of clients have different shapes, or there are none")
    owner = np.repeat(np.arange(len(ys), dtype=np.int32), [len(y) for y in ys])
    return Examples(x=np.concatenate(filled), y=np.concatenate(ys), owner=owner)


def _check(folder: Path, partition: Partition, clients: int) -> Partition:
    """Returns the same partition, of N `clients`; `folder` is for messages.

    Raises UsageError for labels outside the classes and for clients without training examples.
    """
    for y in (partition.train.y, partition.test.y):
        if not 0 <= y.min() <= y.max() < partition.classes:
            raise UsageError(f"{folder} has labels outside 0 to {partition.classes - 1}")
    counts = np.bincount(partition.train.owner, minlength=clients)
    if not counts.all():
        raise UsageError(f"{folder}: client {int(np.argmin(counts))} has no training examples")
    return partition


def _labels(path: Path, values: Any) -> np.ndarray:
    """Returns labels as int32 [n]; raises UsageError, with the path, if they are not integers."""
    y = np.asarray(values)
    if y.shape == (0,):  # of any type
        return np.zeros(0, np.int32)
    is_numeric = y.ndim == 1 and y.dtype.kind in "biuf"
    if not is_numeric or not (np.isfinite(y).all() and np.all(y == y.astype(np.int32))):
        raise UsageError(f"{path}: labels are not one integer for each example")
    return y.astype(np.int32)


def _inputs(path: Path, values: Any) -> np.ndarray:
    """Returns inputs as float32 or uint8, images [n, height, width, channels], or int32 tokens.

    For PFLlib's news each input is (tokens, length), and the length is left out. `path` is that of
    the file, for messages.
    """
    try:
        rows = list(values)
        if rows and len(rows[0]) == 2 and np.ndim(rows[0][1]) == 0 and np.ndim(rows[0][0]) == 1:
            values = [tokens for tokens, _ in rows]
        x = np.array(values) if isinstance(values, list) else np.asarray(values)
        x = x.astype(np.float32) if x.dtype == object else x
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path}: inputs are no array: {first_line(error)}") from None
    if x.dtype.kind == "f":
        x = x.astype(np.float32)
    elif x.dtype.kind in "iu" and x.dtype != np.uint8:
        x = x.astype(np.int32)
    return np.moveaxis(x, 1, -1) if x.ndim == 4 else x


def _fl_bench_examples(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns x [n, ...] and y, int32 [n], of FL-bench's dataset, in the order of its indices."""
    for x_name, y_name in (("data.npy", "targets.npy"), ("raw/xdata.npy", "raw/ydata.npy")):
        if (folder / x_name).is_file():
            try:
                x, y = (np.load(folder / name, allow_pickle=False) for name in (x_name, y_name))
            except (OSError, ValueError, EOFError) as error:
                raise UsageError(f"{folder} cannot be read: {first_line(error)}") from None
            if x.dtype.kind not in "biuf" or not x.size:
                raise UsageError(f"{folder / x_name} has no numbers")
            return _images(x), _labels(folder / y_name, y[:, 0] if y.shape[1:] == (1,) else y)
    batches = [folder / f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)]
    for files, label in (
        ([*batches, folder / "cifar-10-batches-py/test_batch"], "labels"),
        ([folder / f"cifar-100-python/{part}" for part in _PARTS], "fine_labels"),
    ):
        if files[0].is_file():
            if label == "fine_labels" and _fl_bench_arguments(folder).get("super_class"):
                raise UsageError(
                    f"{folder} has superclasses as labels (super_class in args.json), which its "
                    "files do not have: write data.npy and targets.npy there"
                )
            contents = [plain_pickle.load(file) for file in files]
            try:
                x = np.concatenate([content["data"] for content in contents])
                y = np.concatenate([content[label] for content in contents])
                pixels = x.reshape(-1, 3, 32, 32)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                line = first_line(error)
                raise UsageError(f"{files[0].parent} has no images of CIFAR: {line}") from None
            return pixels.transpose(0, 2, 3, 1), _labels(files[0], y)
    if train := _idx_training_file(folder):
        tests = [train.with_name(train.name.replace("train", part)) for part in ("t10k", "test")]
        images = [train, tests[0] if tests[0].is_file() else tests[1]]
        labels = [f.with_name(f.name.replace("images-idx3", "labels-idx1")) for f in images]
        x, y = (np.concatenate([_idx(file) for file in files]) for files in (images, labels))
        return x[..., None], y.astype(np.int32)
    raise UsageError(
        f"{folder} has a partition and no examples that can be read: write them to data.npy and "
        "targets.npy there, in the order of FL-bench's dataset"
    )


def _fl_bench_arguments(folder: Path) -> dict[str, Any]:
    """Returns what FL-bench wrote to args.json: its arguments. {} if there is no such file."""
    path = folder / "args.json"
    if not path.is_file():
        return {}
    try:
        arguments = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}") from None
    return arguments if isinstance(arguments, dict) else {}


def _idx_training_file(folder: Path) -> Path | None:
    """Returns the file of training images in MNIST's format that torchvision unpacked, or None.

    EMNIST has one for each of its splits; args.json names the one that FL-bench divided.
    """
    files = sorted(folder.glob("*/raw/*train-images-idx3-ubyte*"))
    by_split = {file.name.partition("train-images")[0]: file for file in reversed(files)}
    if len(by_split) <= 1:
        return next(iter(by_split.values()), None)
    split = _fl_bench_arguments(folder).get("emnist_split")
    if (prefix := f"emnist-{split}-") not in by_split:
        names = ", ".join(sorted(name.removeprefix("emnist-").strip("-") for name in by_split))
        raise UsageError(
            f"{folder} has EMNIST's splits {names}, and its args.json does not say which of them "
            'was divided: write {"emnist_split": "byclass"}, or another one, to args.json'
        )
    return by_split[prefix]


def _images(x: np.ndarray) -> np.ndarray:
    """Returns x of .npy files as uint8, or as float32, images of values up to 255 divided by 255.

    Rows of 784 numbers become images; images get a channel axis at the end if they have none.
    """
    if x.ndim == 2 and x.shape[1] == 784:  # FEMNIST
        x = x.reshape(-1, 28, 28)
    x = x[..., None] if x.ndim == 3 else x
    if x.dtype == np.uint8:
        return x  # the dataset divides by 255
    return np.asarray(x / 255 if x.max() > 1 and x.ndim == 4 else x, np.float32)


def _idx(path: Path) -> np.ndarray:
    """Reads a file of bytes in MNIST's IDX format, also gzipped. Returns uint8 of its shape.

    Raises UsageError for other files.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        axes = content[3]
        shape = np.frombuffer(content, ">i4", axes, 4)
        if content[:3] != b"\0\0\x08":
            raise ValueError("it is no IDX file of bytes, such as train-images-idx3-ubyte")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}") from None
