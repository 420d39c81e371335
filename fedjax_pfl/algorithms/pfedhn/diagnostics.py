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
    """Returns ‖v − v₀‖ / ‖v₀‖ over all embeddings [N, e], with v₀ of the first evaluation.

    Returns None if the embeddings are class shares, which do not move.
    """
    if "embeddings" not in observed.first:
        return None
    first = np.asarray(observed.first["embeddings"], np.float64)
    moved = np.linalg.norm(observed.now["embeddings"] - first)
    return float(moved / np.linalg.norm(first))


def diagnostics(method: str) -> dict[str, Diagnostic]:
    """Returns the diagnostics of pFedHN by name.

    `method` is the name, pfedhn or pfedhn_pc, of the method whose settings the warnings name.
    """
    return {
        "spread": Diagnostic(
            meaning="distance of generated models from their mean, relative to its norm; mean over "
            "clients",
            value=of_array("spread", np.mean),
            inactive=below(_ONE_MODEL),
            warning="the hypernetwork generates the same model for all clients: their spread is "
            f"{{value:.4f}} of their length; see {method}.rate and {method}.weight_decay",
        ),
        "moved": Diagnostic(
            meaning="change of the embeddings since the first evaluation, relative to their norm "
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
        "distance of each client's generated model from their mean, relative to its norm; at 0 "
        "the hypernetwork is dead",
    ),
    "embeddings": Picture(
        "Embeddings", "clients by the first two principal components of v", is_scatter=True
    ),
    "class_shares": Picture(
        "Class shares",
        "clients by the first two principal components of their class shares, which are v",
        is_scatter=True,
    ),
}
