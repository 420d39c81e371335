"""Numbers for classes and categories by words that a node's own file states.

A source numbers the words that it finds in a file, so that two nodes would number them differently,
and words found in a file are cells of it. Here they are numbered by what the owner has written down
instead, and only that list ever leaves the node.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data.dataset import Dataset

# Words, by their places, or a number: of outputs, or of places that words are hashed to.
Vocabulary = Sequence[str] | int


def stated(
    dataset: Dataset, labels: Vocabulary | None, words: Mapping[str, Vocabulary], index: bool
) -> Dataset:
    """Returns the examples with classes and categories numbered by the stated words.

    Raises UsageError where a word of the examples is not stated. Its text may quote the examples.

    Args:
      index: a column of text is one feature, its place among the words, instead of one for each.
    """
    if "tokens" in (dataset.metadata or {}):
        raise UsageError(
            f"{dataset.name} is text, whose characters or words each node would number in its own "
            "way; prepare it as whole numbers in an npy or Parquet file"
        )
    return _categorised(_classified(dataset, labels), words, index)


def _classified(dataset: Dataset, labels: Vocabulary | None) -> Dataset:
    if dataset.y_train.dtype.kind != "i":  # targets, or labels that are true or false
        return dataset
    found = (dataset.metadata or {}).get("classes")
    if labels is None:
        raise UsageError(
            f'{dataset.name} has classes, and this node\'s file does not state them: add "labels", '
            "their names or, of labels that are whole numbers from 0, how many there are"
        )
    if isinstance(labels, int):
        place = np.arange(dataset.outputs) if found is None else _whole(dataset.name, found)
        outputs = labels
    elif found is None:
        place, outputs = np.arange(dataset.outputs), len(labels)
    else:
        place, outputs = _places(f"{dataset.name}: class", found, labels), len(labels)

    def renumbered(y: np.ndarray | None) -> np.ndarray | None:
        if y is None:
            return None
        new = np.where(y < 0, y, place[np.maximum(y, 0)]).astype(np.int32)
        if new.max(initial=0) >= outputs:
            raise UsageError(f"{dataset.name} has label {new.max()}; labels states {outputs}")
        return new

    metadata = {k: v for k, v in (dataset.metadata or {}).items() if k != "classes"}
    if not isinstance(labels, int):
        metadata["classes"] = list(labels)
    y_train: Any = renumbered(dataset.y_train)
    y_test = renumbered(dataset.y_test)
    return dataset._replace(y_train=y_train, y_test=y_test, outputs=outputs, metadata=metadata)


def _whole(name: str, words: Sequence[str]) -> np.ndarray:
    """The numbers that words write, from 0."""
    if not all(word.isdecimal() and word.isascii() and len(word) < 9 for word in words):
        raise UsageError(f"{name} has labels that are no whole numbers from 0; state their names")
    return np.array([int(word) for word in words])


def _places(what: str, words: Sequence[str], among: Sequence[str]) -> np.ndarray:
    """The place of each word among those stated."""
    place = {word: i for i, word in enumerate(among)}
    if missing := [word for word in words if word not in place]:
        raise UsageError(f"{what} {missing[0]!r} is not among those that this node's file states")
    return np.array([place[word] for word in words], np.int64)


class _Part(NamedTuple):
    """One input column: features `start` to `end` of a source, and what they become."""

    start: int
    end: int
    names: list[str]  # of the new features
    place: np.ndarray | None = None  # of each word of the source; None: the column is a number


def _categorised(dataset: Dataset, stated: Mapping[str, Vocabulary], index: bool) -> Dataset:
    metadata = dict(dataset.metadata or {})
    found: Mapping[str, Sequence[str]] = metadata.pop("categories", {})
    if extra := sorted(set(stated) - set(found)):
        raise UsageError(f"{dataset.name} has no column of text {extra[0]!r} among its inputs")
    if not found:
        return dataset
    begins = {c if index else f"{c}={words[0]}": c for c, words in found.items()}
    inputs, parts, at = metadata["input"], list[_Part](), 0
    while at < len(inputs):
        column = begins.get(inputs[at])
        if column is None:
            part = _Part(at, at + 1, [inputs[at]])
        elif column in stated:
            place, words = _places_of(dataset.name, column, found[column], stated[column])
            end = at + (1 if index else len(found[column]))
            part = _Part(at, end, [column] if index else words, place)
        else:
            raise UsageError(
                f"{dataset.name}: column {column!r} is text, and this node's file does not state "
                'them: add them under "words", or how many places to hash them to'
            )
        parts.append(part)
        at = part.end
    normalise = dataset.normalise
    if normalise is not None:
        old = normalise.features
        new = [np.repeat(old[part.start], len(part.names)) for part in parts]
        normalise = normalise._replace(features=np.concatenate(new))
    return dataset._replace(
        x_train=_renumbered(dataset.x_train, parts, index),
        x_test=None if dataset.x_test is None else _renumbered(dataset.x_test, parts, index),
        normalise=normalise,
        metadata={**metadata, "input": [name for part in parts for name in part.names]},
    )


def _renumbered(x: np.ndarray, parts: Sequence[_Part], index: bool) -> np.ndarray:
    """x with the features that `parts` describe on its last axis."""
    features = []
    for start, end, names, place in parts:
        old = x[..., start:end]
        if place is None:
            features.append(old)
        elif index:
            features.append(place[old.astype(np.int64)].astype(x.dtype))
        else:
            features.append(np.eye(len(names), dtype=x.dtype)[place[old.argmax(-1)]])
    return np.concatenate(features, -1)


def _places_of(
    name: str, column: str, words: Sequence[str], given: Vocabulary
) -> tuple[np.ndarray, list[str]]:
    """The place of each word of a column, and the names of all places."""
    if isinstance(given, int):
        place = np.array([_hashed(word, given) for word in words])
        return place, [f"{column}#{i}" for i in range(given)]
    place = _places(f"{name}: column {column!r}: word", words, given)
    return place, [f"{column}={word}" for word in given]


def _hashed(word: str, size: int) -> int:
    """The place of a word among `size`, the same at every node."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big") % size
