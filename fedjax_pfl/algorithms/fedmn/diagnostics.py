"""Diagnostics and figure captions of FedMN's routes: probabilities pi [N, E] and gates."""

from collections.abc import Callable
from typing import Any

import numpy as np

from fedjax_pfl.core.diagnostics import (
    Diagnostic,
    Observed,
    Picture,
    Value,
    below,
    entropy_bits,
)

_ONE_ROUTE = 0.02  # clients with a smaller deviation of pi have the same route


def _of_trained_clients(f: Callable[[np.ndarray], Any]) -> Callable[[Observed], Value | None]:
    """Returns a function from an evaluation to f(pi of the clients that have trained).

    `f` maps [clients, E] to a number. The result is None if no client has trained.
    """

    def value(observed: Observed) -> Value | None:
        pi = np.asarray(observed.now.get("pi", ()), np.float64)
        trained = pi[np.any(pi > 0, -1)] if pi.ndim == 2 else pi
        return float(f(trained)) if len(trained) else None

    return value


def _routes(pi: np.ndarray) -> int:
    """Returns the number of different sets of gates with pi > ½, from pi [clients, E]."""
    return len(np.unique(pi > 0.5, axis=0))


def _gate_bits(pi: np.ndarray) -> float:
    """Returns the mean entropy in bits of gates that open with probability pi."""
    return float(np.mean(entropy_bits(np.stack([pi, 1 - pi], -1))))


def diagnostics(advice: str = "") -> dict[str, Diagnostic]:
    """Returns the diagnostics of FedMN by name.

    `advice` is text at the end of the warning that all clients have the same route.
    """
    return {
        "routes": Diagnostic(
            meaning="number of different routes of clients that have trained; a route is the set "
            "of gates with π > ½",
            value=_of_trained_clients(_routes),
        ),
        "gate_bits": Diagnostic(
            meaning="mean entropy of a gate in bits; at 1 it opens at random",
            value=_of_trained_clients(_gate_bits),
        ),
        "deviation": Diagnostic(
            meaning="standard deviation of π over clients, mean over gates",
            value=_of_trained_clients(lambda pi: pi.std(0).mean()),
            inactive=below(_ONE_ROUTE),
            warning=f"all clients have the same route: π deviates by {{value:.4f}}{advice}",
        ),
    }


PICTURES = {
    "pi": Picture("Gates, π", "each client's probability of a block", "block"),
    "gates": Picture("Open gates", "blocks of each client's model", "block"),
}
