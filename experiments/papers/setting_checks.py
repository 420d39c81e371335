"""Checks of settings that tables and studies cannot run with or would label wrongly."""

import functools
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ml_collections import ConfigDict

from fedjax_pfl import data
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.task import infer_task


def refuse_own_settings(changes: Sequence[str], own_settings: Collection[str], study: str) -> None:
    """Raises UsageError for a KEY=VALUE pair of a setting that a study chooses itself.

    `own_settings` has names and patterns, such as "pfedla.k" and "privacy*". A group is refused
    with its settings.
    """
    for change in changes:
        key = change.partition("=")[0]
        if any(fnmatchcase(key, p) or p.startswith(f"{key}.") for p in own_settings):
            raise UsageError(f"the study {study} chooses {key} itself; leave --set={change} out")


def require_accuracy(config: ConfigDict) -> None:
    """Raises UsageError if the setting `metrics` leaves accuracy out, which is shown."""
    names = [name.strip() for name in config.metrics.split(",") if name.strip()]
    if names and "accuracy" not in names:
        raise UsageError(
            f"tables and studies show accuracy, which metrics={config.metrics} leaves out; add "
            "accuracy, or leave this setting out"
        )


def require_classes(dataset: str, data_dir: str | None, **settings: Any) -> None:
    """Raises UsageError if a dataset has real targets, which have no accuracy.

    `settings` are those of the dataset's source, as for `data.load`.
    """
    if _task(dataset, data_dir, **settings) == "regression":
        raise UsageError(
            f"tables and studies show accuracy, and {dataset!r} has none: its targets are real "
            "numbers; choose a dataset with classes"
        )


def require_classes_of(config: ConfigDict) -> None:
    """Raises UsageError if the dataset of a configuration has real targets."""
    settings = config.get(data.source_name(config.dataset), ConfigDict()).to_dict()
    require_classes(config.dataset, config.data_dir, **settings)


@functools.cache
def _task(dataset: str, data_dir: str | None, **settings: Any) -> str:
    """Returns the task of a dataset's labels."""
    return infer_task(data.load(dataset, data_dir, **settings).y_train)
