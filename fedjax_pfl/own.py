"""What a caller brings for one run: examples that no source reads, a method that is not ours."""

import hashlib
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedjax_pfl import config as configuration
from fedjax_pfl.algorithm import Algorithm
from fedjax_pfl.config import OURS, Words
from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.errors import UsageError

Factory = Callable[..., Algorithm]


def added(
    given: Mapping[str, Any], dataset: Dataset | None, algorithm: Factory | None
) -> tuple[Words, dict[str, Any]]:
    """The library's words and these, and the configuration with their names."""
    words, given = OURS, dict(given)
    if dataset is not None:
        if not isinstance(dataset, Dataset):
            raise UsageError("dataset must be what fedjax_pfl.arrays(x, y) makes")
        name = _free("dataset", dataset.name, "arrays(..., name=...)")
        if given.setdefault("dataset", name) != name:
            raise UsageError(
                f"the configuration says dataset={given['dataset']!r}, and examples called "
                f"{name!r} are given too; leave one of them out"
            )
        words = words._replace(dataset={**words.dataset, name: _source(dataset)})
    if algorithm is not None:
        name = _free("algorithm", getattr(algorithm, "__name__", ""), "another function name")
        _check_factory(name, algorithm)
        given.setdefault("algorithm", name)
        words = words._replace(algorithm={**words.algorithm, name: algorithm})
    return words, given


def _free(kind: str, name: str, how: str) -> str:
    """A name for one of a kind that is no setting's and no other thing's."""
    if not str(name).isidentifier():
        raise UsageError(f"{name!r} cannot name the {kind} in a configuration; use {how}")
    taken = next((k for k, table in OURS._asdict().items() if name in table), None)
    if taken or name in configuration.default():
        what = f"one of ours ({taken})" if taken else "a setting"
        raise UsageError(f"{name!r} is the name of {what} already; use {how}")
    return name


def digest(dataset: Dataset) -> str:
    """Of everything that is in it but its name."""
    found = hashlib.sha256()
    for field in dataset._fields[1:]:
        value = getattr(dataset, field)
        if value is not None:
            array = np.ascontiguousarray(value)
            found.update(f"{field}{array.dtype}{array.shape}".encode())
            found.update(array.tobytes())
    return found.hexdigest()[:16]


def _source(dataset: Dataset) -> Callable[..., Dataset]:
    """The examples as a source, whose setting `digest` stands in the configuration of a run."""
    content = digest(dataset)

    def source(data_dir: Any, keep: Any, *, digest: str = content) -> Dataset:
        if digest != content:
            raise UsageError(
                f"{dataset.name}.digest is {digest}, and that of the examples given is {content}: "
                "they are others"
            )
        if keep(len(dataset.x_train)) is not None:
            raise UsageError("fraction is for datasets by name; give fewer examples instead")
        return dataset

    return source


def _check_factory(name: str, factory: Factory) -> None:
    """Raise UsageError where a configuration could not hold its settings."""
    parameters = inspect.signature(factory).parameters
    try:
        inspect.signature(factory).bind(None, None, None, None)
    except TypeError:
        raise UsageError(
            f"{name} must take (model, task, training, federation), and settings of its own by "
            "keyword, each with a default"
        ) from None
    hints = typing.get_type_hints(factory)
    own = [p for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    if untyped := [p.name for p in own if p.name not in hints]:
        raise UsageError(
            f"{name} must give its setting {untyped[0]} a type, as in beta: float = 0.9"
        )
