"""LEAF's JSON files: users with their examples, in LEAF's split into training and test set."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError, first_line
from fedjax_pfl.data.dataset import PADDING, DataDir, Dataset, number_owners
from fedjax_pfl.data.labels import class_numbers
from fedjax_pfl.data.numbers import as_float
from fedjax_pfl.data.prepared import root_folder
from fedjax_pfl.data.tables import find_path
from fedjax_pfl.data.text import characters, encode
from fedjax_pfl.data.tokens import encode_texts

_SIDE = 28  # FEMNIST's images are lists of 28 * 28 pixels
_CHARACTERS = 62
_TEXT = 4  # field of a Sent140 tweet: id, date, query, user, text
_PARTS = ("train", "test")


def leaf(
    path: str, *, every_position: bool = False, length: int = 25, words: int = 10_000
) -> Dataset:
    """LEAF's folders train and test of *.json (FEMNIST, Shakespeare, Sent140), leaf:FOLDER.

    Lists of 784 numbers become images, [28, 28, 1]; other lists of numbers stay lists. Text with a
    character as label becomes a sequence of characters. Lists of text are tweets and become
    sequences of words. The label of a sequence is at its last position; the others have none.
    Sequences of characters overlap, so they are tested on LEAF's own test set (split=official).

    Args:
      every_position: For characters, predict each from those before it, not only the last one.
      length: For tweets, number of words to read. Shorter tweets are padded with 0.
      words: For tweets, size of the vocabulary, which has the most frequent words of the training
        set. 0 is no word, 1 any other word.
    """
    root, name = find_path("leaf", path), f"leaf:{path}"
    users, xs, ys = zip(*(_read(name, root / part) for part in _PARTS), strict=True)
    first = xs[0][0]
    metadata: dict[str, Any] = {}
    if isinstance(first, str):
        x, y, metadata["tokens"] = _characters(name, xs, ys, every_position)
        outputs = len(metadata["tokens"])
    elif isinstance(first, list) and all(isinstance(field, str) for field in first):
        classes, outputs = _classes(name, ys)
        x, metadata["tokens"] = _tweets(name, xs, length, words)
        y = [_label_last(rows, labels) for rows, labels in zip(x, classes, strict=True)]
    else:
        (y, outputs), x = _classes(name, ys), _numbers(name, xs)
    owner_train, owner_test, owner_names = number_owners(
        name, np.array(users[0]), np.array(users[1])
    )
    return Dataset(
        name=name,
        x_train=x[0],
        y_train=y[0],
        x_test=x[1],
        y_test=y[1],
        outputs=outputs,
        owner_train=owner_train,
        owner_test=owner_test,
        owner_names=owner_names,
        overlapping=isinstance(first, str),  # LEAF cuts a text at every character
        metadata=metadata,
    )


def femnist(data_dir: DataDir) -> Dataset:
    """LEAF's FEMNIST: handwritten characters of 62 classes by writer.

    Reads the folders train and test of *.json that LEAF's preprocess.sh writes, in the folder
    femnist of data_dir. Standardised by the training images.
    """
    dataset = leaf(str(femnist_folder(data_dir)))
    if dataset.x_train.shape[1:] != (_SIDE, _SIDE, 1) or dataset.outputs > _CHARACTERS:
        raise UsageError(
            f"{dataset.name} has examples of shape {dataset.x_train.shape[1:]} in "
            f"{dataset.outputs} classes, not images of 62 characters"
        )
    std = max(float(dataset.x_train.std()), 1e-6)
    scale = np.array([1 / std], np.float32)
    shift = np.array([-float(dataset.x_train.mean()) / std], np.float32)
    return dataset._replace(name="femnist", outputs=_CHARACTERS, scale=scale, shift=shift)


def femnist_folder(data_dir: DataDir) -> Path:
    """Returns the folder of FEMNIST's train and test, or raises UsageError with instructions."""
    folder = Path(root_folder(data_dir)).expanduser() / "femnist"
    if not (folder / "train").is_dir():
        raise UsageError(
            f"no FEMNIST in {folder}: copy the folders train and test there that preprocess.sh of "
            "LEAF's femnist writes, or set data_dir to the folder that contains femnist"
        )
    return folder


def _read(name: str, folder: Path) -> tuple[list[str], list[Any], list[Any]]:
    """Returns three lists with the user, input and label of each example in *.json of `folder`.

    Raises UsageError if there is none, or for a file of another kind.
    """
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
                examples = content["user_data"][user]
                x, y = examples["x"], examples["y"]
                if len(x) != len(y):
                    raise ValueError(f"user {user} has {len(x)} x and {len(y)} y")
                users += [user] * len(x)
                xs += x
                ys += y
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(
                f"{name}: {folder.name}/{file.name} is not a file of LEAF: {first_line(error)}"
            ) from None
    if not xs:
        raise UsageError(f"{name} has no examples in its folder {folder.name}")
    return users, xs, ys


def _numbers(name: str, xs: tuple[list[Any], ...]) -> list[np.ndarray]:
    """Returns the inputs of training and test set as float32, images as [n, 28, 28, 1].

    Raises UsageError for inputs of different shapes.
    """
    try:
        parts = [as_float(f"{name}: x", np.array(x, np.float64), np.float32) for x in xs]
    except (ValueError, TypeError):
        raise UsageError(f"{name}: examples are not lists of equally many numbers") from None
    if parts[0].shape[1:] == (_SIDE * _SIDE,):
        parts = [part.reshape(-1, _SIDE, _SIDE, 1) for part in parts]
    if parts[0].ndim < 2 or parts[0].shape[1:] != parts[1].shape[1:]:
        raise UsageError(f"{name}: examples of train and test have different shapes")
    return parts


def _classes(name: str, ys: tuple[list[Any], ...]) -> tuple[list[np.ndarray], int]:
    """Returns the labels of training and test set, int32 [n], and the largest label plus 1.

    Raises UsageError for labels other than one integer per example.
    """
    try:
        parts = [class_numbers(f"{name} ({p})", y) for p, y in zip(_PARTS, ys, strict=True)]
    except UsageError:
        raise
    except (ValueError, TypeError):
        raise UsageError(f"{name}: labels are not integers") from None
    if any(part.ndim != 1 for part in parts):
        raise UsageError(f"{name}: labels are lists; use one integer for each example")
    return parts, int(max(part.max() for part in parts)) + 1


def _label_last(x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns y of the shape of x, int32 [n, T]: the label at the last token, else -1 (no label).

    `x` has tokens, 0 for padding, and `labels`, int32 [n], the label of each sequence.
    """
    y = np.full(x.shape, PADDING, np.int32)
    last = x.shape[1] - 1 - np.argmax(x[:, ::-1] > 0, 1)
    y[np.arange(len(x)), last] = labels
    return y


def _characters(
    name: str, xs: Any, ys: Any, every_position: bool
) -> tuple[list[np.ndarray], list[np.ndarray], list[str]]:
    """Encodes the texts `xs` of training and test set, and the characters `ys` that follow them.

    Returns x of both sets, y of both sets, int32 [n, T], and the text of each token. Token 0 pads
    short texts. y is -1 at a position without a label: all but the last, unless `every_position`.
    """
    if not all(isinstance(y, str) and len(y) == 1 for part in ys for y in part):
        raise UsageError(f"{name}: examples are text, but labels are not one character each")
    if not all(isinstance(x, str) for part in xs for x in part):
        raise UsageError(f"{name}: some examples are text and others are not; use one type")
    vocabulary = characters([*xs[0], *ys[0], *xs[1], *ys[1]])
    longest = max(len(x) for part in xs for x in part)
    if not longest:
        raise UsageError(f"{name}: all texts are empty")
    x = [_pad([encode(sequence, vocabulary) for sequence in part], longest) for part in xs]
    y = [
        _label_last(rows, encode("".join(part), vocabulary))
        for rows, part in zip(x, ys, strict=True)
    ]
    if every_position:
        for rows, labels in zip(x, y, strict=True):
            next_token = rows[:, 1:]
            has_next = (labels[:, :-1] == PADDING) & (next_token > 0)
            labels[:, :-1] = np.where(has_next, next_token, labels[:, :-1])
    return x, y, ["", *vocabulary]


def _tweets(name: str, xs: Any, length: int, words: int) -> tuple[list[np.ndarray], list[str]]:
    """Encodes the tweets `xs` of training and test set as sequences of their first words.

    Returns x of both sets, int32 [n, length], and the word of each token. `words` is the size of
    the vocabulary, with 0 for padding and 1 for words that are not in it.
    """
    try:
        texts = [[tweet[_TEXT] for tweet in part] for part in xs]
        if not all(isinstance(text, str) for part in texts for text in part):
            raise TypeError
    except (IndexError, TypeError):
        raise UsageError(f"{name}: a tweet is no list of {_TEXT + 1} texts or more") from None
    return encode_texts("leaf", texts, "words", length, words)


def _pad(sequences: Sequence[Any], length: int) -> np.ndarray:
    """Returns sequences of tokens as rows, int32 [n, length], with 0 after the end of each."""
    rows = np.zeros((len(sequences), length), np.int32)
    for row, tokens in zip(rows, sequences, strict=True):
        row[: len(tokens)] = tokens
    return rows
