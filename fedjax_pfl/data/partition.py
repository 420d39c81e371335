"""Divides a dataset among clients."""

import inspect
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.arguments import check_arguments
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData
from fedjax_pfl.core.task import TASKS, Task, check_labels, infer_task
from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.federate import federate
from fedjax_pfl.data.partitions import PARTITIONS, partition_settings
from fedjax_pfl.data.request import check_name, check_setting_names


class PartitionedData(NamedTuple):
    """The examples of all clients, and the facts about them that a method can use."""

    examples: FederatedData  # arrays; passed into compiled functions
    federation: Federation  # clients, number of examples of each, shapes, loss and metrics

    def __repr__(self) -> str:
        """Returns one line without the arrays."""
        counts = self.federation.counts
        return (
            f"PartitionedData({len(counts)} clients, {int(counts.sum())} training examples, "
            f"{int(np.sum(self.examples.test.size))} test examples)"
        )


@check_arguments
def partition(
    dataset: Dataset,
    name: str,
    *,
    clients: int,
    seed: int = 0,
    split: str = "pooled",
    test_fraction: float = 0.3,
    validation_fraction: float = 0.0,
    groups: int = 1,
    task: Task | None = None,
    **settings: Any,
) -> PartitionedData:
    """Divides a dataset among clients.

    >>> from fedjax_pfl import datasets
    >>> partition(datasets.digits(), "classes", clients=10, per_client=4, examples=160)
    PartitionedData(10 clients, 1120 training examples, 480 test examples)

    Args:
      dataset: From `fedjax_pfl.datasets`.
      name: Name of the partition: "classes", "dirichlet", "iid", "natural", ...
      clients: Number of clients.
      seed: Decides everything random in the partition.
      split: Where test examples come from: "pooled" (a fraction of each client's own examples),
        "official" (the dataset's own test set) or "shared" (one test set for all clients).
      test_fraction: Fraction of examples for testing.
      validation_fraction: Fraction of examples for validation.
      groups: Number of groups of clients with different networks; client i is in group i % groups.
      task: Loss and metrics. Default: classification, regression, multi-label classification or
        next-token prediction, by the type of the labels.
      **settings: Settings of the partition as keyword arguments, such as `per_client=4`.
    """
    if not isinstance(dataset, Dataset):
        raise UsageError(
            f"partition takes a Dataset, got {type(dataset).__name__}; make one with "
            "datasets.from_arrays(x, y)"
        )
    if task is not None and not isinstance(task, Task):
        raise UsageError(
            f"task is {task!r}; leave it out, or give a Task, such as "
            "fedjax_pfl.core.task.regression()"
        )
    check_name("partition", name, PARTITIONS)
    parameters = inspect.signature(partition).parameters.values()
    parameter_names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    check_setting_names(
        f"partition {name}", settings, [*partition_settings(name), *parameter_names]
    )
    examples, federation = federate(
        dataset,
        name,
        settings=settings,
        clients=clients,
        seed=seed,
        split=split,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        groups=groups,
    )
    if task is None:
        kind = infer_task(examples.y)
        check_labels(kind, examples.y)
        task = TASKS[kind](federation.outputs)
    return PartitionedData(examples=examples, federation=federation._replace(task=task))
