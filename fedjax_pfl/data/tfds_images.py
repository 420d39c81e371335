"""Images by name, which tfds prepares: CIFAR, MNIST and their like, Omniglot."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import prepared
from fedjax_pfl.data.dataset import DataDir, Dataset, Keep, standardise

# Mean and standard deviation per channel of the training images, pixels in [0, 1], as commonly
# published. Omniglot's were measured on the two small background sets, shrunk as they are here.
_NORMAL: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
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
_WITHIN = {"emnist_digits": "emnist_byclass"}  # a larger dataset, whose first classes are these


def folder(name: str) -> str:
    """Where tfds keeps a dataset; those of EMNIST are configurations of one."""
    return name.replace("emnist_", "emnist/")


def source_of(name: str, data_dir: DataDir) -> str:
    """The dataset that is read: `name`, or a larger one where only that is prepared."""
    larger = _WITHIN.get(name)
    if larger is None or prepared.is_there(folder(name), data_dir):
        return name
    return larger if prepared.is_there(folder(larger), data_dir) else name


def _images(
    name: str,
    outputs: int,
    convert: Callable[[np.ndarray], np.ndarray] = prepared.unchanged,
    first: int = 0,
) -> Callable[[DataDir, Keep], Dataset]:
    """A source that reads features image and label of the splits train and test.

    first: the label that the dataset gives its first class.
    """

    def source(data_dir: DataDir, keep: Keep) -> Dataset:
        read = source_of(name, data_dir)
        path = prepared.find(folder(read), data_dir)
        sizes = _sizes(path, "train", "test")
        features = ("image", "label", "coarse_label") if name == "cifar100" else ("image", "label")

        def part(split: str) -> dict[str, np.ndarray]:
            whole = read == name
            rows = keep(sizes[split]) if whole else _of_first(path, split, outputs, keep)
            return prepared.read(path, split, features, rows=rows, convert=convert)

        train, test = part("train"), part("test")
        labels = [part["label"].astype(np.int32) - first for part in (train, test)]
        _in_range(path, outputs, *labels)
        _alike(path, len(_NORMAL[name][0]), train["image"], test["image"])
        coarse = _coarse(train, outputs) if name == "cifar100" else None
        return Dataset(
            name,
            train["image"],
            labels[0],
            test["image"],
            labels[1],
            outputs,
            *standardise(*_NORMAL[name]),
            coarse,
        )

    larger = f", or those of {folder(_WITHIN[name])}" if name in _WITHIN else ""
    source.__doc__ = (
        f"{outputs} classes of images, {folder(name)} in tfds{larger}, with an official test set."
    )
    return source


def _of_first(path: Path, split: str, classes: int, keep: Keep) -> np.ndarray:
    """Which records of a split are of its first classes, or the part of them that is kept."""
    ours = np.flatnonzero(prepared.read(path, split, ("label",))["label"] < classes)
    if not len(ours):
        raise UsageError(f"{path} has no example of its first {classes} classes in split {split}")
    kept = keep(len(ours))
    return ours if kept is None else ours[kept]


def _sizes(path: Path, *splits: str) -> dict[str, int]:
    sizes = prepared.splits(path)
    for split in splits:
        if not sizes.get(split):
            raise UsageError(f"{path} has no examples of split {split}: prepare it again")
    return sizes


def _in_range(path: Path, outputs: int, *labels: np.ndarray) -> None:
    for part in labels:
        if part.min() < 0 or part.max() >= outputs:
            raise UsageError(
                f"{path}: labels run from {part.min()} to {part.max()}, not from 0 to "
                f"{outputs - 1}: it is another dataset than its name says"
            )


def _alike(path: Path, channels: int, train: np.ndarray, test: np.ndarray) -> None:
    shapes = [part.shape[1:] for part in (train, test)]
    if shapes[0] != shapes[1] or shapes[0][-1] != channels:
        raise UsageError(
            f"{path}: images are {shapes[0]} in train and {shapes[1]} in test, not alike with "
            f"{channels} channels: it is another dataset than its name says"
        )


def _coarse(part: dict[str, np.ndarray], outputs: int) -> np.ndarray:
    coarse = np.full(outputs, -1, np.int32)
    coarse[part["label"]] = part["coarse_label"]
    if (coarse < 0).any():
        raise UsageError(
            f"cifar100: {(coarse < 0).sum()} classes have no training example, so that their "
            "superclass is unknown: use a larger fraction"
        )
    return coarse


def _upright(images: np.ndarray) -> np.ndarray:
    """EMNIST is stored with rows and columns exchanged."""
    return images.swapaxes(1, 2)


def shrink(images: np.ndarray, side: int = 28) -> np.ndarray:
    """Shrink square pictures by area: each new pixel is the mean of the area that it covers.

    Args:
      images: uint8 [n, size, size, channels]; only the first channel is used.

    Returns:
      uint8 [n, side, side, 1].
    """
    size = images.shape[1]
    edges = np.arange(side + 1) * size / side
    covered = np.clip(edges[:, None], np.arange(size), np.arange(1, size + 1))
    weights = (np.diff(covered, axis=0) * side / size).astype(np.float32)
    small = weights @ images[..., 0].astype(np.float32) @ weights.T
    return np.rint(small).astype(np.uint8)[..., None]


def omniglot(data_dir: DataDir, keep: Keep) -> Dataset:
    """Handwritten characters of up to 50 alphabets, which own them; one pool, 28x28x1.

    Reads the splits train and test, else small1 and small2. A label is the number of a character in
    its alphabet; `owner_classes` opens as many outputs as the owner's alphabet has characters.
    Deviations: 105x105 drawings are shrunk by area. Alphabets that both small sets have are read
      once. Papers that do not say how they shrink cannot be followed to the pixel.
    """
    path = prepared.find("omniglot", data_dir)
    there = prepared.splits(path)
    splits = ("train", "test") if "train" in there else ("small1", "small2")
    _sizes(path, *splits)
    features = ("image", "label", "alphabet")
    parts = [prepared.read(path, split, features, convert=shrink) for split in splits]
    new = ~np.isin(parts[1]["alphabet"], parts[0]["alphabet"])
    parts[1] = {key: values[new] for key, values in parts[1].items()}
    whole = {key: np.concatenate([part[key] for part in parts]) for key in features}

    alphabets = np.unique(whole["alphabet"])
    kept = keep(len(alphabets))
    alphabets = alphabets if kept is None else alphabets[kept]
    names = prepared.names(path, "alphabet") or []
    named = alphabets.min() >= 0 and alphabets.max() < len(names)
    ours = np.isin(whole["alphabet"], alphabets)
    owner = np.searchsorted(alphabets, whole["alphabet"][ours]).astype(np.int32)
    label = np.zeros(len(owner), np.int32)
    letters = np.zeros(len(alphabets), np.int64)
    for a in range(len(alphabets)):
        characters, label[owner == a] = np.unique(
            whole["label"][ours][owner == a], return_inverse=True
        )
        letters[a] = len(characters)
    return Dataset(
        "omniglot",
        whole["image"][ours],
        label,
        None,
        None,
        int(letters.max()),
        *standardise(*_NORMAL["omniglot"]),
        owner_train=owner,
        owner_classes=np.arange(letters.max()) < letters[:, None],
        owner_names=np.array(names)[alphabets] if named else alphabets.astype(str),
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
