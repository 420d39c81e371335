"""Diagnostics and figure captions of FedFomo's sums of weights [N, N]."""

import numpy as np

from fedjax_pfl.core.diagnostics import Diagnostic, Observed, Picture, Value, mean

TUNING_NOTE = (
    "it weighs peers on validation examples while it trains, so its validation scores are too "
    "high, for all of its points equally"
)


def _positive_fraction(observed: Observed) -> Value | None:
    """Returns the fraction of positive ones among changes of the sums since the last evaluation.

    None if there was no change, or if no sums [N, N] were recorded.
    """
    if "affinity" not in observed.now:
        return None
    affinity = np.asarray(observed.now["affinity"], np.float64)
    change = affinity - observed.before.get("affinity", np.zeros_like(affinity))
    return float(np.mean(change[change != 0] > 0)) if np.any(change != 0) else None


DIAGNOSTICS = {
    "positive": Diagnostic(
        meaning="fraction of positive weights among those given to peers since the last evaluation",
        value=_positive_fraction,
        inactive=lambda value, observed: mean(value) == 0.0,
        warning="no client gains from a peer: {value:.0%} of the weights are positive; see "
        "fedfomo.reference",
    ),
}
PICTURES = {
    "affinity": Picture(
        "Affinity of clients", "sum of the weights that a client gave each peer's model", "peer"
    ),
}
