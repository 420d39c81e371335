"""Image datasets prepared by tfds: CIFAR, MNIST and similar ones, Omniglot."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import prepared
from fedjax_pfl.data.dataset import DataDir, Dataset, SampleRows, scale_and_shift

# Mean and standard deviation per channel of the training images, pixels in [0, 1], as commonly
# published. For Omniglot we measured them on the two small background sets, after `shrink`.
_MOMENTS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "emnist_byclass": ((0.1736,), (0.3317,)),
    "emnist_digits": ((0.1733,), (0.3317,)),
    "emnist_letters": ((0.1722,), (0.3309,)),
    "svhn_cropped": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "omniglot": ((0.9195,), (0.2334,)),
}
_SUPERSET = {"emnist_digits": "emnist_byclass"}  # its first classes are those of the dataset


def folder(name: str) -> str:
    """Returns the tfds folder of the source `name`: emnist/X for emnist_X, else the name."""
    return name.replace("emnist_", "emnist/")


def source_of(name: str, data_dir: DataDir) -> str:
    """Returns the name of the dataset to read: `name`, or a larger dataset that contains it.

    The larger one is read if only that one is prepared in `data_dir`.
    """
    superset = _SUPERSET.get(name)
    if superset is None or prepared.is_prepared(folder(name), data_dir):
        return name
    return superset if prepared.is_prepared(folder(superset), data_dir) else name


def _images(
    name: str,
    outputs: int,
    convert: Callable[[np.ndarray], np.ndarray] | None = None,
    first: int = 0,
) -> Callable[[DataDir, SampleRows], Dataset]:
    """Returns the source `name`, which reads images and labels of the splits train and test.

    Args:
      name: Name of the source.
      outputs: Number of classes.
      convert: Applied to decoded images, uint8 [n, height, width, channels]. None: no change.
      first: Label of the first class in the files; it becomes 0.
    """

    def source(data_dir: DataDir, sample_rows: SampleRows) -> Dataset:
        stored = source_of(name, data_dir)
        path = prepared.find_folder(folder(stored), data_dir)
        sizes = _sizes(path, "train", "test")
        features = ("image", "label", "coarse_label") if name == "cifar100" else ("image", "label")

        def read(split: str) -> dict[str, np.ndarray]:
            if stored == name:
                rows = sample_rows(sizes[split])
            else:
                rows = _rows_of_first_classes(path, split, outputs, sample_rows)
            return prepared.read_split(path, split, features, rows=rows, convert=convert)

        train, test = read("train"), read("test")
        labels = [part["label"].astype(np.int32) - first for part in (train, test)]
        _check_content(
            path, len(_MOMENTS[name][0]), outputs, labels, [train["image"], test["image"]]
        )
        scale, shift = scale_and_shift(*_MOMENTS[name])
        return Dataset(
            name=name,
            x_train=train["image"],
            y_train=labels[0],
            x_test=test["image"],
            y_test=labels[1],
            outputs=outputs,
            scale=scale,
            shift=shift,
            coarse=_superclasses(train, outputs) if name == "cifar100" else None,
        )

    superset = f" or part of {folder(_SUPERSET[name])}" if name in _SUPERSET else ""
    source.__doc__ = (
        f"Images of {outputs} classes, {folder(name)} in tfds{superset}, with an official test set."
    )
    return source


def _rows_of_first_classes(
    path: Path, split: str, classes: int, sample_rows: SampleRows
) -> np.ndarray:
    """Returns the indices, in a split, of a sample of the records whose label is below `classes`.

    `sample_rows` maps their number n to the ones to use, indices below n, or None for all. Raises
    UsageError if there is none.
    """
    rows = np.flatnonzero(prepared.read_split(path, split, ("label",))["label"] < classes)
    if not len(rows):
        raise UsageError(f"{path} has no example of its first {classes} classes in split {split}")
    sample = sample_rows(len(rows))
    return rows if sample is None else rows[sample]


def _sizes(path: Path, *splits: str) -> dict[str, int]:
    """Returns the number of examples of every split of the folder `path`, by name.

    Raises UsageError if one of `splits` is missing or empty.
    """
    sizes = prepared.split_sizes(path)
    for split in splits:
        if not sizes.get(split):
            raise UsageError(f"{path} has no examples of split {split}; {prepared.PREPARE_AGAIN}")
    return sizes


def _check_content(
    path: Path, channels: int, outputs: int, labels: list[np.ndarray], images: list[np.ndarray]
) -> None:
    """Raises UsageError unless labels are 0 to outputs - 1 and images have one shape.

    `labels` and `images` are those of the training and of the test set. `channels` is the required
    number of channels; `path` is for messages.
    """
    for part in labels:
        if part.min() < 0 or part.max() >= outputs:
            raise UsageError(
                f"{path}: labels run from {part.min()} to {part.max()}, not from 0 to "
                f"{outputs - 1}: the folder holds another dataset; {prepared.PREPARE_AGAIN}"
            )
    shapes = [part.shape[1:] for part in images]
    if shapes[0] != shapes[1] or shapes[0][-1] != channels:
        raise UsageError(
            f"{path}: images are {shapes[0]} in train and {shapes[1]} in test, not of one "
            f"shape with {channels} channels: the folder holds another dataset; "
            f"{prepared.PREPARE_AGAIN}"
        )


def _superclasses(train: dict[str, np.ndarray], outputs: int) -> np.ndarray:
    """Returns the superclass of each class, int32 [outputs], or raises UsageError.

    `train` has the features `label` and `coarse_label` of the training examples.
    """
    coarse = np.full(outputs, -1, np.int32)
    coarse[train["label"]] = train["coarse_label"]
    if (coarse < 0).any():
        raise UsageError(
            f"cifar100: {(coarse < 0).sum()} classes have no training example, so their "
            "superclass is unknown: use a larger fraction"
        )
    return coarse


def _upright(images: np.ndarray) -> np.ndarray:
    """Exchanges rows and columns, because EMNIST is stored transposed."""
    return images.swapaxes(1, 2)


def shrink(images: np.ndarray, side: int = 28) -> np.ndarray:
    """Shrinks square images; each new pixel is the mean of the area that it covers.

    Reads only the first channel of images, uint8 [n, size, size, channels]. Returns uint8 [n, side,
    side, 1].
    """
    size = images.shape[1]
    edges = np.arange(side + 1) * size / side
    bounds = np.clip(edges[:, None], np.arange(size), np.arange(1, size + 1))
    weights = (np.diff(bounds, axis=0) * side / size).astype(np.float32)
    small = weights @ images[..., 0].astype(np.float32) @ weights.T
    return np.rint(small).astype(np.uint8)[..., None]


def omniglot(data_dir: DataDir, sample_rows: SampleRows) -> Dataset:
    """Handwritten characters of up to 50 alphabets, 28x28x1; owners are alphabets, no test set.

    Reads the splits train and test, else small1 and small2. A label is the number of a character in
    its alphabet; `owner_classes` has one class for each character of the owner's alphabet.
    Deviations: 105x105 drawings are shrunk by area, as papers do not state how. Alphabets in both
      small sets are read once.
    """
    path = prepared.find_folder("omniglot", data_dir)
    splits = ("train", "test") if "train" in prepared.split_sizes(path) else ("small1", "small2")
    _sizes(path, *splits)
    features = ("image", "label", "alphabet")
    parts = [prepared.read_split(path, split, features, convert=shrink) for split in splits]
    is_new = ~np.isin(parts[1]["alphabet"], parts[0]["alphabet"])
    parts[1] = {key: values[is_new] for key, values in parts[1].items()}
    data = {key: np.concatenate([part[key] for part in parts]) for key in features}

    alphabets = np.unique(data["alphabet"])
    sample = sample_rows(len(alphabets))
    alphabets = alphabets if sample is None else alphabets[sample]
    names = prepared.class_names(path, "alphabet") or []
    has_names = alphabets.min() >= 0 and alphabets.max() < len(names)
    data = {key: values[np.isin(data["alphabet"], alphabets)] for key, values in data.items()}
    owner = np.searchsorted(alphabets, data["alphabet"]).astype(np.int32)
    label = np.zeros(len(owner), np.int32)
    letters = np.zeros(len(alphabets), np.int64)
    for a in range(len(alphabets)):
        characters, label[owner == a] = np.unique(data["label"][owner == a], return_inverse=True)
        letters[a] = len(characters)
    scale, shift = scale_and_shift(*_MOMENTS["omniglot"])
    return Dataset(
        name="omniglot",
        x_train=data["image"],
        y_train=label,
        x_test=None,
        y_test=None,
        outputs=int(letters.max()),
        scale=scale,
        shift=shift,
        owner_train=owner,
        owner_classes=np.arange(letters.max()) < letters[:, None],
        owner_names=np.array(names)[alphabets] if has_names else alphabets.astype(str),
    )


SOURCES: dict[str, Callable[..., Dataset]] = {
    "cifar10": _images("cifar10", 10),
    "cifar100": _images("cifar100", 100),
    "mnist": _images("mnist", 10),
    "fashion_mnist": _images("fashion_mnist", 10),
    "emnist_byclass": _images("emnist_byclass", 62, _upright),
    "emnist_digits": _images("emnist_digits", 10, _upright),
    "emnist_letters": _images("emnist_letters", 26, _upright, first=1),
    "svhn_cropped": _images("svhn_cropped", 10),
    "omniglot": omniglot,
}
