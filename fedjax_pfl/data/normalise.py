"""Standardisation by the training examples of all clients, or of each client."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.data.dataset import LATER, Dataset
from fedjax_pfl.data.numbers import moments, rows_by_id, rows_per_chunk


class NormalisedData(NamedTuple):
    """Normalised inputs and labels of all examples."""

    x: np.ndarray  # [examples, ..., features]
    y: np.ndarray  # [examples, ...]
    metadata: dict[str, Any]  # input_mean, input_deviation, target_mean, ...; may be empty


def normalise_examples(
    dataset: Dataset,
    x: np.ndarray,
    y: np.ndarray,
    client: np.ndarray,
    trained_on: np.ndarray,
    active: np.ndarray,
) -> NormalisedData:
    """Returns examples normalised as `dataset.normalise` requests.

    Computed in float64 and stored in float32, so a number far from 0, such as a time in seconds,
    keeps its precision. The metadata has the means and deviations, for exported models: lists
    [features] of the whole federation, or arrays [N, features] if each client has its own. A
    constant feature has deviation 1, and so have the features of a client without training
    examples.

    Args:
      dataset: The dataset of the examples.
      x: Inputs [examples, ..., features].
      y: Labels [examples, ...].
      client: int [examples]: the client of each example; -1 if unused or shared by all clients.
      trained_on: bool [examples]: True for training examples.
      active: bool [N]: False for held-out clients.
    """
    settings, metadata = dataset.normalise, dict[str, Any]()
    if settings is None or settings.scope == LATER:
        return NormalisedData(x, y, metadata)
    used = trained_on & (client >= 0)
    used[used] = active[client[used]]
    federation = [(np.arange(len(x)), np.flatnonzero(used))]
    if settings.targets:
        y, mean, deviation = _standardise(y, np.ones(y.shape[-1], bool), federation)
        metadata |= {"target_mean": mean[0].tolist(), "target_deviation": deviation[0].tolist()}
    if not settings.features.any():
        return NormalisedData(x, y, metadata)
    if settings.scope == "federation":
        x, mean, deviation = _standardise(x, settings.features, federation)
        metadata |= {"input_mean": mean[0].tolist(), "input_deviation": deviation[0].tolist()}
    else:
        client_rows = rows_by_id(client, len(active))
        groups = [(rows, rows[trained_on[rows]]) for rows in client_rows]
        ids = [i for i, (_, training) in enumerate(groups) if len(training)]
        x, mean, deviation = _standardise(x, settings.features, [groups[i] for i in ids])
        for name, values, default in (("mean", mean, 0.0), ("deviation", deviation, 1.0)):
            by_client = np.full((len(active), x.shape[-1]), default)
            by_client[ids] = values
            metadata[f"input_{name}"] = by_client
    return NormalisedData(x, y, metadata)


def select_constants(metadata: Mapping[str, Any], client: int) -> dict[str, Any]:
    """Returns metadata with the means and deviations of one client, lists, if each has its own."""
    return {
        name: value[client].tolist() if _is_per_client(value) else value
        for name, value in metadata.items()
    }


def without_client_constants(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns metadata without means and deviations of single clients, which may be many."""
    return {name: value for name, value in metadata.items() if not _is_per_client(value)}


def _is_per_client(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def _standardise(
    values: np.ndarray, mask: np.ndarray, groups: list[tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Standardises groups of examples, each by its own mean and deviation; others become 0.

    Returns float32 values of the same shape, and means and deviations, [groups, features].
    Features outside `mask`, bool [features], have mean 0 and deviation 1. `groups` have the rows of
    `values`, [examples, ..., features], to standardise, and those that give the moments.
    """
    result = np.zeros(values.shape, np.float32)
    means, deviations = np.zeros((2, len(groups), values.shape[-1]))
    step = rows_per_chunk(values)
    for g, (rows, training) in enumerate(groups):
        mean, deviation = moments(values, training)
        means[g] = mean = np.where(mask, mean, 0.0)
        deviations[g] = deviation = np.where(mask & (deviation > 0), deviation, 1.0)
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            result[part] = (values[part] - mean) / deviation
    return result, means, deviations
