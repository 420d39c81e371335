"""Texts as sequences of words or bytes, with a vocabulary from the training examples."""

import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from fedjax_pfl.core.errors import UsageError

PADDING_TOKEN, UNKNOWN_TOKEN = 0, 1


def words_of(text: str) -> list[str]:
    """Returns the words and the punctuation marks of a text in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def bytes_of(text: str) -> list[str]:
    """Returns the bytes of a text in UTF-8, each as the character with its number."""
    return list(text.encode("utf-8", "replace").decode("latin-1"))


KINDS: dict[str, Callable[[str], list[str]]] = {"words": words_of, "bytes": bytes_of}


def encode_texts(
    name: str, parts: Sequence[Sequence[str]], kind: str, length: int, words: int
) -> tuple[list[np.ndarray], list[str]]:
    """Encodes texts as sequences of their first tokens.

    Returns x of each part, int32 [n, length], and the vocabulary, the text of each token. 0 pads
    short texts, and 1 is any token that is not in the vocabulary.

    Args:
      name: Name of the source, for messages.
      parts: Texts of the training set and, if there is one, of the test set.
      kind: Key of `KINDS`.
      length: Number of tokens to read.
      words: Size of the vocabulary, which has the most frequent tokens of the training set.
    """
    if length < 1 or words < 3:
        raise UsageError(f"{name}: length={length}, words={words}: use 1 or more, and 3 or more")
    split = KINDS[kind]
    counts = Counter(token for text in parts[0] for token in split(text))
    frequent = sorted(counts, key=lambda token: (-counts[token], token))[: words - 2]
    vocabulary = ["", "?", *sorted(frequent)]
    number = {token: i for i, token in enumerate(vocabulary) if i > UNKNOWN_TOKEN}
    arrays = []
    for texts in parts:
        x = np.full((len(texts), length), PADDING_TOKEN, np.int32)
        for row, text in zip(x, texts, strict=True):
            tokens = split(text)[:length]
            row[: len(tokens)] = [number.get(token, UNKNOWN_TOKEN) for token in tokens]
        arrays.append(x)
    return arrays, vocabulary
