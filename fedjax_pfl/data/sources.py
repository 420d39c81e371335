"""Registry of datasets by name: embedded ones, those prepared by tfds, and user files."""

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
from fedjax_pfl.data.request import check_name

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


def source_name(dataset: str) -> str:
    """Returns the source of a dataset's name, such as csv for csv:FILE."""
    return dataset.partition(":")[0]


def reads_own_files(name: str) -> bool:
    """Returns True if a dataset is read from files that users make and may change."""
    return ":" in name or name == "femnist"  # LEAF's preprocess.sh samples FEMNIST's files


def load(
    name: str,
    data_dir: DataDir = None,
    *,
    fraction: float = 1.0,
    fraction_seed: int = 0,
    sources: Mapping[str, Source] | None = None,
    **settings: Any,
) -> Dataset:
    """Loads a dataset by name.

    Args:
      name: Name of a source, followed by a colon and a path if the source reads files.
      data_dir: Folder of prepared tfds datasets. Default: TFDS_DATA_DIR, or the default of tfds.
      fraction: Fraction of the examples to use, sampled at random from training and test set. If
        examples have owners, the owners are sampled, with all their examples.
      fraction_seed: Seed of that sample.
      sources: The sources to choose from. Default: `SOURCES`.
      **settings: Settings of the source.
    """
    sources = sources or SOURCES
    source, _, path = name.partition(":")
    check_name("dataset", source, sources)
    if not 0 < fraction <= 1:
        raise UsageError(f"fraction={fraction} must be greater than 0 and at most 1")
    defaults = source_settings(source, sources)
    for key in settings:
        if key not in defaults:
            choices = ", ".join(defaults) or "none"
            raise UsageError(f"dataset {source} has no setting {key}: it takes {choices}")
    takes_path = "path" in inspect.signature(sources[source]).parameters
    if takes_path and not path:
        raise UsageError(f"dataset {source} needs a path: write {source}:PATH")
    if path and not takes_path:
        raise UsageError(
            f"dataset {source} takes no path, got {path!r}: leave out the colon and the path"
        )
    rng = np.random.default_rng([fraction_seed, 0xF7AC])

    def sample_rows(n: int) -> np.ndarray | None:
        if fraction == 1:
            return None
        return np.sort(rng.choice(n, _sample_size(fraction, n), replace=False))

    argument = {"path": path} if takes_path else {}
    return sources[source](data_dir, sample_rows, **argument, **settings)


def _sample_size(fraction: float, n: int) -> int:
    # The small addend corrects binary rounding: 0.29 of 100 is 29.
    return max(1, int(fraction * n + 1e-9))


def require_available(name: str, data_dir: DataDir = None) -> None:
    """Raises UsageError with instructions if a named dataset is missing from the disk."""
    if name == "femnist":
        leaf.femnist_folder(data_dir)
    if name in tfds_images.SOURCES:
        prepared.find(tfds_images.folder(tfds_images.source_of(name, data_dir)), data_dir)


def source_settings(name: str, sources: Mapping[str, Source] | None = None) -> dict[str, Any]:
    """Returns the settings of a source and their defaults, read from its signature."""
    parameters = inspect.signature((sources or SOURCES)[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
