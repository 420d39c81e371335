"""Registry of datasets by name: embedded ones, those prepared by tfds, and user files.

A source is a function that returns a `Dataset`. Its keyword-only arguments are its settings. `load`
passes it those of these arguments that it has: `path` after the colon of the dataset's name,
`data_dir`, and `sample_rows`, which maps n to the rows to use out of n. `load` samples the examples
of a source that has no argument `sample_rows`.
"""

import inspect
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import (
    activities,
    archives,
    embedded,
    image_folder,
    leaf,
    mapped,
    prepared,
    table_sources,
    text,
    tfds_images,
)
from fedjax_pfl.data.dataset import DataDir, Dataset, subset
from fedjax_pfl.data.request import check_name, check_setting_names, check_setting_types

Source = Callable[..., Dataset]
SOURCES: dict[str, Source] = {
    **embedded.SOURCES,
    **tfds_images.SOURCES,
    **table_sources.SOURCES,
    "digit5": archives.digit5,
    "femnist": leaf.femnist,
    "har": activities.har,
    "images": image_folder.images,
    "leaf": leaf.leaf,
    "npy": mapped.npy,
    "npz": archives.npz,
    "pamap2": activities.pamap2,
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

    Raises UsageError for an unknown name or setting, and for a path that is missing or not used.

    Args:
      name: Name of a source, followed by a colon and a path if the source reads files.
      data_dir: Folder of prepared tfds datasets. Default: TFDS_DATA_DIR, or the default of tfds.
      fraction: Fraction of the examples to use, sampled at random from training and test set. If
        examples have owners, the owners are sampled, with all their examples.
      fraction_seed: Seed of that sample.
      sources: The sources to choose from, by name. Default: `SOURCES`.
      **settings: Settings of the source as keyword arguments.
    """
    sources = sources or SOURCES
    kind, _, path = name.partition(":")
    check_name("dataset", kind, sources)
    if not isinstance(fraction, Real) or not 0 < fraction <= 1:
        raise UsageError(f"fraction={fraction} must be greater than 0 and at most 1")
    check_setting_names(f"dataset {kind}", settings, source_settings(kind, sources))
    source = sources[kind]
    check_setting_types(kind, source, settings)
    parameters = inspect.signature(source).parameters
    if "path" in parameters and not path:
        raise UsageError(f"dataset {kind} needs a path: write {kind}:PATH")
    if path and "path" not in parameters:
        raise UsageError(
            f"dataset {kind} takes no path, got {path!r}: leave out the colon and the path"
        )
    rng = np.random.default_rng([fraction_seed, 0xF7AC])

    def sample_rows(n: int) -> np.ndarray | None:
        """Returns the sampled indices below n, ascending, or None for all."""
        if fraction == 1:
            return None
        # The small addend corrects binary rounding: 0.29 of 100 is 29.
        return np.sort(rng.choice(n, max(1, int(fraction * n + 1e-9)), replace=False))

    available = {"path": path, "data_dir": data_dir, "sample_rows": sample_rows}
    arguments = {key: value for key, value in available.items() if key in parameters}
    dataset = source(**arguments, **settings)
    dataset = dataset if "sample_rows" in parameters else subset(dataset, sample_rows)
    if fraction < 1 and not len(dataset.x_train):
        raise UsageError(f"fraction={fraction} leaves no training examples; use a larger fraction")
    return dataset


def require_available(name: str, data_dir: DataDir = None) -> None:
    """Raises UsageError, saying how to get it, if FEMNIST or a tfds dataset is not on the disk."""
    if name == "femnist":
        leaf.femnist_folder(data_dir)
    if name in tfds_images.SOURCES:
        prepared.find_folder(tfds_images.folder(tfds_images.source_of(name, data_dir)), data_dir)


def source_settings(name: str, sources: Mapping[str, Source] | None = None) -> dict[str, Any]:
    """Returns the settings of a source and their defaults, read from its signature."""
    parameters = inspect.signature((sources or SOURCES)[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
