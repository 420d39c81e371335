"""Checks of the arguments of `federate`."""

import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from fedjax_pfl.core.arguments import unknown_argument
from fedjax_pfl.core.errors import UsageError, nearest, require
from fedjax_pfl.data import partitions
from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.owners import BY_OWNER

SPLITS = ("pooled", "official", "shared")


def check_name(kind: str, name: str, choices: Collection[str]) -> None:
    """Raises UsageError, with a similar choice, unless `name` is one of `choices`.

    `kind`, such as "partition", says in the message what is named.
    """
    require(isinstance(name, str), f"{kind} is {name!r}; it must be a name")
    if name not in choices:
        similar = nearest(name, choices)
        hint = f"did you mean {similar}? " if similar else ""
        raise UsageError(f"no {kind} named {name}: {hint}there are {', '.join(choices)}")


def check_setting_names(owner: str, names: Iterable[str], allowed: Collection[str]) -> None:
    """Raises UsageError if one of the `names` is not among the allowed names of settings.

    `owner`, such as "partition classes", is the phrase in the message for what has the settings.
    """
    for name in names:
        if name not in allowed:
            raise unknown_argument(owner, name, allowed)


def check_partition_settings(partition: str, settings: Mapping[str, Any]) -> None:
    """Raises UsageError if a partition has no such setting, or a value has another type."""
    allowed = partitions.partition_settings(partition)
    check_setting_names(f"partition {partition}", settings, allowed)
    check_setting_types(partition, partitions.PARTITIONS[partition], settings)


def check_setting_types(
    owner: str, function: Callable[..., Any], settings: Mapping[str, Any]
) -> None:
    """Raises UsageError if a setting has another type than the function's argument of its name.

    `owner`, such as classes, precedes the name in the message.
    """
    hints = typing.get_type_hints(function)
    for name, value in settings.items():
        hint = hints[name]
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kinds = tuple(typing.get_origin(kind) or kind for kind in kinds)
        if not any(_has_type(value, kind) for kind in kinds):
            names = " or ".join("None" if k is types.NoneType else k.__name__ for k in kinds)
            raise UsageError(f"{owner}.{name} is {value!r}; it must be of type {names}")


def _has_type(value: Any, kind: type) -> bool:
    """Returns True if a setting of type `kind` can have the value. NaN is no float."""
    if isinstance(value, bool | np.bool_):  # a bool is an int in Python
        return kind is bool
    if kind is tuple:
        return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
    if kind is float:
        return isinstance(value, Real) and value == value
    return isinstance(value, Integral if kind is int else kind)


def check_request(
    dataset: Dataset, partition: str, clients: int, split: str, held_out: int, groups: int
) -> None:
    """Raises UsageError for an unknown partition or split, and for what the dataset cannot give.

    That is, for example, owners for a partition by owner or a test set for `official`. `held_out`
    is the number of novel clients, and `groups` the number of architecture groups.
    """
    check_name("partition", partition, partitions.PARTITIONS)
    check_name("split", split, SPLITS)
    for name, value in (("clients", clients), ("held_out", held_out), ("groups", groups)):
        require(isinstance(value, Integral), f"{name}={value!r}: use an integer")
    if clients < 1:
        raise UsageError(f"clients={clients}: use at least 1")
    if not 0 <= held_out < clients:
        raise UsageError(f"held_out={held_out} must leave one of {clients} clients active")
    if not 1 <= groups <= clients - held_out:
        raise UsageError(f"groups={groups}: use 1 to {clients - held_out}, the active clients")
    if dataset.overlapping and split != "official":
        raise UsageError(
            f"windows of {dataset.name} overlap, and split={split} would train on parts of the "
            "test windows: use split=official, or windows that do not overlap"
        )
    if dataset.normalise and dataset.normalise.scope == "client" and split == "shared":
        raise UsageError("normalise=client differs between clients: use split=pooled")
    if split == "official" and dataset.x_test is None:
        raise UsageError(f"{dataset.name} has no test set of its own: use split=pooled or shared")
    if dataset.y_train.ndim > 1 and partition not in ("iid", *BY_OWNER):
        choices = ", ".join(("iid", *BY_OWNER))
        raise UsageError(f"{dataset.name} has no classes: use one of the partitions {choices}")
    if partition in BY_OWNER and (
        dataset.owner_train is None or (dataset.x_test is not None and dataset.owner_test is None)
    ):
        raise UsageError(
            f"{dataset.name} has no owners, which partition {partition} needs: name their column "
            "(csv.owner, hf.owner, ...), or give `owners` (and `owners_test`) to `arrays`"
        )
    if partition in BY_OWNER and split == "shared" and dataset.owner_classes is not None:
        raise UsageError(
            f"the owners of {dataset.name} have different classes and cannot share a test set: "
            "use split=pooled"
        )


def check_enough(name: str, partition: str, clients: int, split: str, examples: int) -> None:
    """Raises UsageError if there are more clients than examples, before arrays are allocated.

    Partitions by owner count owners instead. With the split `pooled` one of the `examples` is
    left for testing. The message begins with the dataset's `name`.
    """
    most = examples - (split == "pooled")
    if partition in BY_OWNER or clients <= most:
        return
    if most < 1:
        raise UsageError(f"{name} has {examples} examples, too few for a client; use more of it")
    test = " (one is for testing)" if split == "pooled" else ""
    raise UsageError(
        f"{name} has {examples:,} examples, too few for {clients:,} clients{test}: use at most "
        f"{most:,} clients"
    )


def check_fractions(
    dataset: Dataset, split: str, test: float, validation: float, validation_examples: int | None
) -> None:
    """Raises UsageError if fractions leave no training or no test example.

    It also refuses validation examples of a dataset whose examples overlap.

    `test` and `validation` are fractions of the examples; the split `official` ignores `test`.
    `validation_examples` is a number instead of a fraction, or None.
    """
    if split == "pooled" and validation_examples is not None:
        raise UsageError("validation_examples is for split=official or shared: use the fraction")
    if validation_examples is not None and validation:
        raise UsageError("validation_fraction and validation_examples are both set; choose one")
    if dataset.overlapping and (validation or validation_examples):
        raise UsageError(
            f"windows of {dataset.name} overlap, and validation windows would share values with "
            "training windows: use validation_fraction=0, or windows that do not overlap"
        )
    is_number = validation_examples is None or _has_type(validation_examples, int)
    require(is_number, f"validation_examples={validation_examples!r}: use an integer")
    for name, value in (("test_fraction", test), ("validation_fraction", validation)):
        require(isinstance(value, Real), f"{name}={value!r}: use a number")
    test = 0.0 if split == "official" else test
    if not (0 <= validation < 1 and 0 <= test < 1 and test + validation < 1):
        raise UsageError(
            f"test_fraction={test}, validation_fraction={validation}: use numbers from 0 that "
            "leave something to train on"
        )
    if split != "official" and test == 0:
        raise UsageError(f"test_fraction=0 leaves nothing to test on with split={split}: use 0.1")
