"""Datasets by name: those that come along, those that tfds prepares, and your own files."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import (
    embedded,
    image_folder,
    leaf,
    mapped,
    prepared,
    table_sources,
    text,
    tfds_images,
)
from fedjax_pfl.data.dataset import DataDir, Dataset

Source = Callable[..., Dataset]
SOURCES: dict[str, Source] = {
    **embedded.SOURCES,
    **tfds_images.SOURCES,
    **table_sources.SOURCES,
    "femnist": leaf.femnist,
    "images": image_folder.images,
    "leaf": leaf.leaf,
    "npy": mapped.npy,
    "text": text.text,
}


def kind(name: str) -> str:
    """The source that a dataset's name begins with: csv of csv:FILE."""
    return name.partition(":")[0]


def reads_own_files(name: str) -> bool:
    """Returns True if a dataset's examples lie in files that users make and may change."""
    return ":" in name or name == "femnist"  # which LEAF's preprocess.sh samples


def load(
    name: str,
    data_dir: DataDir = None,
    *,
    fraction: float = 1.0,
    fraction_seed: int = 0,
    sources: Mapping[str, Source] | None = None,
    **settings: Any,
) -> Dataset:
    """A dataset by name.

    Args:
      name: one of `sources`, which are `SOURCES` where none are given; with a colon and a path
        where the source reads files.
      data_dir: where tfds keeps prepared datasets; None: TFDS_DATA_DIR, or its own default.
      fraction: keep a random part of the examples, of train and test alike; where examples have
        owners, of the owners, with all of their examples.
      settings: what else the source takes.
    """
    sources = sources or SOURCES
    word, _, path = name.partition(":")
    if word not in sources:
        near = difflib.get_close_matches(word, sources, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"no dataset named {name}: {hint}there are {', '.join(sources)}")
    if not 0 < fraction <= 1:
        raise UsageError(f"fraction={fraction} must lie above 0 and at most at 1")
    known = source_settings(word, sources)
    for key in settings:
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise UsageError(f"dataset {word} has no setting {key}: {takes}")
    reads = "path" in inspect.signature(sources[word]).parameters
    if reads and not path:
        raise UsageError(f"dataset {word} reads what you name: write {word}:PATH")
    if path and not reads:
        raise UsageError(f"dataset {word} reads no {path!r}: leave the colon and the path out")
    rng = np.random.default_rng([fraction_seed, 0xF7AC])

    def keep(examples: int) -> np.ndarray | None:
        if fraction == 1:
            return None
        return np.sort(rng.choice(examples, _part(fraction, examples), replace=False))

    where = {"path": path} if reads else {}
    return sources[word](data_dir, keep, **where, **settings)


def _part(fraction: float, number: int) -> int:
    # The small addend undoes what binary fractions lose: .29 of 100 is 29.
    return max(1, int(fraction * number + 1e-9))


def need(name: str, data_dir: DataDir = None) -> None:
    """Raises UsageError, which says how to get it, if a named dataset is missing."""
    if name == "femnist":
        leaf.femnist_folder(data_dir)
    if name in tfds_images.SOURCES:
        prepared.find(tfds_images.folder(tfds_images.source_of(name, data_dir)), data_dir)


def source_settings(name: str, sources: Mapping[str, Source] | None = None) -> dict[str, Any]:
    """The settings that only this source takes, and their defaults, as its signature has them."""
    parameters = inspect.signature((sources or SOURCES)[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
