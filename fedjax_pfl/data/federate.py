"""From a dataset and a partition to a federation: who holds what, and what is tested on."""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, Split
from fedjax_pfl.data import apportion, checks, partitions, request
from fedjax_pfl.data.dataset import LATER, Dataset
from fedjax_pfl.data.mapped import is_mapped
from fedjax_pfl.data.normalise import Normalised, normalised
from fedjax_pfl.data.pool import Pool

_TRAIN, _VALIDATION, _TEST = 0, 1, 2  # what an example is for


class Portions(NamedTuple):
    """How many examples of each stored class each client holds: int [N, stored classes]."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


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
) -> tuple[FederatedData, Federation, Portions]:
    """Give a dataset to clients.

    Args:
      partition: one of `partitions.PARTITIONS`; `settings` are its own.
      seed: decides all that is random here, apart from the seed of training.
      split: where test examples come from.
        pooled: train and test are pooled and partitioned; each client's own examples are then
          split at random, at least one for training and, of two or more, one for testing.
        official: the source's own test set; a random part of its training set validates. The rest
          is partitioned, and clients hold the same shares of each class in every split.
        shared: pooled; a random part of the pool is everybody's test set (and another their
          validation set), the rest is partitioned. With `domains`, only its own domain's examples.
      test_fraction: of a client's examples (pooled) or of the pool (shared).
      validation_fraction: likewise; with `official`, of the source's training set.
      validation_examples: in place of the fraction, where one set is cut off (official, shared).
      permute_labels: give every client a random numbering of its classes; stored labels stay.
      held_out: the last so many clients are novel, that is, inactive.
      groups: architecture groups of equal size, give or take one: client i is in i % groups.

    Returns:
      The arrays (without examples that nobody holds, unless they are mapped from a file), the
      description, and who holds how many examples of which class.
    """
    request.check(dataset, partition, clients, split, held_out, groups)
    if permute_labels and dataset.y_train.ndim > 1:
        raise UsageError(f"{dataset.name} has no classes whose labels could be permuted")
    request.check_fractions(split, test_fraction, validation_fraction, validation_examples)
    settings = request.completed(partition, settings)
    streams = np.random.SeedSequence([seed, 0xDA7A]).spawn(4)
    cutting, counting, dealing, permuting = map(np.random.default_rng, streams)

    x, y, owner, tested = _pooled(dataset)
    if y.ndim == 1 and (wrong := checks.problem(x[:1], y, dataset.outputs)):
        raise UsageError(f"{dataset.name}: {wrong.said} in example {wrong.example}")
    labels = y if y.ndim == 1 else np.zeros(len(y), np.int32)
    stored = dataset.outputs if y.ndim == 1 else 1
    fractions = (test_fraction, validation_fraction, validation_examples)
    part = _cut_off(split, tested, fractions, cutting)

    def pool(rows: np.ndarray) -> Pool:
        available = np.bincount(labels[rows], minlength=stored)
        return Pool(available, clients, dataset.coarse, held_out)

    ours = np.flatnonzero(part == _TRAIN)
    request.check_enough(dataset.name, partition, clients, split, len(ours))
    if partition == "natural":
        assert owner is not None
        client_of = partitions.natural(owner[ours], clients, counting, **settings)
        client_of = np.append(client_of, np.full(int(owner.max()) + 1 - len(client_of), -1))
        client = client_of[owner].astype(np.int32)
    else:
        try:
            counts = partitions.PARTITIONS[partition](pool(ours), counting, **settings)
        except UsageError as error:  # say which partition: it may be the default
            named = "" if str(error).startswith("partition ") else f"partition {partition}: "
            raise UsageError(f"{named}{error}") from None
        client = np.full(len(labels), -1, np.int32)
        client[ours] = apportion.assign_examples(labels[ours], counts, dealing)
        for p in (_VALIDATION, _TEST) if split == "official" else ():
            rows = np.flatnonzero(part == p)
            share = apportion.scale_counts(counts, pool(ours).available, pool(rows).available)
            client[rows] = apportion.assign_examples(labels[rows], share, dealing)
    if split == "pooled":
        part = _split_clients(client, clients, test_fraction, validation_fraction, dealing)

    parts = (_TRAIN, _VALIDATION, _TEST)
    tables = [_stack(_rows(np.where(part == p, client, -1), clients)) for p in parts]
    label_map, outputs = None, dataset.outputs
    if partition == "domains":
        domain, rank = _domains(pool(ours), settings)
        of = partitions.domain_of(clients, int(domain.max()) + 1)
        label_map, outputs = np.tile(rank, (clients, 1)), int(rank.max()) + 1
    trained_on, active = part == _TRAIN, np.arange(clients) < clients - held_out
    normal = normalised(dataset, x, y, client, trained_on, active)
    if split == "shared":
        for p in (_VALIDATION, _TEST):
            rows = np.flatnonzero(part == p)
            held = [rows] * clients
            if partition == "domains":
                held = [rows[domain[labels[rows]] == d] for d in of]
            tables[p] = _stack(held)
    _no_empty_client(tables, split)

    classes, owners = None, None
    if partition == "natural":
        chosen = np.argsort(client_of, kind="stable")[np.count_nonzero(client_of < 0) :]
        names = chosen if dataset.owner_names is None else np.asarray(dataset.owner_names)[chosen]
        owners = tuple(map(str, names))
        if dataset.owner_classes is not None:
            classes = np.asarray(dataset.owner_classes)[chosen]
    if partition == "domains":
        sizes = np.bincount(domain[domain >= 0])
        classes = np.arange(outputs) < sizes[of][:, None] if np.ptp(sizes) else None
    if permute_labels:
        label_map = _permuted(label_map, classes, clients, outputs, permuting)

    data = _compact(dataset, normal, tables, label_map, classes)
    content = portions(data, stored)
    federation = Federation(
        counts=np.array(tables[_TRAIN].size),
        input_shape=tuple(x.shape[1:]),
        outputs=outputs,
        active=active,
        groups=np.arange(clients, dtype=np.int32) % groups,
        validation_counts=np.array(tables[_VALIDATION].size),
        class_counts=content.train if y.ndim == 1 else None,
        owners=owners,
        input_dtype="float32" if dataset.scale is not None or x.dtype.kind == "f" else x.dtype.name,
        positions=tuple(y.shape[1:]) if y.dtype.kind == "i" else (),
        metadata={**(dataset.metadata or {}), **normal.metadata} or None,
    )
    later = dataset.normalise is not None and dataset.normalise.by == LATER
    checks.check_federated(dataset.name, data, federation, rounded=not later)
    return data, federation, content


def portions(data: FederatedData, stored_classes: int) -> Portions:
    """Count each client's examples by stored class; those of a regression are one class."""
    y = np.asarray(data.y)
    labels = y if y.ndim == 1 else np.zeros(len(y), np.int64)

    def count(split: Split) -> np.ndarray:
        index, number = np.asarray(split.rows), np.asarray(split.size)
        real = np.arange(index.shape[1]) < number[:, None]
        cell = np.arange(len(index))[:, None] * stored_classes + labels[index]
        flat = np.bincount(cell[real], minlength=len(index) * stored_classes)
        return flat.reshape(len(index), stored_classes)

    return Portions(count(data.train), count(data.validation), count(data.test))


def _pooled(
    dataset: Dataset,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """All examples: x, y, owners, and which of them the source tests on."""
    x, y, owner = dataset.x_train, dataset.y_train, dataset.owner_train
    tested = np.zeros(len(x), bool)
    if dataset.x_test is not None and dataset.y_test is not None:
        x = np.concatenate([x, dataset.x_test])
        y = np.concatenate([y, dataset.y_test])
        tested = np.arange(len(x)) >= len(tested)
        if owner is not None and dataset.owner_test is not None:
            owner = np.concatenate([owner, dataset.owner_test])
        else:
            owner = None
    return x, y, owner, tested


def _cut_off(
    split: str,
    tested: np.ndarray,
    fractions: tuple[float, float, int | None],
    rng: np.random.Generator,
) -> np.ndarray:
    """int [examples]: which part each is in before clients come in; all train with `pooled`."""
    part = np.full(len(tested), _TRAIN)
    if split == "pooled":
        return part
    test, validation, validation_examples = fractions
    if split == "official":
        part[tested] = _TEST
    else:
        part[rng.permutation(len(part))[: round(test * len(part))]] = _TEST
    rows = np.flatnonzero(part == _TRAIN)
    whole = len(rows) if split == "official" else len(part)
    number = round(validation * whole) if validation_examples is None else validation_examples
    if not 0 <= number < len(rows):
        raise UsageError(
            f"validation_examples={number} must lie between 0 and {len(rows) - 1}, to leave "
            "something to train on"
        )
    part[rng.choice(rows, number, replace=False)] = _VALIDATION
    return part


def _split_clients(
    client: np.ndarray, clients: int, test: float, validation: float, rng: np.random.Generator
) -> np.ndarray:
    """Split each client's examples at random: a part for each example."""
    part = np.full(len(client), _TRAIN)
    for rows in _rows(client, clients):
        if not len(rows):
            continue
        tests = min(max(1, round(test * len(rows))), len(rows) - 1)  # of one example none
        validations = min(round(validation * len(rows)), len(rows) - tests - 1)
        order = rng.permutation(rows)
        part[order[:tests]] = _TEST
        part[order[tests : tests + validations]] = _VALIDATION
    return part


def _rows(client: np.ndarray, clients: int) -> list[np.ndarray]:
    """The rows of each client, in ascending order."""
    order = np.argsort(client, kind="stable")
    ends = np.searchsorted(client[order], np.arange(clients + 1))
    return [order[a:b] for a, b in itertools.pairwise(ends)]


def _stack(rows: list[np.ndarray]) -> Split:
    """Ragged rows as one table padded with 0; never narrower than one, so that it can be read."""
    # Any: NumPy arrays, where device arrays will be once the data are put there.
    count: Any = np.array([len(r) for r in rows], np.int32)
    index: Any = np.zeros((len(rows), max(1, count.max())), np.int32)
    index[np.arange(index.shape[1]) < count[:, None]] = np.concatenate(rows)
    return Split(index, count)


def _no_empty_client(tables: list[Split], split: str) -> None:
    """One without test examples trains all the same; somebody must have some."""
    for part, purpose in ((_TRAIN, "train"), (_TEST, "test")):
        empty = np.flatnonzero(np.asarray(tables[part].size) == 0)
        if len(empty) and (part == _TRAIN or len(empty) == len(tables[part].size)):
            others = f" and {len(empty) - 1} others" if len(empty) > 1 else ""
            hint = " or split=pooled" if split == "official" and part == _TEST else ""
            raise UsageError(
                f"client {empty[0]}{others} would have nothing to {purpose} on: use fewer clients, "
                f"a more even partition{hint}"
            )


def _domains(pool: Pool, settings: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """int [C] each: the domain of a class (-1 for none), and its number within the domain."""
    domain = np.full(pool.classes, -1)
    rank = np.zeros(pool.classes, np.int32)
    for d, members in enumerate(partitions.domain_classes(pool, **settings)):
        domain[members] = d
        rank[members] = np.arange(len(members))
    return domain, rank


def _permuted(
    label_map: np.ndarray | None,
    classes: np.ndarray | None,
    clients: int,
    outputs: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Permute each client's labels, among the outputs that it uses."""
    permutation = np.tile(np.arange(outputs, dtype=np.int32), (clients, 1))
    for i, row in enumerate(permutation):
        mine = np.arange(outputs) if classes is None else np.flatnonzero(classes[i])
        row[mine] = rng.permutation(mine)
    return permutation if label_map is None else np.take_along_axis(permutation, label_map, 1)


def _compact(
    dataset: Dataset, normal: Normalised, tables: list[Split], label_map: Any, classes: Any
) -> FederatedData:
    """The arrays without the examples that nobody holds, unless they are mapped from a file."""
    x: Any = normal.x
    y: Any = normal.y
    index = [np.asarray(table.rows) for table in tables]
    real = [
        np.arange(i.shape[1]) < np.asarray(table.size)[:, None]
        for i, table in zip(index, tables, strict=True)
    ]
    used = np.zeros(len(x), bool)
    for i, mask in zip(index, real, strict=True):
        used[i[mask]] = True
    used |= is_mapped(x)  # what is in a file stays there
    place = (np.cumsum(used) - 1).astype(np.int32)
    moved: list[Any] = [
        np.where(mask, place[i], np.int32(0)) for i, mask in zip(index, real, strict=True)
    ]
    train, validation, test = (Split(i, table.size) for i, table in zip(moved, tables, strict=True))

    def ranked(constant: Any) -> Any:
        """With the rank of a batch, so that nothing relies on implicit rank promotion."""
        if constant is None:
            return None
        shape = np.shape(constant)
        return np.reshape(constant, (1,) * (x.ndim - len(shape)) + shape)

    scale, shift = ranked(dataset.scale), ranked(dataset.shift)
    if not used.all():
        x, y = x[used], y[used]
    return FederatedData(x, y, train, validation, test, scale, shift, label_map, classes)
