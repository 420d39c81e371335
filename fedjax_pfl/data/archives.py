"""Arrays in NumPy archives (.npz), such as MedMNIST, and the MATLAB files of Digit-5."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError, first_line
from fedjax_pfl.data.dataset import Dataset, arrays
from fedjax_pfl.data.labels import class_numbers
from fedjax_pfl.data.tables import find_path

_MNIST = ("mnist_data.mat", "mnistm_with_label.mat")
_CROPPED = {"svhn": "svhn_{}_32x32.mat", "syn": "synth_{}_32x32.mat"}
_PARTS = ("train", "test")
_DAMAGED = (zipfile.BadZipFile, zlib.error)


def npz(path: str, *, train: str = "train", test: str = "test") -> Dataset:
    """Arrays train_images, train_labels, test_images, ... or x_train, ... of a file, npz:FILE.

    Grey images of 8 bits get an axis of channels. Labels with several columns are several labels.

    Args:
      train: Parts to train on, separated by commas, such as train,val.
      test: Part of the test set, if the file has it.
    """
    file, name = find_path("npz", path), f"npz:{path}"
    try:
        with open(file, "rb") as opened, np.load(opened, allow_pickle=False) as archive:
            content = {key: archive[key] for key in archive.files}
    except (*_DAMAGED, OSError, ValueError, EOFError, AttributeError, TypeError) as error:
        raise UsageError(f"{name} cannot be read as a NumPy archive: {first_line(error)}") from None

    def read(part: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns images and labels of a part, or None if the file has none."""
        for x, y in ((f"{part}_images", f"{part}_labels"), (f"x_{part}", f"y_{part}")):
            if x in content and y in content:
                shapes = content[x].shape, content[y].shape
                if not shapes[0] or shapes[0][:1] != shapes[1][:1]:
                    raise UsageError(
                        f"{name}: {x} is {list(shapes[0])} and {y} {list(shapes[1])}; use equally "
                        "many examples"
                    )
                return _with_channels(content[x]), _labels(name, content[y])
        return None

    members = {part.strip(): read(part.strip()) for part in train.split(",") if part.strip()}
    if not members:
        raise UsageError(f"{name}: npz.train names no part")
    for part, examples in members.items():
        if examples is None:
            raise UsageError(
                f"{name} has no arrays {part}_images and {part}_labels, or x_{part} and y_{part}; "
                f"it has {', '.join(content) or 'none'}"
            )
    if test in members:
        raise UsageError(
            f"{name}: npz.train and npz.test both name {test!r}, and its examples would be in both "
            "sets: name it once"
        )
    pairs = list(filter(None, members.values()))
    x_test, y_test = read(test) or (None, None)
    shapes = {(x.shape[1:], y.shape[1:]) for x, y in pairs}
    types = {(x.dtype == np.uint8, y.dtype.kind in "iu") for x, y in pairs}
    if len(shapes) > 1 or len(types) > 1:
        raise UsageError(f"{name}: examples of {train} have different shapes or types")
    xs, ys = zip(*pairs, strict=True)
    return arrays(np.concatenate(xs), np.concatenate(ys), x_test, y_test, name=name)


def _with_channels(x: np.ndarray) -> np.ndarray:
    """Returns grey images of 8 bits with an axis of channels, other arrays unchanged."""
    return x[..., None] if x.ndim == 3 and x.dtype == np.uint8 else x


def _labels(name: str, y: np.ndarray) -> np.ndarray:
    """Returns labels [n, 1] as classes [n], and the integers 0 and 1 [n, labels] as booleans.

    `name` is the file's, for messages.
    """
    if y.ndim == 2 and y.shape[1] == 1:
        return y[:, 0]
    is_multilabel = y.ndim == 2 and y.dtype.kind in "iu"
    return class_numbers(name, y, end=2).astype(bool) if is_multilabel else y


def digit5(path: str, *, size: int = 32) -> Dataset:
    """Digits in five domains, the owners: mnist, mnistm, svhn, syn, usps, digit5:FOLDER.

    Reads the MATLAB files of Digit-Five. Images become RGB.

    Args:
      size: Height and width to resize images to.
    """
    folder, name = find_path("digit5", path), f"digit5:{path}"
    if not 1 <= size <= 1024:
        raise UsageError(f"digit5.size is {size}; use 1 to 1024")
    parts = _digit5_arrays(name, folder)
    domains = sorted(parts)

    def join(i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        x = np.concatenate([_resize(name, parts[domain][i][0], size) for domain in domains])
        y = np.concatenate([parts[domain][i][1] for domain in domains])
        return x, y, np.repeat(domains, [len(parts[domain][i][1]) for domain in domains])

    (x, y, owners), (x_test, y_test, owners_test) = join(0), join(1)
    options: dict[str, Any] = {"owners": owners, "owners_test": owners_test, "name": name}
    return arrays(x, y, x_test, y_test, outputs=10, **options)


def _digit5_arrays(name: str, folder: Path) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """Returns images [n, height, width, channels] and digits [n] of each domain: train and test."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    def load(file: str) -> Any:
        if not (folder / file).is_file():
            raise UsageError(f"{name} has no file {file}; put the files of Digit-Five there")
        return loadmat(folder / file)

    def digits(y: np.ndarray) -> np.ndarray:
        """Returns labels as digits int [n]; 10 stands for 0."""
        return class_numbers(name, np.reshape(y, -1), end=11) % 10

    domains: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    try:
        mnist, mnistm = map(load, _MNIST)
        domains["mnist"] = [
            (mnist[f"{p}_32"].reshape(-1, 32, 32, 1), mnist[f"label_{p}"].argmax(1)) for p in _PARTS
        ]
        domains["mnistm"] = [(mnistm[p], mnistm[f"label_{p}"].argmax(1)) for p in _PARTS]
        for domain, pattern in _CROPPED.items():
            if domain == "syn" and (folder / "syn_number.mat").is_file():
                syn = load("syn_number.mat")
                domains["syn"] = [(syn[f"{p}_data"], digits(syn[f"{p}_label"])) for p in _PARTS]
                continue
            files = [load(pattern.format(p)) for p in _PARTS]
            domains[domain] = [(f["X"].transpose(3, 0, 1, 2), digits(f["y"])) for f in files]
        usps = load("usps_28x28.mat")["dataset"]
        domains["usps"] = [
            (np.rint(255 * x).transpose(0, 2, 3, 1), digits(y)) for x, y in (usps[0], usps[1])
        ]
    except UsageError:
        raise
    except (
        *(*_DAMAGED, MatReadError, KeyError, ValueError, TypeError, OSError, IndexError),
        NotImplementedError,  # a file of MATLAB 7.3, which SciPy does not read
    ) as error:
        raise UsageError(f"{name}: a file is not one of Digit-Five: {first_line(error)}") from None
    for domain, parts in domains.items():
        for x, y in parts:
            if len(x) != len(y):
                raise UsageError(f"{name}: {domain} has {len(x)} images and {len(y)} labels")
    return domains


def _resize(name: str, x: np.ndarray, size: int) -> np.ndarray:
    """Returns images with values from 0 to 255 resized to uint8 [n, size, size, 3].

    Raises UsageError, with the dataset's `name`, for other values. Those of other types than uint8
    must not be from 0 to 1.
    """
    from PIL import Image

    if x.size and x.dtype != np.uint8 and not (x.min() >= 0 and 1 < x.max() <= 255):
        raise UsageError(
            f"{name}: images have values from {x.min():g} to {x.max():g}, not from 0 to 255"
        )
    result = np.empty((len(x), size, size, 3), np.uint8)
    for row, image in zip(result, np.broadcast_to(x, (*x.shape[:3], 3)), strict=True):
        pixels = np.ascontiguousarray(image, np.uint8)
        row[:] = np.asarray(Image.fromarray(pixels).resize((size, size)))
    return result
