"""Diagnostics and figure captions of pFedHN's embeddings and generated models."""

import numpy as np

from fedjax_pfl.core.diagnostics import (
    MINIMAL_CHANGE,
    Diagnostic,
    Observed,
    Picture,
    Value,
    below,
    of_array,
)

_ONE_MODEL = 0.02  # generated models that differ less than this are one model


def _moved(observed: Observed) -> Value | None:
    """Returns ‖v − v₀‖ / ‖v₀‖ of the embeddings [N, e], with v₀ of the first evaluation."""
    if "embeddings" not in observed.first:
        return None
    first = np.asarray(observed.first["embeddings"], np.float64)
    moved = np.linalg.norm(observed.now["embeddings"] - first)
    return float(moved / np.linalg.norm(first))


def diagnostics(method: str) -> dict[str, Diagnostic]:
    """Returns the diagnostics of pFedHN or pFedHN-PC, whose settings the warnings name."""
    return {
        "spread": Diagnostic(
            meaning="how far generated models are from their mean, in lengths of it; the mean "
            "over clients",
            value=of_array("spread", np.mean),
            inactive=below(_ONE_MODEL),
            warning="the hypernetwork generates one model for all: what tells them apart is "
            f"{{value:.4f}} of their length; see {method}.rate and {method}.weight_decay",
        ),
        "moved": Diagnostic(
            meaning="how far embeddings have moved since the first evaluation, in lengths of them "
            "then",
            value=_moved,
            inactive=below(MINIMAL_CHANGE),
            warning="embeddings do not learn: they have moved by {value:.5f} of their length; see "
            f"{method}.rate",
        ),
    }


PICTURES = {
    "spread": Picture(
        "Spread of generated models",
        "how far each client's generated model is from their mean, in lengths of the mean; at 0 "
        "the hypernetwork is dead",
    ),
    "embeddings": Picture(
        "Embeddings", "clients by the first two principal components of v", is_scatter=True
    ),
}
