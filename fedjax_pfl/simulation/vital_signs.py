"""Vital signs: numbers that say, at every evaluation, whether a method's own mechanism acts.

A method shows arrays of its state (`observe`). Its signs are worked out from them on the host in
float64: one number each, or one for each layer. `SIGNS` is the table of all methods; one with
nothing in it has no signs. A mechanism that has been dead for a quarter of the run is said so, in
one sentence that names the setting to look at.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Value = float | dict[str, float]  # of a run, or of each of its layers
_QUARTER = 4  # a mechanism may rest for less than this part of a run
ONE_HOT = 0.99  # the largest weight from which on a row counts as one-hot
UNIFORM = 0.999  # the share of all clients that as good as everybody is
MOVED = 1e-3  # the least half of a row's summed changes that counts as moving
# From which effective number of peers on, in parts of all, a mixture is as good as the plain mean.
# Wider than for α: weights of 1/N ± a tenth are that.
EVEN = 0.99
ONE_MODEL = 0.02  # the least spread of generated models that makes them several
ONE_ROUTE = 0.02  # the least deviation of π over clients that makes routes their own


class Shown(NamedTuple):
    """What a method showed of itself."""

    now: Mapping[str, np.ndarray]
    before: Mapping[str, np.ndarray]  # at the evaluation before this one; empty at the first
    layers: Sequence[str]  # their names, as many as there are
    first: Mapping[str, np.ndarray] = {}  # at the phase's first evaluation; empty at that one

    def names(self, count: int) -> list[str]:
        """Names of so many layers, numbered where those of the network are not as many."""
        if len(self.layers) == count:
            return list(self.layers)
        return ["model"] if count == 1 else [f"layer {j + 1}" for j in range(count)]


class Sign(NamedTuple):
    """One number of a method, or one for each layer.

    `value` is None where an evaluation cannot say it. Where `dead` holds of a value for a quarter
    of the run, `sentence` is said, in which {value} stands for it (of layers, their mean).
    `lesson` says in words what a value means for the reader of a report.
    """

    what: str
    value: Callable[[Shown], Value | None]
    dead: Callable[[Value, Shown], bool] | None = None
    sentence: str = ""
    lesson: Callable[[Value], str] | None = None


class Reading(NamedTuple):
    """The signs of one evaluation, as its line in metrics.jsonl holds them."""

    observed: dict[str, Value]
    dead: list[str]  # names of signs that say so at this evaluation
    remarks: list[str]  # on those that have said so for a quarter of the run


def mean(value: Value) -> float:
    """A value as one number."""
    return float(np.mean(list(value.values()))) if isinstance(value, dict) else float(value)


def peers(alpha: np.ndarray) -> np.ndarray:
    """exp(−Σ_j α_j log α_j): how many equal weights rows [..., N] are worth, from 1 to N."""
    weights = np.asarray(alpha, np.float64)
    logs = np.log(np.where(weights > 0, weights, 1.0))
    return np.exp(-np.sum(weights * logs, -1))


def moving(now: np.ndarray, before: np.ndarray) -> float:
    """The share of clients (axis 0) of whose rows of weights one has moved: ½ Σ|change| > .001."""
    change = 0.5 * np.abs(np.asarray(now, np.float64) - before).sum(-1)
    return float(np.mean(change.reshape(len(change), -1).max(1) > MOVED))


def one_hot(weights: np.ndarray) -> float:
    """The share of rows [..., N] that are as good as one weight of 1."""
    return float(np.mean(np.asarray(weights).max(-1) > ONE_HOT))


def _layer_peers(shown: Shown) -> Value | None:
    if "alpha" not in shown.now:
        return None
    counts = peers(shown.now["alpha"]).mean(0)
    return dict(zip(shown.names(len(counts)), map(float, counts), strict=True))


def _all_alike(value: Value, shown: Shown) -> bool:
    """Whether α [N, layers, N] is uniform in every layer."""
    assert isinstance(value, dict)
    return min(value.values()) > UNIFORM * shown.now["alpha"].shape[-1]


def _of_layers(value: Value) -> str:
    """Which layers clients share, and which they keep."""
    assert isinstance(value, dict)
    told = ", ".join(f"{name} {count:.1f}" for name, count in value.items())
    most, least = max(value, key=value.__getitem__), min(value, key=value.__getitem__)
    said = f"Models mixed into each layer that a client is served, in effect: {told}."
    if value[most] - value[least] > 0.5:
        said += f" Clients share {most} most, and keep {least} most to themselves."
    return said


def _of_alpha(share: Callable[..., float], *, pairs: bool = False) -> Callable[[Shown], Any]:
    """A number of α, or of α and the one before."""

    def value(shown: Shown) -> float | None:
        if "alpha" not in shown.now or (pairs and "alpha" not in shown.before):
            return None
        both = [shown.now["alpha"], *([shown.before["alpha"]] if pairs else [])]
        return share(*both)

    return value


def bits(shares: np.ndarray) -> np.ndarray:
    """Entropy of rows [..., M] that sum to 1."""
    return np.log2(peers(shares))


def gate_bits(pi: np.ndarray) -> float:
    """Mean entropy of gates that are open with probability π."""
    pi = np.asarray(pi, np.float64)
    return float(np.mean(bits(np.stack([pi, 1 - pi], -1))))


def routes(pi: np.ndarray) -> int:
    """How many different sets of gates above one half there are among clients [N, E]."""
    return len(np.unique(np.asarray(pi) > 0.5, axis=0))


def travelled(now: np.ndarray, first: np.ndarray) -> float:
    """How far embeddings [N, e] are from where they were, in lengths of that."""
    first = np.asarray(first, np.float64)
    return float(np.linalg.norm(now - first) / np.linalg.norm(first))


def positive(now: np.ndarray, before: np.ndarray) -> float | None:
    """The share of the sums of weights [N, N] that grew, of those that changed."""
    change = np.asarray(now, np.float64) - before
    return float(np.mean(change[change != 0] > 0)) if np.any(change != 0) else None


def _now(name: str, share: Callable[[np.ndarray], Any]) -> Callable[[Shown], Value | None]:
    """A number of one array."""

    def value(shown: Shown) -> Value | None:
        return None if name not in shown.now else float(share(shown.now[name]))

    return value


def _visited(share: Callable[[np.ndarray], Any]) -> Callable[[Shown], Value | None]:
    """A number of π, over clients that have trained: before that a row is 0."""

    def value(shown: Shown) -> Value | None:
        pi = np.asarray(shown.now.get("pi", ()), np.float64)
        there = pi[np.any(pi > 0, -1)] if pi.ndim == 2 else pi
        return float(share(there)) if len(there) else None

    return value


def _how_far(shown: Shown) -> Value | None:
    if "embeddings" not in shown.first:
        return None
    return travelled(shown.now["embeddings"], shown.first["embeddings"])


def _grew(shown: Shown) -> Value | None:
    if "affinity" not in shown.now:
        return None
    now = shown.now["affinity"]
    return positive(now, shown.before.get("affinity", np.zeros_like(now)))


def _below(least: float) -> Callable[[Value, Shown], bool]:
    def is_below(value: Value, shown: Shown) -> bool:
        return mean(value) < least

    return is_below


def _routes(advice: str) -> dict[str, Sign]:
    """Signs of a method that routes clients through a pool of blocks."""
    return {
        "routes": Sign(
            "different routes in use, of those that have trained: sets of gates with π over ½",
            _visited(routes),
        ),
        "gate_bits": Sign("entropy of a gate in bits; 1 is a coin", _visited(gate_bits)),
        "deviation": Sign(
            "deviation of π over clients, the mean over gates",
            _visited(lambda pi: pi.std(0).mean()),
            _below(ONE_ROUTE),
            f"all clients are routed alike: π deviates by {{value:.4f}} over them{advice}",
        ),
    }


def _one_body(method: str) -> dict[str, Sign]:
    return {
        "spread": Sign(
            "how far generated models are from their mean, in lengths of it; the mean over clients",
            _now("spread", np.mean),
            _below(ONE_MODEL),
            "the hypernetwork generates one model for all: what tells them apart is {value:.4f} of "
            f"their length; see {method}.rate and {method}.weight_decay",
        ),
        "moved": Sign(
            "how far embeddings have moved since the first evaluation, in lengths of them then",
            _how_far,
            _below(MOVED),
            "embeddings do not learn: they have moved by {value:.5f} of their length; see "
            f"{method}.rate",
        ),
    }


def _matched(method: str) -> dict[str, Sign]:
    """Signs of a method that mixes the models of matched clients with weights ω [N, N]."""
    return {
        "peers": Sign(
            "models mixed into what a client is served, in effect: the exponential of ω's entropy",
            _now("weights", lambda omega: peers(omega).mean()),
            lambda value, shown: mean(value) > EVEN * shown.now["weights"].shape[-1],
            "every client is served the plain mean: ω mixes {value:.1f} models; see "
            f"{method}.scale and {method}.minimum",
        ),
        "candidates": Sign(
            "the share of all models that a client mixes in, its own included",
            _now("weights", lambda omega: np.mean(np.asarray(omega) > 0)),
        ),
        "alone": Sign(
            "the share of clients that are served their own last factors, with ω over .99",
            _now("weights", lambda omega: np.mean(np.diagonal(omega) > ONE_HOT)),
            lambda value, shown: mean(value) == 1.0,
            "every client trains alone: its own ω is over .99 in {value:.0%} of rows; see "
            f"{method}.scale and {method}.tau",
        ),
    }


SIGNS: dict[str, dict[str, Sign]] = {
    "pfedla": {
        "peers": Sign(
            "models mixed into a layer, in effect: the exponential of α's entropy",
            _layer_peers,
            _all_alike,
            "every client is served the plain mean of all models: α mixes {value:.1f} of them in "
            "every layer; see pfedla.rate",
            _of_layers,
        ),
        "one_hot": Sign(
            "the share of α's rows that are one-hot",
            _of_alpha(one_hot),
            lambda value, shown: mean(value) == 1.0,
            "every client is served one client's last model, as a rule its own: α is one-hot in "
            "{value:.0%} of its rows; see pfedla.rate",
        ),
        "moving": Sign(
            "the share of clients whose α has moved since the evaluation before",
            _of_alpha(moving, pairs=True),
        ),
    },
    "pfedhn": _one_body("pfedhn"),
    "pfedhn_pc": _one_body("pfedhn_pc"),
    "fedmn": _routes("; see fedmn_correlation"),
    "fedmn_correlation": _routes(""),
    "factorized_fl": _matched("factorized_fl"),
    "factorized_fl_moved": _matched("factorized_fl_moved"),
    "fedfomo": {
        "positive": Sign(
            "the share of the weights given to peers since the last evaluation that are positive",
            _grew,
            lambda value, shown: mean(value) == 0.0,
            "no client gains from a peer: {value:.0%} of the weights are positive; see "
            "fedfomo.reference",
        ),
    },
    "clustered_fl": {
        "clusters": Sign(
            "clusters that clients are in",
            _now("cluster", lambda cluster: len(np.unique(cluster))),
            lambda value, shown: mean(value) == 1.0,
            "clients have not been split and there is {value:.0f} cluster, which is FedAvg; see "
            "clustered_fl.mean_below and clustered_fl.longest_above",
        ),
    },
    "fedem": {
        "share_bits": Sign(
            "entropy of a client's shares π of the components, in bits, the mean over clients",
            _now("pi", lambda pi: bits(pi).mean()),
        ),
        "deviation": Sign(
            "deviation of π over clients, the mean over components",
            _now("pi", lambda pi: np.asarray(pi, np.float64).std(0).mean()),
            _below(MOVED),
            "all clients weigh the components alike: π deviates by {value:.5f} over them; see "
            "fedem.components",
        ),
    },
}


def read(
    signs: Mapping[str, Sign],
    shown: Shown,
    earlier: Sequence[Mapping[str, Any]],
    at: int,
    rounds: int,
) -> Reading:
    """The signs of one evaluation.

    Args:
      signs: those of the method, by name.
      earlier: the lines of metrics.jsonl before this one, of the same phase.
      at: the round of this evaluation.
      rounds: how long the run is.
    """
    observed, dead, remarks = dict[str, Value](), [], []
    for name, sign in signs.items():
        value = sign.value(shown)
        if value is None or not math.isfinite(mean(value)):
            continue
        observed[name] = value
        if sign.dead is None or not sign.dead(value, shown):
            continue
        dead.append(name)
        since = at
        for line in reversed(earlier):
            if name not in line.get("dead", ()):
                break
            since = line["round"]
        if (at - since) * _QUARTER >= rounds and at > since:
            remarks.append(sign.sentence.format(value=mean(value)))
    return Reading(observed, dead, remarks)


def lessons(method: str, observed: Mapping[str, Value]) -> list[str]:
    """What the last evaluation's signs mean, in words."""
    signs = SIGNS.get(method, {})
    return [
        sign.lesson(observed[name])
        for name, sign in signs.items()
        if sign.lesson is not None and name in observed
    ]
