"""Partitions of a run, or of the runs of a sweep: one for all, or one for each run."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_pfl import data
from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.task import Task, check_labels, check_task, infer_task, select_metrics
from fedjax_pfl.data.augment import on_normalised
from fedjax_pfl.data.partition import PartitionedData
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation.sweep import SeparateRunsError

Part = TypeVar("Part")
PARTITION_SEED = "partition_seed"


def load(
    configs: Sequence[ConfigDict], registry: configuration.Registry, *, groups: int
) -> tuple[data.Dataset, list[PartitionedData]]:
    """Loads the dataset and partitions it between clients.

    Returns the dataset, and the partition of each run or, if `partition_seed` is equal in all, one.
    Only this setting may differ between the configurations; of others the first run's value counts.
    `groups` is the number of architecture groups: the clients of a group have the same network.
    """
    seeds = [config.partition_seed for config in configs]
    if len(set(seeds)) == 1:
        seeds = seeds[:1]
    datasets, partitions = list[data.Dataset](), dict[int, PartitionedData]()
    for seed, config in dict(zip(seeds, configs, strict=False)).items():
        dataset, partitions[seed] = _load(config, registry, groups)
        datasets.append(dataset)
    return datasets[0], [partitions[seed] for seed in seeds]


def _load(
    config: ConfigDict, registry: configuration.Registry, groups: int
) -> tuple[data.Dataset, PartitionedData]:
    """Returns the dataset of a configuration and its partition, with the task of the run."""

    def settings_of(name: str) -> dict[str, Any]:
        return config.get(name, ConfigDict()).to_dict()

    dataset = data.load(
        config.dataset,
        config.data_dir,
        fraction=config.fraction,
        fraction_seed=config.partition_seed,
        sources=registry.dataset,
        **settings_of(data.source_name(config.dataset)),
    )
    examples, federation = data.federate(
        dataset,
        config.partition,
        settings=settings_of(config.partition),
        clients=config.clients,
        seed=config.partition_seed,
        split=config.split,
        test_fraction=config.test_fraction,
        validation_fraction=config.validation_fraction,
        validation_examples=config.validation_examples,
        permute_labels=config.permute_labels,
        held_out=config.held_out,
        groups=groups,
    )
    task = make_task(config, registry, examples.y, federation)
    if config.augment:
        if examples.x.dtype != np.uint8 or len(federation.input_shape) != 3:
            raise UsageError(
                f"augment is for images of type uint8, and {config.dataset} has none; leave it off"
            )
        task = task._replace(augment=on_normalised(examples.scale, examples.shift))
    return dataset, PartitionedData(examples=examples, federation=federation._replace(task=task))


def make_task(
    config: ConfigDict, registry: configuration.Registry, y: Any, federation: Federation
) -> Task:
    """Returns the task that the settings select for labels `y` [rows, ...], with their metrics.

    Raises UsageError if labels or metrics do not suit it, or if a user-defined task returns arrays
    of wrong shapes.
    """
    outputs = federation.outputs
    name = infer_task(y) if config.task == "auto" else config.task
    check_labels(name, y)
    task = registry.task[name](outputs, **config.get(name, ConfigDict()).to_dict())
    if not isinstance(task, Task):
        raise UsageError(f"{name} must return a Task, got {type(task).__name__}")
    names = [metric.strip() for metric in config.metrics.split(",") if metric.strip()]
    task = select_metrics(task, name, names)
    if name not in configuration.TASKS:
        output_shape = jax.ShapeDtypeStruct((2, *federation.output_shape), jnp.float32)
        check_task(name, task, output_shape, jax.ShapeDtypeStruct((2, *y.shape[1:]), y.dtype))
    return task


def omitted_owners(config: ConfigDict, dataset: data.Dataset, federation: Federation) -> str:
    """Returns a warning if the examples have owners that are not exactly the clients, or ""."""
    if dataset.owner_train is None:
        return ""
    ids = [dataset.owner_train]
    if config.split != "official" and dataset.owner_test is not None:
        ids.append(dataset.owner_test)  # their examples are pooled
    owners = len(np.unique(np.concatenate(ids)))
    if config.partition not in data.BY_OWNER:
        return (
            f"{dataset.name} has {owners} owners, and partition={config.partition} mixes their "
            "examples; with partition=natural each client is one owner"
        )
    if (used := len(set(federation.owners or ()))) < owners:
        return f"{used} of the {owners} owners of {dataset.name} are clients"
    return ""


def shared_facts(config: ConfigDict, partitions: Sequence[PartitionedData]) -> Federation:
    """Returns the facts about clients that hold in all partitions; `class_counts` if they do.

    Raises SeparateRunsError if one program cannot train on all partitions: it is compiled for the
    number of examples of each client. `config` has the settings of a run.
    """
    first, *other_partitions = partitions
    if any(_compiled_facts(first) != _compiled_facts(other) for other in other_partitions):
        raise _separate("clients have other numbers of examples in another partition")
    if config.augment and any(
        _normalisation(first) != _normalisation(other) for other in other_partitions
    ):
        raise _separate("augment is for equally normalised images in all partitions")
    counts: list[Any] = [partition.federation.class_counts for partition in partitions]
    if all(np.array_equal(counts[0], other) for other in counts[1:]):
        return first.federation
    return first.federation._replace(class_counts=None)


def _separate(reason: str) -> SeparateRunsError:
    return SeparateRunsError(
        [PARTITION_SEED], f"{reason}, so there is one program for each {PARTITION_SEED}"
    )


def _compiled_facts(partition: PartitionedData) -> tuple[Any, ...]:
    """Returns the facts about a partition that a program of rounds is compiled for."""
    examples, federation = partition
    shapes = [(np.shape(leaf), np.asarray(leaf).dtype) for leaf in jax.tree.leaves(examples)]
    counts = (federation.counts, federation.validation_counts)
    count_lists = [np.asarray(part).tolist() for part in counts]
    return shapes, jax.tree.structure(examples), federation.outputs, count_lists


def _normalisation(partition: PartitionedData) -> list[Any]:
    scale, shift = partition.examples.scale, partition.examples.shift
    return [np.asarray(part).tolist() for part in (scale, shift)]


def check_draws(is_attacker: np.ndarray, evaluated: np.ndarray | None) -> None:
    """Raises SeparateRunsError if settings draw clients by partition_seed, others in each run.

    `is_attacker` is bool [N]. `evaluated` has the ids of the evaluated clients; None if all are.
    """
    if is_attacker.any():
        raise _separate("the attackers depend on the partition")
    if evaluated is not None:
        raise _separate("the evaluated clients depend on the partition")


def group(configs: Mapping[str, ConfigDict]) -> list[dict[str, ConfigDict]]:
    """Groups configurations, which have names, by their partition_seed."""
    groups: dict[int, dict[str, ConfigDict]] = {}
    for name, config in configs.items():
        groups.setdefault(config.partition_seed, {})[name] = config
    return list(groups.values())


def select(parts: Sequence[Part], runs: Sequence[int]) -> Sequence[Part]:
    """Returns the parts of the runs at these indices; `parts` has one for each run, or one."""
    return parts if len(parts) == 1 else [parts[i] for i in runs]


def stack(examples: Sequence[data.FederatedData]) -> data.FederatedData:
    """Returns examples as a program takes them: those of several runs with the runs on axis 0."""
    first, *others = examples
    return jax.tree.map(lambda *leaves: np.stack(leaves), first, *others) if others else first
