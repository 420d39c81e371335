"""Numbers for classes and categories, by the word lists in a node's file.

A data source numbers the words in the order in which it reads them, which differs between nodes.
Here the lists in the node's file decide. Only the list of class names leaves the node, never words
from the data.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data.dataset import Dataset

# A list of words, or the number of classes or of values that words are hashed to.
Vocabulary = Sequence[str] | int


def apply_vocabulary(
    dataset: Dataset, labels: Vocabulary | None, column_words: Mapping[str, Vocabulary], index: bool
) -> Dataset:
    """Renumbers the classes and categories of a dataset by word lists.

    Raises UsageError if a word of the examples is not listed; its text may quote the examples.

    Args:
      dataset: Examples as their source numbers them.
      labels: Class names, or the number of classes.
      column_words: Words of each input column of text, or the number of values to hash them to.
      index: A column of text is one feature with the index of the word, instead of one feature per
        word.
    """
    if "tokens" in (dataset.metadata or {}):
        raise UsageError(
            f"{dataset.name} is text, and each node would number its characters or words "
            "differently; convert it to integers in an npy or Parquet file"
        )
    return _number_categories(_number_labels(dataset, labels), column_words, index)


def _number_labels(dataset: Dataset, labels: Vocabulary | None) -> Dataset:
    """Renumbers the classes of a dataset. For `labels` see `apply_vocabulary`.

    Raises UsageError if a dataset with classes has no list of them, or one without classes has.
    """
    if dataset.y_train.dtype.kind != "i":  # numeric targets or binary labels
        if labels is not None:
            raise UsageError(
                f"{dataset.name} has no classes, and this node's file has labels; remove them, or "
                "set label_kind=class for numbers that are classes"
            )
        return dataset
    class_names = (dataset.metadata or {}).get("classes")
    if labels is None:
        raise UsageError(
            f'{dataset.name} has classes, and this node\'s file does not list them; add "labels" '
            "with their names or, if the labels are 0, 1, ..., their number"
        )
    if isinstance(labels, int):
        position = (
            np.arange(dataset.outputs)
            if class_names is None
            else _parse_numbers(dataset.name, class_names)
        )
        outputs = labels
    elif class_names is None:
        position, outputs = np.arange(dataset.outputs), len(labels)
    else:
        position, outputs = _positions(f"{dataset.name}: class", class_names, labels), len(labels)

    def renumbered(y: np.ndarray | None) -> np.ndarray | None:
        """Returns the new labels, int32; negative labels stay the same."""
        if y is None:
            return None
        new = np.where(y < 0, y, position[np.maximum(y, 0)]).astype(np.int32)
        if new.max(initial=0) >= outputs:
            raise UsageError(f"{dataset.name} has label {new.max()}, and labels is {outputs}")
        return new

    metadata = {k: v for k, v in (dataset.metadata or {}).items() if k != "classes"}
    if not isinstance(labels, int):
        metadata["classes"] = list(labels)
    y_train: Any = renumbered(dataset.y_train)
    y_test = renumbered(dataset.y_test)
    return dataset._replace(y_train=y_train, y_test=y_test, outputs=outputs, metadata=metadata)


def _parse_numbers(name: str, texts: Sequence[str]) -> np.ndarray:
    """Parses the labels of dataset `name` as integers from 0; raises UsageError for other text."""
    if not all(word.isdecimal() and word.isascii() and len(word) < 9 for word in texts):
        raise UsageError(f"{name} has labels that are not integers from 0; list their names")
    return np.array([int(word) for word in texts])


def _positions(description: str, texts: Sequence[str], vocabulary: Sequence[str]) -> np.ndarray:
    """Returns the index of each of the `texts` in the `vocabulary`, int64 [len(texts)].

    Raises UsageError for a missing text. `description`, such as "class", says in the message what
    the texts are.
    """
    position = {word: i for i, word in enumerate(vocabulary)}
    if missing := [word for word in texts if word not in position]:
        raise UsageError(f"{description} {missing[0]!r} is not listed in this node's file")
    return np.array([position[word] for word in texts], np.int64)


class _Column(NamedTuple):
    """One input column, with its features in the source's numbering and its new features."""

    start: int  # index of its first feature in the source's numbering
    end: int  # index after its last feature
    names: list[str]  # names of the new features
    position: np.ndarray | None = None  # new index of each source word; None: a numeric column


def _number_categories(
    dataset: Dataset, vocabularies: Mapping[str, Vocabulary], index: bool
) -> Dataset:
    """Renumbers the input columns of text. For arguments see `apply_vocabulary`.

    Raises UsageError for a text column without a list of words, and for a list without a column.
    """
    metadata = dict(dataset.metadata or {})
    categories: Mapping[str, Sequence[str]] = metadata.pop("categories", {})
    if extra := sorted(set(vocabularies) - set(categories)):
        raise UsageError(f"{dataset.name} has no column of text {extra[0]!r} among its inputs")
    if not categories:
        return dataset
    begins = {c if index else f"{c}={names[0]}": c for c, names in categories.items()}
    inputs, parts, at = metadata["input"], list[_Column](), 0
    while at < len(inputs):
        column = begins.get(inputs[at])
        if column is None:
            part = _Column(at, at + 1, [inputs[at]])
        elif column in vocabularies:
            position, names = _column_positions(
                dataset.name, column, categories[column], vocabularies[column]
            )
            end = at + (1 if index else len(categories[column]))
            names = [column] if index else names
            part = _Column(start=at, end=end, names=names, position=position)
        else:
            raise UsageError(
                f"{dataset.name}: column {column!r} is text, and this node's file does not list "
                'its words; add them under "words", or the number of values to hash them to'
            )
        parts.append(part)
        at = part.end
    normalise = dataset.normalise
    if normalise is not None:
        old = normalise.features
        new = [np.repeat(old[part.start], len(part.names)) for part in parts]
        normalise = normalise._replace(features=np.concatenate(new))
    return dataset._replace(
        x_train=_number_features(dataset.x_train, parts, index),
        x_test=None if dataset.x_test is None else _number_features(dataset.x_test, parts, index),
        normalise=normalise,
        metadata={**metadata, "input": [name for part in parts for name in part.names]},
    )


def _number_features(x: np.ndarray, parts: Sequence[_Column], index: bool) -> np.ndarray:
    """Returns inputs `x` [..., D] with the new features of all columns on the last axis.

    `parts` are the columns of the D features. For `index` see `apply_vocabulary`.
    """
    features = []
    for start, end, names, position in parts:
        old = x[..., start:end]
        if position is None:
            features.append(old)
        elif index:
            features.append(position[old.astype(np.int64)].astype(x.dtype))
        else:
            features.append(np.eye(len(names), dtype=x.dtype)[position[old.argmax(-1)]])
    return np.concatenate(features, -1)


def _column_positions(
    name: str, column: str, texts: Sequence[str], vocabulary: Vocabulary
) -> tuple[np.ndarray, list[str]]:
    """Returns the new index of each of a column's words, int [len(texts)], and feature names.

    There is one name for each new index. `texts` are the words as the source numbers them.
    """
    if isinstance(vocabulary, int):
        # Hashes are equal at all nodes.
        digests = [hashlib.sha256(word.encode()).digest()[:8] for word in texts]
        position = np.array([int.from_bytes(digest, "big") % vocabulary for digest in digests])
        return position, [f"{column}#{i}" for i in range(vocabulary)]
    position = _positions(f"{name}: column {column!r}: word", texts, vocabulary)
    return position, [f"{column}={word}" for word in vocabulary]
