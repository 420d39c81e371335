"""Diagnostics: numbers that tell, at every evaluation, whether a method's mechanism is active.

A method exposes arrays of its state (`Algorithm.observe`). Its diagnostics are computed from them
on the host in float64. If a mechanism has been inactive for a quarter of the run, a warning names
the setting to check. Each method defines its own diagnostics, next to its code.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Value = float | dict[str, float]  # one number, or one for each layer

MINIMAL_CHANGE = 1e-3  # changes below this count as no change
_WARN_AFTER = 4  # warn if inactive for 1/4 of the run
_ONE_HOT = 0.99  # a row is one-hot if its largest weight is above this


class Observed(NamedTuple):
    """Arrays that `Algorithm.observe` returned at evaluations of a run, by name."""

    now: Mapping[str, np.ndarray]  # at this evaluation
    before: Mapping[str, np.ndarray]  # at the evaluation before; empty at the first one
    layers: Sequence[str]  # names of the layers that clients download
    first: Mapping[str, np.ndarray] = {}  # at the phase's first evaluation; empty at that one

    def layer_names(self, count: int) -> list[str]:
        """Returns `count` names: the layers', or numbers if the network has another count."""
        if len(self.layers) == count:
            return list(self.layers)
        return ["model"] if count == 1 else [f"layer {j + 1}" for j in range(count)]


class Diagnostic(NamedTuple):
    """A number that shows if a method's mechanism acts, or one such number for each layer.

    `explanation` returns a sentence for the report on what the last value means.
    """

    meaning: str  # description for the report
    value: Callable[[Observed], Value | None]  # None if it cannot be computed at an evaluation
    inactive: Callable[[Value, Observed], bool] | None = None  # True: the mechanism has no effect
    warning: str = ""  # printed if inactive; {value} is the mean over layers
    explanation: Callable[[Value], str] | None = None


class Picture(NamedTuple):
    """Title, caption and kind of the figure of an array that `Algorithm.observe` returned."""

    title: str
    meaning: str  # caption
    columns: str = ""  # label of the horizontal axis of a heat map
    is_scatter: bool = False  # plot rows by their first two principal components


class Reading(NamedTuple):
    """The diagnostics of one evaluation, as a line of metrics.jsonl holds them."""

    diagnostics: dict[str, Value]  # values by name
    inactive: list[str]  # names of diagnostics that show that their mechanism has no effect
    remarks: list[str]  # warnings about those inactive for at least 1/4 of the phase


def mean(value: Value) -> float:
    """Returns the mean over layers of a value, or the value itself if it is one number."""
    return float(np.mean(list(value.values()))) if isinstance(value, dict) else float(value)


def effective_number(weights: np.ndarray) -> np.ndarray:
    """Returns exp(−Σ_j w_j log w_j) of rows [..., N]: N for equal weights, 1 for one-hot rows."""
    weights = np.asarray(weights, np.float64)
    logs = np.log(np.where(weights > 0, weights, 1.0))
    return np.exp(-np.sum(weights * logs, -1))


def count_mixed(weights: np.ndarray) -> int:
    """Returns the number of models that have a weight in the model of another client.

    `weights` are [N, ..., N], with the receiving client on axis 0. Models of clients that never
    train have none. With other columns than clients, all columns count.
    """
    clients, columns = len(weights), weights.shape[-1]
    if clients != columns:
        return columns
    largest = np.asarray(weights).reshape(clients, -1, columns).max(1)
    return int(np.sum((largest * ~np.eye(clients, dtype=bool)).max(0) > 0))


def entropy_bits(shares: np.ndarray) -> np.ndarray:
    """Returns the entropy in bits of rows [..., M] that sum to 1."""
    return np.log2(effective_number(shares))


def moving_fraction(now: np.ndarray, before: np.ndarray) -> float:
    """Returns the fraction of clients (axis 0) of which a row changed: ½ Σ |now − before| > 0.001.

    The arrays have shape [clients, ..., N]; rows lie along the last axis.
    """
    change = 0.5 * np.abs(np.asarray(now, np.float64) - before).sum(-1)
    return float(np.mean(change.reshape(len(change), -1).max(1) > MINIMAL_CHANGE))


def one_hot_fraction(weights: np.ndarray) -> float:
    """Returns the fraction of rows (last axis of [..., N]) that contain a weight above 0.99."""
    return float(np.mean(np.asarray(weights).max(-1) > _ONE_HOT))


def own_weight_fraction(weights: np.ndarray) -> float:
    """Returns the fraction of rows i of weights [N, N] whose entry [i, i] is above 0.99."""
    return float(np.mean(np.diagonal(weights) > _ONE_HOT))


def of_array(name: str, f: Callable[[np.ndarray], Any]) -> Callable[[Observed], Value | None]:
    """Returns a function for `Diagnostic.value`: f(array `name`), None without this array."""

    def value(observed: Observed) -> Value | None:
        return None if name not in observed.now else float(f(observed.now[name]))

    return value


def below(least: float) -> Callable[[Value, Observed], bool]:
    """Returns a function for `Diagnostic.inactive`: True if `mean(value)` is below `least`."""

    def is_below(value: Value, observed: Observed) -> bool:
        return mean(value) < least

    return is_below


def read(
    diagnostics: Mapping[str, Diagnostic],
    observed: Observed,
    earlier: Sequence[Mapping[str, Any]],
    t: int,
    rounds: int,
) -> Reading:
    """Computes the diagnostics of one evaluation.

    Args:
      diagnostics: Diagnostics of the method, by name. Values None and NaN are left out.
      observed: Arrays of the method.
      earlier: Earlier lines of metrics.jsonl of the same phase, in order.
      t: Round of this evaluation.
      rounds: Number of rounds of the phase.

    Returns:
      Their values, the inactive ones, and warnings about those that stay inactive.
    """
    values, inactive, warnings = dict[str, Value](), [], []
    for name, diagnostic in diagnostics.items():
        value = diagnostic.value(observed)
        if value is None or not math.isfinite(mean(value)):
            continue
        values[name] = value
        if diagnostic.inactive is None or not diagnostic.inactive(value, observed):
            continue
        inactive.append(name)
        since = t
        for line in reversed(earlier):
            if name not in line.get("inactive", ()):
                break
            since = line["round"]
        if (t - since) * _WARN_AFTER >= rounds and t > since:
            warnings.append(diagnostic.warning.format(value=mean(value)))
    return Reading(diagnostics=values, inactive=inactive, remarks=warnings)


def explanations(diagnostics: Mapping[str, Diagnostic], values: Mapping[str, Value]) -> list[str]:
    """Returns a sentence on each of the last values whose diagnostic has an `explanation`."""
    return [
        diagnostic.explanation(values[name])
        for name, diagnostic in diagnostics.items()
        if diagnostic.explanation is not None and name in values
    ]
