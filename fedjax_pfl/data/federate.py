"""Divides a dataset among clients: assigns examples, and splits them for training and testing."""

from collections.abc import Mapping
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, Split
from fedjax_pfl.data import apportion, checks, owners, partitions, request
from fedjax_pfl.data.dataset import LATER, Dataset
from fedjax_pfl.data.mapped import is_mapped
from fedjax_pfl.data.normalise import NormalisedData, normalise_examples
from fedjax_pfl.data.numbers import rows_by_id
from fedjax_pfl.data.pool import Pool

_TRAIN, _VALIDATION, _TEST = 0, 1, 2  # use of an example


class Portions(NamedTuple):
    """Number of examples on each client by class as stored in y, each int [N, stored classes]."""

    train: np.ndarray  # training examples
    validation: np.ndarray  # validation examples
    test: np.ndarray  # test examples


def federate(
    dataset: Dataset,
    partition: str,
    *,
    clients: int,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    split: str = "pooled",
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    validation_examples: int | None = None,
    permute_labels: bool = False,
    held_out: int = 0,
    groups: int = 1,
) -> tuple[FederatedData, Federation]:
    """Divides a dataset among clients.

    With `split="pooled"`, training and test set are pooled and partitioned. Each client's examples
    are then split at random, at least one for training and, if there are two, one for testing.

    With "official", the test set is that of the source, and a random part of its training set
    becomes the validation set. Clients have the same share of each class in all three.

    With "shared", all clients have the same test set, a random part of the pooled examples, and the
    same validation set. With the partition `domains` they have those of their domain. Raises
    UsageError if the dataset has invalid values or cannot be divided as requested.

    Args:
      dataset: The examples.
      partition: One of `partitions.PARTITIONS`.
      clients: Number of clients N.
      seed: Decides everything random here. Training has another seed.
      settings: Settings of the partition by name, as one mapping. None: the defaults.
      split: Source of test examples: pooled, official or shared.
      test_fraction: Fraction for testing, of a client's examples (pooled) or of all (shared).
      validation_fraction: Fraction for validation; with official, of the source's training set.
      validation_examples: Number of validation examples instead (official, shared).
      permute_labels: Give every client a random numbering of its classes. Stored labels stay.
      held_out: Number of novel clients, the last ones, which do not train (inactive).
      groups: Number of architecture groups; client i is in group i % groups.

    Returns:
      The arrays (without unused examples, unless they are mapped from a file) and the description
      of clients.
    """
    if not isinstance(seed, Integral) or seed < 0:
        raise UsageError(f"seed={seed!r}: use an integer, 0 or more")
    request.check_request(dataset, partition, clients, split, held_out, groups)
    if permute_labels and dataset.y_train.ndim > 1:
        raise UsageError(f"{dataset.name} has no classes whose labels could be permuted")
    request.check_fractions(dataset, split, test_fraction, validation_fraction, validation_examples)
    defaults = partitions.partition_settings(partition)
    settings = dict(settings or {})
    request.check_partition_settings(partition, settings)
    settings = {**defaults, **settings}
    streams = np.random.SeedSequence([seed, 0xDA7A]).spawn(4)
    split_rng, partition_rng, assign_rng, permute_rng = map(np.random.default_rng, streams)

    x, y, owner, is_test = _concatenate(dataset)
    if y.ndim == 1 and (problem := checks.find_problem(x[:1], y, dataset.outputs)):
        raise UsageError(f"{dataset.name}: {problem.message} in example {problem.example}")
    labels = y if y.ndim == 1 else np.zeros(len(y), np.int32)
    stored_classes = dataset.outputs if y.ndim == 1 else 1
    sizes = (test_fraction, validation_fraction, validation_examples)
    use = _split_before_partition(split, is_test, sizes, split_rng)

    def pool_of(rows: np.ndarray) -> Pool:
        available = np.bincount(labels[rows], minlength=stored_classes)
        return Pool(available, clients, coarse=dataset.coarse, held_out=held_out)

    training = np.flatnonzero(use == _TRAIN)
    request.check_enough(dataset.name, partition, clients, split, len(training))
    assign, per_owner = partitions.PARTITIONS[partition], settings.get("per_owner", 1)
    if partition in owners.BY_OWNER:
        assert owner is not None
        first_client = assign(owner[training], clients, partition_rng, **settings)
        absent = int(owner.max()) + 1 - len(first_client)
        first_client = np.append(first_client, np.full(absent, -1))
        client = owners.assign_parts(owner, use, first_client, per_owner, assign_rng)
    else:
        try:
            counts = assign(pool_of(training), partition_rng, **settings)
        except UsageError as error:  # name the partition, which may be the default
            prefix = "" if str(error).startswith("partition ") else f"partition {partition}: "
            raise UsageError(f"{prefix}{error}") from None
        client = np.full(len(labels), -1, np.int32)
        client[training] = apportion.assign_examples(labels[training], counts, assign_rng)
        for u in (_VALIDATION, _TEST) if split == "official" else ():
            rows = np.flatnonzero(use == u)
            totals, new_totals = pool_of(training).available, pool_of(rows).available
            scaled = apportion.scale_counts(counts, totals, new_totals)
            client[rows] = apportion.assign_examples(labels[rows], scaled, assign_rng)
    if split == "pooled":
        use = _split_clients(client, clients, test_fraction, validation_fraction, assign_rng)

    uses = (_TRAIN, _VALIDATION, _TEST)
    splits = [_stack(rows_by_id(np.where(use == u, client, -1), clients)) for u in uses]
    label_map, outputs = None, dataset.outputs
    if partition == "domains":
        domain, rank = _domains(pool_of(training), settings)
        client_domain = partitions.domain_of(clients, int(domain.max()) + 1)
        label_map, outputs = np.tile(rank, (clients, 1)), int(rank.max()) + 1
    active = np.arange(clients) < clients - held_out
    normalised = normalise_examples(dataset, x, y, client, use == _TRAIN, active)
    if split == "shared":
        for u in (_VALIDATION, _TEST):
            rows = np.flatnonzero(use == u)
            shared = [rows] * clients
            if partition == "domains":
                shared = [rows[domain[labels[rows]] == d] for d in client_domain]
            splits[u] = _stack(shared)
    _check_no_empty_client(splits, split)

    classes, client_owners = None, None
    if partition in owners.BY_OWNER:
        order = np.argsort(first_client, kind="stable")
        ids = np.repeat(order[np.count_nonzero(first_client < 0) :], per_owner)
        names = ids if dataset.owner_names is None else np.asarray(dataset.owner_names)[ids]
        client_owners = tuple(map(str, names))
        if dataset.owner_classes is not None:
            classes = np.asarray(dataset.owner_classes)[ids]
    if partition == "domains":
        domain_sizes = np.bincount(domain[domain >= 0])
        if np.ptp(domain_sizes):
            classes = np.arange(outputs) < domain_sizes[client_domain][:, None]
    if permute_labels:
        label_map = _permute(label_map, classes, clients, outputs, permute_rng)

    metadata = {**(dataset.metadata or {}), **normalised.metadata}
    if label_map is not None:
        metadata.pop("classes", None)  # an output stands for different classes
    data = _compact(dataset, normalised, splits, label_map, classes)
    federation = Federation(
        counts=np.array(splits[_TRAIN].size),
        input_shape=tuple(x.shape[1:]),
        outputs=outputs,
        active=active,
        groups=np.arange(clients, dtype=np.int32) % groups,
        validation_counts=np.array(splits[_VALIDATION].size),
        class_counts=portions(data, stored_classes).train if y.ndim == 1 else None,
        owners=client_owners,
        input_dtype="float32" if dataset.scale is not None or x.dtype.kind == "f" else x.dtype.name,
        positions=tuple(y.shape[1:]) if y.dtype.kind == "i" else (),
        metadata=metadata or None,
    )
    normalise = dataset.normalise  # a node of a deployment may normalise numbers, or targets, later
    rounded = normalise is None or not (normalise.scope == LATER or data.y.dtype == np.float64)
    checks.check_federated(dataset.name, data, federation, rounded=rounded)
    return data, federation


def portions(data: FederatedData, stored_classes: int) -> Portions:
    """Counts each client's examples by their class as stored in `data.y`, before any `label_map`.

    Labels that are not one class per example, such as real targets, all count as class 0.
    """
    y = np.asarray(data.y)
    labels = y if y.ndim == 1 else np.zeros(len(y), np.int64)

    def count(split: Split) -> np.ndarray:
        rows = np.asarray(split.rows)
        cell = np.arange(len(rows))[:, None] * stored_classes + labels[rows]
        counts = np.bincount(cell[checks.row_mask(split)], minlength=len(rows) * stored_classes)
        return counts.reshape(len(rows), stored_classes)

    return Portions(count(data.train), count(data.validation), count(data.test))


def _concatenate(dataset: Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """Joins training and test set. Returns x, y, owners, and bool [examples], True for testing.

    Owners are None if some examples have none.
    """
    x, y, owner = dataset.x_train, dataset.y_train, dataset.owner_train
    is_test = np.zeros(len(x), bool)
    if dataset.x_test is not None and dataset.y_test is not None:
        x = np.concatenate([x, dataset.x_test])
        y = np.concatenate([y, dataset.y_test])
        is_test = np.arange(len(x)) >= len(is_test)
        if owner is not None and dataset.owner_test is not None:
            owner = np.concatenate([owner, dataset.owner_test])
        else:
            owner = None
    return x, y, owner, is_test


def _split_before_partition(
    split: str,
    is_test: np.ndarray,
    sizes: tuple[float, float, int | None],
    rng: np.random.Generator,
) -> np.ndarray:
    """Selects the test and validation examples that do not depend on the partition.

    With the split "pooled" all are for training at first; `_split_clients` splits those of each
    client after the partition. `is_test`, bool [examples], is True for the source's test set.
    `sizes` are `test_fraction`, `validation_fraction` and `validation_examples` of `federate`.
    Returns the use of each example, int [examples]: _TRAIN, _VALIDATION or _TEST. Raises UsageError
    if no training example would be left.
    """
    use = np.full(len(is_test), _TRAIN)
    if split == "pooled":
        return use
    test_fraction, validation_fraction, number = sizes
    if split == "official":
        use[is_test] = _TEST
    else:
        use[rng.permutation(len(use))[: round(test_fraction * len(use))]] = _TEST
    rows = np.flatnonzero(use == _TRAIN)
    name = "validation_fraction" if number is None else "validation_examples"
    if number is None:
        number = round(validation_fraction * (len(rows) if split == "official" else len(use)))
    if not 0 <= number < len(rows):
        raise UsageError(
            f"{name} asks for {number} validation examples; use 0 to {len(rows) - 1}, to leave "
            "something to train on"
        )
    use[rng.choice(rows, number, replace=False)] = _VALIDATION
    return use


def _split_clients(
    client: np.ndarray, clients: int, test: float, validation: float, rng: np.random.Generator
) -> np.ndarray:
    """Splits each client's examples at random.

    `client`, int [examples], has the client of each example, -1 for none; `clients` is N. `test`
    and `validation` are fractions of a client's examples. Returns the use of each example.
    """
    use = np.full(len(client), _TRAIN)
    for rows in rows_by_id(client, clients):
        if not len(rows):
            continue
        n_test = min(max(1, round(test * len(rows))), len(rows) - 1)  # 0 if there is one example
        n_validation = min(round(validation * len(rows)), len(rows) - n_test - 1)
        order = rng.permutation(rows)
        use[order[:n_test]] = _TEST
        use[order[n_test : n_test + n_validation]] = _VALIDATION
    return use


def _stack(rows: list[np.ndarray]) -> Split:
    """Returns the indices of each client's examples as a split: rows [N, longest], size [N].

    Rows are padded with 0 to at least one column, so that indexing with them is always valid.
    """
    # Any: NumPy arrays here, arrays of a device later.
    size: Any = np.array([len(r) for r in rows], np.int32)
    table: Any = np.zeros((len(rows), max(1, size.max())), np.int32)
    table[np.arange(table.shape[1]) < size[:, None]] = np.concatenate(rows)
    return Split(table, size)


def _check_no_empty_client(splits: list[Split], split: str) -> None:
    """Raises UsageError if a client has no training example, or all have no test example.

    `splits` are those for training, validation and testing; `split` is the setting, for messages.
    """
    for use, purpose in ((_TRAIN, "train"), (_TEST, "test")):
        empty = np.flatnonzero(np.asarray(splits[use].size) == 0)
        if len(empty) and (use == _TRAIN or len(empty) == len(splits[use].size)):
            more = f" and {len(empty) - 1} others" if len(empty) > 1 else ""
            hints = {"official": " or split=pooled", "shared": " or a larger test_fraction"}
            hint = hints.get(split, "") if use == _TEST else ""
            raise UsageError(
                f"client {empty[0]}{more} would have nothing to {purpose} on: use fewer clients, "
                f"a more even partition{hint}"
            )


def _domains(pool: Pool, settings: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the domain of each class (-1 for none) and its number in the domain, both int [C].

    `settings` are those of the partition `domains`.
    """
    domain = np.full(pool.classes, -1)
    rank = np.zeros(pool.classes, np.int32)
    for d, members in enumerate(partitions.domain_classes(pool, **settings)):
        domain[members] = d
        rank[members] = np.arange(len(members))
    return domain, rank


def _permute(
    label_map: np.ndarray | None,
    classes: np.ndarray | None,
    clients: int,
    outputs: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Permutes each client's labels among the outputs that it uses.

    Returns the permuted label map, int32 [N, stored classes]: a client's output for a stored class.
    `label_map` None is the identity. `classes`, bool [N, outputs], are each client's; None: all.
    """
    permutation = np.tile(np.arange(outputs, dtype=np.int32), (clients, 1))
    for i, row in enumerate(permutation):
        used = np.arange(outputs) if classes is None else np.flatnonzero(classes[i])
        row[used] = rng.permutation(used)
    return permutation if label_map is None else np.take_along_axis(permutation, label_map, 1)


def _compact(
    dataset: Dataset, normalised: NormalisedData, splits: list[Split], label_map: Any, classes: Any
) -> FederatedData:
    """Returns the arrays without unused examples, unless they are mapped from a file.

    `splits` hold rows of `normalised.x`, for training, validation and testing; they are renumbered.
    `label_map` and `classes` are fields of the result. Of `dataset` only scale and shift are used.
    """
    x: Any = normalised.x
    y: Any = normalised.y
    used = np.full(len(x), is_mapped(x))
    for split in splits:
        used[np.asarray(split.rows)[checks.row_mask(split)]] = True
    new_row = (np.cumsum(used) - 1).astype(np.int32)
    train, validation, test = (
        Split(np.where(checks.row_mask(split), new_row[split.rows], np.int32(0)), split.size)
        for split in splits
    )

    def with_rank(constant: Any) -> Any:
        """Returns an array (or None) with leading axes up to the rank of `x`, for broadcasting."""
        if constant is None:
            return None
        shape = np.shape(constant)
        return np.reshape(constant, (1,) * (x.ndim - len(shape)) + shape)

    if not used.all():
        x, y = x[used], y[used]
    return FederatedData(
        x=x,
        y=y,
        train=train,
        validation=validation,
        test=test,
        scale=with_rank(dataset.scale),
        shift=with_rank(dataset.shift),
        label_map=label_map,
        classes=classes,
    )
