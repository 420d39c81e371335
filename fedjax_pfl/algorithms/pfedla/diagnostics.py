"""Diagnostics and figure captions of pFedLA's weights alpha [N, layers, N]."""

from collections.abc import Callable
from typing import Any

from fedjax_pfl.core.diagnostics import (
    Diagnostic,
    Observed,
    Picture,
    Value,
    effective_number,
    mean,
    moving_fraction,
    one_hot_fraction,
)

_UNIFORM = 0.999  # alpha is uniform if it mixes more than this share of all models


def _models_mixed(observed: Observed) -> Value | None:
    if "alpha" not in observed.now:
        return None
    counts = effective_number(observed.now["alpha"]).mean(0)
    return dict(zip(observed.layer_names(len(counts)), map(float, counts), strict=True))


def _is_uniform(value: Value, observed: Observed) -> bool:
    assert isinstance(value, dict)
    return min(value.values()) > _UNIFORM * observed.now["alpha"].shape[-1]


def _explain(value: Value) -> str:
    """Returns which layers the clients share and which they keep."""
    assert isinstance(value, dict)
    counts = ", ".join(f"{name} {count:.1f}" for name, count in value.items())
    most, least = max(value, key=value.__getitem__), min(value, key=value.__getitem__)
    text = f"Models mixed into each layer that a client is served, in effect: {counts}."
    if value[most] - value[least] > 0.5:
        text += f" Clients share {most} most, and keep {least} most to themselves."
    return text


def _of_alpha(
    fraction: Callable[..., float], *, with_previous: bool = False
) -> Callable[[Observed], Any]:
    """Returns a number of alpha, or of alpha now and at the evaluation before."""

    def value(observed: Observed) -> float | None:
        if "alpha" not in observed.now or (with_previous and "alpha" not in observed.before):
            return None
        previous = [observed.before["alpha"]] if with_previous else []
        return fraction(observed.now["alpha"], *previous)

    return value


DIAGNOSTICS = {
    "peers": Diagnostic(
        meaning="models mixed into a layer, in effect: the exponential of α's entropy",
        value=_models_mixed,
        inactive=_is_uniform,
        warning="every client is served the plain mean of all models: α mixes {value:.1f} of "
        "them in every layer; see pfedla.rate",
        explanation=_explain,
    ),
    "one_hot": Diagnostic(
        meaning="the share of α's rows that are one-hot",
        value=_of_alpha(one_hot_fraction),
        inactive=lambda value, observed: mean(value) == 1.0,
        warning="every client is served one client's last model, as a rule its own: α is one-hot "
        "in {value:.0%} of its rows; see pfedla.rate",
    ),
    "moving": Diagnostic(
        meaning="the share of clients whose α has moved since the evaluation before",
        value=_of_alpha(moving_fraction, with_previous=True),
    ),
}
PICTURES = {
    "alpha": Picture(
        "Weights of layers, α", "how much of each client's layer a client is served", "from"
    ),
    "candidates": Picture(
        "Candidates", "whose model is in each of a client's places of α", "place"
    ),
}
