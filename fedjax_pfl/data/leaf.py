"""LEAF's JSON files: users and their own examples, with LEAF's split into train and test."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data.dataset import PADDING, DataDir, Dataset, Keep, kept, owned
from fedjax_pfl.data.labels import class_numbers
from fedjax_pfl.data.numbers import as_float
from fedjax_pfl.data.prepared import root_of
from fedjax_pfl.data.tables import existing
from fedjax_pfl.data.text import characters, encoded

_SIDE = 28  # FEMNIST's pictures are listed pixel by pixel
_CHARACTERS = 62
_TEXT = 4  # of a tweet of Sent140: id, date, query, user, text


def leaf(
    data_dir: DataDir,
    keep: Keep,
    path: str,
    *,
    every_position: bool = False,
    length: int = 25,
    words: int = 10_000,
) -> Dataset:
    """LEAF's folders train and test of *.json (FEMNIST, Shakespeare, Sent140), leaf:FOLDER.

    Lists of 784 numbers are pictures, [28, 28, 1]; other lists of numbers stay so. Text with a
    character as label is a sequence of characters; lists of text are tweets, read as words. Of
    sequences the label stands at the last character or word, and the other positions have none.

    Args:
      every_position: of characters, learn to predict each from those before it, not only the last.
      length: of tweets, words that are read; of shorter ones the rest is 0.
      words: of tweets, the size of the vocabulary: those that are most frequent in training; 0 is
        none, 1 any other.
    """
    del data_dir
    root, name = existing("leaf", path), f"leaf:{path}"
    users, xs, ys = zip(*(_read(name, root / part) for part in ("train", "test")), strict=True)
    first = xs[0][0]
    if isinstance(first, str):
        x, y, outputs, metadata = _characters(name, xs, ys, every_position)
    elif isinstance(first, list) and all(isinstance(field, str) for field in first):
        classes, outputs = _classes(name, ys)
        x, metadata = _tweets(name, xs, length, words)
        y = [_at_last(rows, own) for rows, own in zip(x, classes, strict=True)]
    else:
        (y, outputs), x, metadata = _classes(name, ys), _numbers(name, xs), {}
    owner, owner_test, names = owned(name, np.array(users[0]), np.array(users[1]))
    whole = Dataset(
        name,
        x[0],
        y[0],
        x[1],
        y[1],
        outputs,
        owner_train=owner,
        owner_test=owner_test,
        owner_names=names,
        metadata=metadata,
    )
    return kept(whole, keep)


def femnist(data_dir: DataDir, keep: Keep) -> Dataset:
    """LEAF's FEMNIST, handwritten characters by writer, 62 classes.

    Reads the folders train and test of *.json that LEAF's preprocess.sh writes; they are in the
    folder femnist of data_dir. Standardised by the training images.
    """
    pictures = leaf(None, _keep_all, str(femnist_folder(data_dir)))
    if pictures.x_train.shape[1:] != (_SIDE, _SIDE, 1) or pictures.outputs > _CHARACTERS:
        raise UsageError(
            f"{pictures.name} has examples of shape {pictures.x_train.shape[1:]} in "
            f"{pictures.outputs} classes, not images of 62 characters"
        )
    std = max(float(pictures.x_train.std()), 1e-6)
    scale = np.array([1 / std], np.float32)
    shift = np.array([-float(pictures.x_train.mean()) / std], np.float32)
    named = pictures._replace(name="femnist", outputs=_CHARACTERS, scale=scale, shift=shift)
    return kept(named, keep)


def femnist_folder(data_dir: DataDir) -> Path:
    """Returns the folder of FEMNIST's train and test; UsageError says how to get it."""
    folder = Path(root_of(data_dir)).expanduser() / "femnist"
    if not (folder / "train").is_dir():
        raise UsageError(
            f"no FEMNIST in {folder}: copy the folders train and test there that preprocess.sh of "
            "LEAF's femnist writes, or set data_dir to the folder that contains femnist"
        )
    return folder


def _keep_all(examples: int) -> None:
    del examples


def _read(name: str, folder: Path) -> tuple[list[str], list[Any], list[Any]]:
    """The user, the input and the label of each example."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise UsageError(
            f"{name} has no *.json in its folder {folder.name}; it needs the folders train and "
            "test, which LEAF's preprocess.sh makes"
        )
    users, xs, ys = list[str](), list[Any](), list[Any]()
    for file in files:
        try:
            content = json.loads(file.read_text("utf-8-sig"))
            for user in content["users"]:
                own = content["user_data"][user]
                if len(own["x"]) != len(own["y"]):
                    raise ValueError(f"user {user} has {len(own['x'])} x and {len(own['y'])} y")
                users += [user] * len(own["x"])
                xs += own["x"]
                ys += own["y"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise UsageError(f"{name}: {folder.name}/{file.name} is not LEAF's: {line}") from None
    if not xs:
        raise UsageError(f"{name} has no examples in its folder {folder.name}")
    return users, xs, ys


def _numbers(name: str, xs: tuple[list[Any], ...]) -> list[np.ndarray]:
    try:
        parts = [as_float(f"{name}: x", np.array(x, np.float64), np.float32) for x in xs]
    except (ValueError, TypeError):
        raise UsageError(f"{name}: examples are not equally many numbers each") from None
    if parts[0].shape[1:] == (_SIDE * _SIDE,):
        parts = [part.reshape(-1, _SIDE, _SIDE, 1) for part in parts]
    if parts[0].ndim < 2 or parts[0].shape[1:] != parts[1].shape[1:]:
        raise UsageError(f"{name}: examples of train and test are not alike lists of numbers")
    return parts


def _classes(name: str, ys: tuple[list[Any], ...]) -> tuple[list[np.ndarray], int]:
    files = zip(("train", "test"), ys, strict=True)
    try:
        parts = [class_numbers(f"{name} ({part})", y) for part, y in files]
    except UsageError:
        raise
    except (ValueError, TypeError):
        raise UsageError(f"{name}: labels are not whole numbers") from None
    if any(part.ndim != 1 for part in parts):
        raise UsageError(f"{name}: labels are lists; use one whole number for each example")
    return parts, int(max(part.max() for part in parts)) + 1


def _at_last(x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """int32 as x: each label where the last token of its sequence stands, PADDING elsewhere."""
    y = np.full(x.shape, PADDING, np.int32)
    last = x.shape[1] - 1 - np.argmax(x[:, ::-1] > 0, 1)
    y[np.arange(len(x)), last] = labels
    return y


def _characters(
    name: str, xs: Any, ys: Any, every_position: bool
) -> tuple[Any, Any, int, dict[str, Any]]:
    """Sequences int32 [n, T], and the character that follows each; 0 stands for none."""
    if not all(isinstance(y, str) and len(y) == 1 for part in ys for y in part):
        raise UsageError(f"{name}: examples are text, and labels are not one character each")
    vocabulary = characters([*xs[0], *ys[0], *xs[1], *ys[1]])
    longest = max(len(x) for part in xs for x in part)
    x = [np.zeros((len(part), longest), np.int32) for part in xs]
    for rows, part in zip(x, xs, strict=True):
        for row, sequence in zip(rows, part, strict=True):
            row[: len(sequence)] = encoded(sequence, vocabulary)
    y = [
        _at_last(rows, encoded("".join(part), vocabulary)) for rows, part in zip(x, ys, strict=True)
    ]
    if every_position:
        for rows, labels in zip(x, y, strict=True):
            following = rows[:, 1:]
            known = (labels[:, :-1] == PADDING) & (following > 0)
            labels[:, :-1] = np.where(known, following, labels[:, :-1])
    return x, y, len(vocabulary) + 1, {"tokens": ["", *vocabulary]}


def _tweets(name: str, xs: Any, length: int, words: int) -> tuple[list[np.ndarray], dict[str, Any]]:
    if length < 1 or words < 3:
        raise UsageError(f"leaf: length={length}, words={words}: use 1 or more, and 3 or more")
    try:
        split = [[re.findall(r"\w+|[^\w\s]", tweet[_TEXT].lower()) for tweet in x] for x in xs]
    except IndexError:
        raise UsageError(f"{name}: a tweet has fewer than {_TEXT + 1} fields") from None
    counts = Counter(word for tweet in split[0] for word in tweet)
    often = sorted(counts, key=lambda word: (-counts[word], word))[: words - 2]
    vocabulary = ["", "?", *sorted(often)]
    place = {word: i for i, word in enumerate(vocabulary) if i > 1}
    x = [np.zeros((len(part), length), np.int32) for part in split]
    for rows, part in zip(x, split, strict=True):
        for row, tweet in zip(rows, part, strict=True):
            found = [place.get(word, 1) for word in tweet[:length]]
            row[: len(found)] = found
    return x, {"tokens": vocabulary}
