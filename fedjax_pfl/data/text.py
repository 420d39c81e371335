"""Text as sequences of characters, of which the next one is predicted at each position."""

import re
from collections.abc import Iterable, Mapping
from importlib import resources

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data.columns import chosen
from fedjax_pfl.data.dataset import PADDING, DataDir, Dataset, Keep, kept
from fedjax_pfl.data.tables import existing

OWNERS = ("speaker", "file")


def text(
    data_dir: DataDir, keep: Keep, path: str, *, owner: str = "speaker", length: int = 64
) -> Dataset:
    """Characters of a text file, or of a folder's *.txt, each to predict from those before it.

    Args:
      owner: speaker, whose name and a colon are the line above each speech, with a line between
        speeches, as plays are written; or file.
      length: characters of an example. Examples follow each other; the last may be shorter.
    """
    del data_dir
    chosen("text", "owner", owner, OWNERS)
    found, name = existing("text", path), f"text:{path}"
    files = sorted(found.rglob("*.txt")) if found.is_dir() else [found]
    if not files:
        raise UsageError(f"{name} holds no file that ends with .txt")
    try:
        whole = {str(file.relative_to(found.parent)): file.read_text("utf-8-sig") for file in files}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{name} cannot be read as text: {error}") from None
    if owner == "speaker":
        whole = spoken(name, whole.values())
    return kept(next_characters(name, whole, length), keep)


def speeches(data_dir: DataDir, keep: Keep, *, length: int = 64) -> Dataset:
    """Next characters in speeches of 12 speakers of Shakespeare's plays, who are the owners.

    Args:
      length: characters of an example. Examples follow each other; the last may be shorter.
    """
    del data_dir
    file = resources.files("fedjax_pfl.data").joinpath("speeches.txt")
    whole = spoken("speeches", [file.read_text("utf-8")])
    return kept(next_characters("speeches", whole, length), keep)


def spoken(name: str, texts: Iterable[str]) -> dict[str, str]:
    """What each speaker says, by name."""
    said: dict[str, list[str]] = {}
    for whole in texts:
        for block in re.split(r"\n\s*\n", whole.replace("\r\n", "\n")):
            head, _, speech = block.strip("\n").partition("\n")
            if head.endswith(":") and speech:
                said.setdefault(head[:-1].strip(), []).append(speech)
    if not said:
        raise UsageError(
            f"{name} has no speech: no line with a name and a colon stands above one, after an "
            "empty line; for files without speakers set text.owner to file"
        )
    return {speaker: "\n".join(parts) for speaker, parts in sorted(said.items())}


def next_characters(name: str, texts: Mapping[str, str], length: int) -> Dataset:
    """Examples of so many characters, int32 [n, length], and the characters that follow each.

    0 stands for no character; the others are numbered from 1 in the order of their code points.
    """
    if length < 1:
        raise UsageError(f"{name}: length={length}; use 1 or more")
    vocabulary = characters(texts.values())
    xs, ys, owners = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for number, whole in enumerate(texts.values()):
        codes = encoded(whole, vocabulary)
        n = -(-(len(codes) - 1) // length) if len(codes) > 1 else 0
        x, y = np.zeros(n * length, np.int32), np.full(n * length, PADDING, np.int32)
        x[: max(len(codes) - 1, 0)], y[: max(len(codes) - 1, 0)] = codes[:-1], codes[1:]
        xs.append(x.reshape(n, length))
        ys.append(y.reshape(n, length))
        owners.append(np.full(n, number, np.int32))
    x, y, owner = (np.concatenate(parts) for parts in (xs, ys, owners))
    if not len(x):
        raise UsageError(f"{name} has no two characters in a row; there is nothing to predict")
    tokens = len(vocabulary) + 1
    return Dataset(
        name,
        x,
        y,
        None,
        None,
        tokens,
        owner_train=owner,
        owner_names=np.array(list(texts)),
        metadata={"tokens": ["", *vocabulary]},
    )


def characters(texts: Iterable[str]) -> str:
    """Those that occur, each once, in the order of their code points."""
    return "".join(sorted(set().union(*texts)))


def encoded(whole: str, vocabulary: str) -> np.ndarray:
    """int32 [characters]: from 1 the place in the vocabulary; 0 where it is not there."""
    known, points = (np.frombuffer(s.encode("utf-32-le"), np.uint32) for s in (vocabulary, whole))
    place = np.searchsorted(known, points)
    there = known[np.minimum(place, len(known) - 1)] == points
    return np.where(there, place + 1, 0).astype(np.int32)
