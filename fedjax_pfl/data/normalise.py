"""Mean 0 and deviation 1, by training examples alone: those of all, or of each client."""

import itertools
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.data.dataset import Dataset


class Normalised(NamedTuple):
    """Examples as clients get them."""

    x: np.ndarray
    y: np.ndarray
    scale: Any  # an example becomes x * scale + shift; None: it stays
    shift: Any
    target: tuple[float, float] | None  # mean and deviation that a regression's one target had


def normalised(
    dataset: Dataset,
    x: np.ndarray,
    y: np.ndarray,
    client: np.ndarray,
    trained_on: np.ndarray,
    active: np.ndarray,
) -> Normalised:
    """Examples by what `dataset.normalise` asks for.

    By the federation, x stays as it is and the constants are given beside it, so that they travel
    with an exported model. By each client, x is changed. Of numbers that are all the same, the
    deviation is taken to be 1.

    Args:
      x, y: all examples.
      client: int [examples]: who has an example; -1 where nobody or everybody has it.
      trained_on: bool [examples]: its client trains on it.
      active: bool [N]: clients that take part in training.
    """
    wanted, scale, shift, target = dataset.normalise, dataset.scale, dataset.shift, None
    if wanted is None:
        return Normalised(x, y, scale, shift, None)
    ours = trained_on & (client >= 0)
    ours[ours] = active[client[ours]]
    if wanted.targets:
        mean, deviation = _moments(y[ours])
        y = ((y - mean) / deviation).astype(np.float32)
        target = (float(mean[0]), float(deviation[0])) if len(mean) == 1 else None
    which = wanted.features
    if which.any() and wanted.by == "federation":
        mean, deviation = _moments(x[ours])
        scale = np.where(which, 1 / deviation, 1).astype(np.float32)
        shift = np.where(which, -mean / deviation, 0).astype(np.float32)
    elif which.any():
        x = x.astype(np.float32)
        order = np.argsort(client, kind="stable")
        ends = np.searchsorted(client[order], np.arange(len(active) + 1))
        for a, b in itertools.pairwise(ends):
            own = order[a:b]
            if len(train := own[trained_on[own]]):
                mean, deviation = _moments(x[train])
                x[own] = np.where(which, (x[own] - mean) / deviation, x[own])
    return Normalised(x, y, scale, shift, target)


def _moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation over all axes but the last, float64."""
    flat = values.reshape(-1, values.shape[-1]).astype(np.float64)
    mean, deviation = flat.mean(0), flat.std(0)
    return mean, np.where(deviation > 1e-7 * np.abs(mean), deviation, 1.0)
