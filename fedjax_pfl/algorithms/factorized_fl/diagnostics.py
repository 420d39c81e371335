"""Diagnostics and figure captions of Factorized-FL's mixing weights omega [N, N]."""

import numpy as np

from fedjax_pfl.core.diagnostics import (
    Diagnostic,
    Observed,
    Picture,
    Value,
    count_mixed,
    effective_number,
    mean,
    of_array,
    own_weight_fraction,
)

_PLAIN_MEAN = 0.99  # omega is the plain mean if it mixes more than this share of all models


def _is_plain_mean(value: Value, observed: Observed) -> bool:
    """Returns True if clients mix nearly all models; `value` is their effective number."""
    mixed = count_mixed(observed.now["weights"])
    return mixed > 1 and mean(value) > _PLAIN_MEAN * mixed


def diagnostics(method: str) -> dict[str, Diagnostic]:
    """Returns the diagnostics of Factorized-FL by name.

    `method` is the name of the method, whose settings the warnings name.
    """
    return {
        "peers": Diagnostic(
            meaning="effective number of models that a client mixes: the exponential of the "
            "entropy of ω",
            value=of_array("weights", lambda omega: effective_number(omega).mean()),
            inactive=_is_plain_mean,
            warning="every client is served the plain mean: ω mixes {value:.1f} models; see "
            f"{method}.scale and {method}.minimum",
        ),
        "candidates": Diagnostic(
            meaning="fraction of all models that a client mixes, its own included",
            value=of_array("weights", lambda omega: np.mean(np.asarray(omega) > 0)),
        ),
        "alone": Diagnostic(
            meaning="fraction of clients that are served their own last factors, ω above 0.99",
            value=of_array("weights", own_weight_fraction),
            inactive=lambda value, observed: mean(value) == 1.0,
            warning="every client trains alone: its own ω is above 0.99 in {value:.0%} of rows; "
            f"see {method}.scale and {method}.tau",
        ),
    }


PICTURES = {
    "u": Picture("Similarity of u", "cosines between clients' factors u of one layer", "client"),
    "v": Picture("Similarity of v", "cosines between clients' factors v of one layer", "client"),
    "moved": Picture(
        "Similarity of changes of v",
        "cosines between the clients' total changes of v of one layer by training",
        "client",
    ),
    "weights": Picture(
        "Weights of the mixture", "weight of each client's factors in the model of a client", "from"
    ),
    "zeros_in_mu": Picture("Zeros in μ", "fraction of each client's μ that is pruned"),
}
