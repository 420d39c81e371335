"""Mean 0 and deviation 1, by training examples alone: those of all, or of each client."""

import itertools
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.data.dataset import LATER, Dataset
from fedjax_pfl.data.numbers import moments, rows_at_once


class Normalised(NamedTuple):
    """Examples as clients get them."""

    x: np.ndarray
    y: np.ndarray
    metadata: dict[str, Any]  # means and deviations of inputs and of a target, as plain data


def normalised(
    dataset: Dataset,
    x: np.ndarray,
    y: np.ndarray,
    client: np.ndarray,
    trained_on: np.ndarray,
    active: np.ndarray,
) -> Normalised:
    """Returns examples as `dataset.normalise` requests, computed in float64, stored in float32.

    So a number far from 0, such as a time in seconds, keeps its differences. Means and deviations
    of the federation are returned too, for exported models; those of each client are not. Numbers
    that are all the same have deviation 1.

    Args:
      x, y: All examples.
      client: int [examples]: who has an example; -1 where nobody or everybody has it.
      trained_on: bool [examples]: its client trains on it.
      active: bool [N]: clients that take part in training.
    """
    wanted, metadata = dataset.normalise, dict[str, Any]()
    if wanted is None or wanted.by == LATER:
        return Normalised(x, y, metadata)
    joins = trained_on & (client >= 0)
    joins[joins] = active[client[joins]]
    training, every = np.flatnonzero(joins), np.arange(len(x))
    if wanted.targets:
        y, mean, deviation = _standardised(y, np.ones(y.shape[-1], bool), [(every, training)])
        metadata |= {"target_mean": mean.tolist(), "target_deviation": deviation.tolist()}
    if not wanted.features.any():
        return Normalised(x, y, metadata)
    if wanted.by == "federation":
        x, mean, deviation = _standardised(x, wanted.features, [(every, training)])
        metadata |= {"input_mean": mean.tolist(), "input_deviation": deviation.tolist()}
    else:
        order = np.argsort(client, kind="stable")
        ends = np.searchsorted(client[order], np.arange(len(active) + 1))
        client_rows = [order[a:b] for a, b in itertools.pairwise(ends)]
        groups = [(rows, train) for rows in client_rows if len(train := rows[trained_on[rows]])]
        x, _, _ = _standardised(x, wanted.features, groups)
    return Normalised(x, y, metadata)


def _standardised(
    values: np.ndarray, which: np.ndarray, groups: list[tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns float32 values, and the mean and deviation of the last group.

    Args:
      values: Array of shape [examples, ..., features].
      which: bool [features]; the others stay as they are.
      groups: Rows to standardise, and those among them whose moments count.
    """
    result = np.zeros(values.shape, np.float32)
    step = rows_at_once(values)
    for rows, training in groups:
        mean, deviation = moments(values, training)
        mean = np.where(which, mean, 0.0)
        deviation = np.where(which & (deviation > 0), deviation, 1.0)
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            result[part] = (values[part] - mean) / deviation
    return result, mean, deviation
