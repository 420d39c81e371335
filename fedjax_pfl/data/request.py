"""What is asked for when a dataset is given to clients, and why it cannot be."""

import difflib
from collections.abc import Mapping
from typing import Any

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import partitions
from fedjax_pfl.data.dataset import Dataset

SPLITS = ("pooled", "official", "shared")


def check(
    dataset: Dataset, partition: str, clients: int, split: str, held_out: int, groups: int
) -> None:
    """Names that exist, and what a dataset has that a partition or split needs."""
    for what, word, known in (
        ("partition", partition, tuple(partitions.PARTITIONS)),
        ("split", split, SPLITS),
    ):
        if word not in known:
            near = difflib.get_close_matches(word, known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"no {what} named {word}: {hint}there are {', '.join(known)}")
    if clients < 1:
        raise UsageError(f"clients={clients}: use at least 1")
    if not 0 <= held_out < clients:
        raise UsageError(f"held_out={held_out} must leave one of {clients} clients active")
    if not 1 <= groups <= clients - held_out:
        raise UsageError(f"groups={groups} must lie between 1 and the number of active clients")
    if dataset.overlapping and split != "official":
        raise UsageError(
            f"windows of {dataset.name} overlap, and split={split} would train on parts of what is "
            "tested on: use split=official, or a stride of at least their length"
        )
    if dataset.normalise and dataset.normalise.by == "client" and split == "shared":
        raise UsageError("normalise=client gives each client its own numbers: use split=pooled")
    if split == "official" and dataset.x_test is None:
        raise UsageError(f"{dataset.name} has no test set of its own: use split=pooled or shared")
    if dataset.y_train.ndim > 1 and partition not in ("iid", "natural"):
        raise UsageError(f"{dataset.name} has no classes: use partition=iid or natural")
    if partition == "natural" and (
        dataset.owner_train is None or (dataset.x_test is not None and dataset.owner_test is None)
    ):
        raise UsageError(
            f"{dataset.name} has no owners, which partition natural needs: name their column "
            "(csv.owner, hf.owner, ...), or give `owners` (and `owners_test`) to `arrays`"
        )
    if partition == "natural" and split == "shared" and dataset.owner_classes is not None:
        raise UsageError(
            f"the owners of {dataset.name} have classes of their own and cannot share a test set: "
            "use split=pooled"
        )


def check_enough(name: str, partition: str, clients: int, split: str, examples: int) -> None:
    """Before anything is made for each client: there must be examples for so many."""
    most = examples - (split == "pooled")  # somebody has one more, to test on
    if partition != "natural" and clients > most:  # there owners are counted
        more = ", and one more to test on" if split == "pooled" else ""
        if most < 1:
            raise UsageError(
                f"{name} has {examples} examples, too few for a client; use more of it"
            )
        raise UsageError(
            f"clients is {clients:,}, and {name} has {examples:,} examples to give them, one each"
            f"{more}: use at most {most:,} clients"
        )


def check_fractions(
    split: str, test: float, validation: float, validation_examples: int | None
) -> None:
    """Shares that leave something to train on, and to test on."""
    if split == "pooled" and validation_examples is not None:
        raise UsageError("validation_examples is for split=official or shared: use the fraction")
    test = 0.0 if split == "official" else test
    if not (0 <= validation < 1 and 0 <= test < 1 and test + validation < 1):
        raise UsageError(
            f"test_fraction={test}, validation_fraction={validation}: use numbers from 0 that "
            "leave something to train on"
        )
    if split != "official" and test == 0:
        raise UsageError(
            f"test_fraction=0 leaves nothing to test on with split={split}: use 0.1, say"
        )


def completed(partition: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """A partition's own settings, with its defaults for those that are not given."""
    known = partitions.partition_settings(partition)
    for key in given or {}:
        if key not in known:
            raise UsageError(
                f"partition {partition} has no setting {key}: it takes {', '.join(known)}"
            )
    return {**known, **(given or {})}
