"""Text as sequences of characters; each position predicts the next character."""

import re
from collections.abc import Iterable, Mapping
from importlib import resources

import numpy as np

from fedjax_pfl.core.errors import UsageError, require_one_of
from fedjax_pfl.data.dataset import PADDING, Dataset
from fedjax_pfl.data.tables import find_path

OWNERS = ("speaker", "file")


def text(path: str, *, owner: str = "speaker", length: int = 64) -> Dataset:
    """Characters of a text file, or of a folder's *.txt; each is predicted from those before it.

    Args:
      owner: speaker or file. The name of a speaker and a colon are the line above a speech, and
        speeches are separated by an empty line, as in plays.
      length: Number of characters of an example. Examples follow each other; the last of an owner
        may be shorter.
    """
    require_one_of("text.owner", owner, OWNERS)
    root, name = find_path("text", path), f"text:{path}"
    files = sorted(root.rglob("*.txt")) if root.is_dir() else [root]
    if not files:
        raise UsageError(f"{name} holds no file that ends with .txt")
    try:
        texts = {str(file.relative_to(root.parent)): file.read_text("utf-8-sig") for file in files}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{name} cannot be read as text: {error}") from None
    if owner == "speaker":
        texts = split_by_speaker(name, texts.values())
    return next_characters(name, texts, length)


def speeches(*, length: int = 64) -> Dataset:
    """Next characters in speeches of 12 speakers of Shakespeare's plays, who are the owners.

    Args:
      length: Number of characters of an example. Examples follow each other; the last of an owner
        may be shorter.
    """
    file = resources.files("fedjax_pfl.data").joinpath("speeches.txt")
    texts = split_by_speaker("speeches", [file.read_text("utf-8")])
    return next_characters("speeches", texts, length)


def split_by_speaker(name: str, texts: Iterable[str]) -> dict[str, str]:
    """Returns the speeches of each speaker as one text, by the speaker's name.

    A speech follows a line with a name and a colon; an empty line ends it. `name` is for messages.
    Raises UsageError if there is no speech.
    """
    parts: dict[str, list[str]] = {}
    for content in texts:
        for block in re.split(r"\n\s*\n", content.replace("\r\n", "\n")):
            head, _, speech = block.strip("\n").partition("\n")
            if head.endswith(":") and speech:
                parts.setdefault(head[:-1].strip(), []).append(speech)
    if not parts:
        raise UsageError(
            f"{name} has no speech: no line after an empty line is a name and a colon; for files "
            "without speakers set text.owner to file"
        )
    return {speaker: "\n".join(speeches) for speaker, speeches in sorted(parts.items())}


def next_characters(name: str, texts: Mapping[str, str], length: int) -> Dataset:
    """Returns examples of `length` characters, with the character after each as its label.

    `texts` has the text of each owner. The dataset `name` has x and y int32 [examples, length]. 0
    stands for no character; the others are numbered from 1 in the order of their code points.
    Raises UsageError if no text has two characters.
    """
    if length < 1:
        raise UsageError(f"{name}: length={length}; use 1 or more")
    if unprintable := [owner for owner in texts if not owner.isprintable()]:
        raise UsageError(
            f"{name}: the owner {unprintable[0]!r} has characters that cannot be printed; rename it"
        )
    vocabulary = characters(texts.values())
    xs, ys, owners = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for i, content in enumerate(texts.values()):
        codes = encode(content, vocabulary)
        n = -(-(len(codes) - 1) // length) if len(codes) > 1 else 0
        x, y = np.zeros(n * length, np.int32), np.full(n * length, PADDING, np.int32)
        x[: max(len(codes) - 1, 0)], y[: max(len(codes) - 1, 0)] = codes[:-1], codes[1:]
        xs.append(x.reshape(n, length))
        ys.append(y.reshape(n, length))
        owners.append(np.full(n, i, np.int32))
    x, y, owner = (np.concatenate(arrays) for arrays in (xs, ys, owners))
    if not len(x):
        raise UsageError(f"{name} has no two characters in a row; there is nothing to predict")
    return Dataset(
        name=name,
        x_train=x,
        y_train=y,
        x_test=None,
        y_test=None,
        outputs=len(vocabulary) + 1,
        owner_train=owner,
        owner_names=np.array(list(texts)),
        metadata={"tokens": ["", *vocabulary]},
    )


def characters(texts: Iterable[str]) -> str:
    """Returns the distinct characters of texts in the order of their code points."""
    return "".join(sorted(set().union(*texts)))


def encode(content: str, vocabulary: str) -> np.ndarray:
    """Returns tokens, int32 [len(content)]: 1 + index in the vocabulary, or 0 if not in it.

    The vocabulary is sorted, as returned by `characters`.
    """
    codes, points = (  # JSON may have halves of surrogate pairs
        np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        for text in (vocabulary, content)
    )
    place = np.searchsorted(codes, points)
    in_vocabulary = codes[np.minimum(place, len(codes) - 1)] == points
    return np.where(in_vocabulary, place + 1, 0).astype(np.int32)
