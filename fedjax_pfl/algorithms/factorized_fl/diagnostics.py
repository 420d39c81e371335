"""Diagnostics and figure captions of Factorized-FL's mixing weights omega [N, N]."""

import numpy as np

from fedjax_pfl.core.diagnostics import (
    Diagnostic,
    Picture,
    effective_number,
    mean,
    of_array,
    own_weight_fraction,
)

_PLAIN_MEAN = 0.99  # omega is the plain mean if it mixes more than this share of all models


def diagnostics(method: str) -> dict[str, Diagnostic]:
    """Returns the diagnostics of a form of Factorized-FL, whose settings the warnings name."""
    return {
        "peers": Diagnostic(
            meaning="models mixed into what a client is served, in effect: the exponential of ω's "
            "entropy",
            value=of_array("weights", lambda omega: effective_number(omega).mean()),
            inactive=lambda value, observed: (
                mean(value) > _PLAIN_MEAN * observed.now["weights"].shape[-1]
            ),
            warning="every client is served the plain mean: ω mixes {value:.1f} models; see "
            f"{method}.scale and {method}.minimum",
        ),
        "candidates": Diagnostic(
            meaning="the share of all models that a client mixes in, its own included",
            value=of_array("weights", lambda omega: np.mean(np.asarray(omega) > 0)),
        ),
        "alone": Diagnostic(
            meaning="the share of clients that are served their own last factors, with ω over .99",
            value=of_array("weights", own_weight_fraction),
            inactive=lambda value, observed: mean(value) == 1.0,
            warning="every client trains alone: its own ω is over .99 in {value:.0%} of rows; see "
            f"{method}.scale and {method}.tau",
        ),
    }


PICTURES = {
    "u": Picture("Similarity of u", "cosines between clients' factors u of one layer", "client"),
    "v": Picture("Similarity of v", "cosines between clients' factors v of one layer", "client"),
    "moved": Picture(
        "Similarity of what has moved v",
        "cosines between what training at the clients has moved v of one layer by",
        "client",
    ),
    "weights": Picture("Weights of the mixture", "how much of whom a client is served", "from"),
    "zeros_in_mu": Picture("Zeros in μ", "the share of each client's μ that is pruned"),
}
