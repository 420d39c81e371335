"""Diagnostics and figure captions of pFedLA's weights alpha [N, layers, N]."""

from collections.abc import Callable
from typing import Any

from fedjax_pfl.core.diagnostics import (
    Diagnostic,
    Observed,
    Picture,
    Value,
    count_mixed,
    effective_number,
    mean,
    moving_fraction,
    one_hot_fraction,
)

_UNIFORM = 0.999  # alpha is uniform if it mixes more than this share of all models


def _models_mixed(observed: Observed) -> Value | None:
    """Returns {layer name: effective number of models mixed, mean over clients}.

    None if no alpha was recorded.
    """
    if "alpha" not in observed.now:
        return None
    counts = effective_number(observed.now["alpha"]).mean(0)
    return dict(zip(observed.layer_names(len(counts)), map(float, counts), strict=True))


def _is_uniform(value: Value, observed: Observed) -> bool:
    """Returns True if every layer mixes nearly all models; `value` is from `_models_mixed`."""
    assert isinstance(value, dict)
    mixed = count_mixed(observed.now["alpha"])
    return mixed > 1 and min(value.values()) > _UNIFORM * mixed


def _explain(value: Value) -> str:
    """Describes the result of `_models_mixed` by layer, and the most and least shared layers."""
    assert isinstance(value, dict)
    counts = ", ".join(f"{name} {count:.1f}" for name, count in value.items())
    most, least = max(value, key=value.__getitem__), min(value, key=value.__getitem__)
    text = f"Effective number of models mixed into each layer: {counts}."
    if value[most] - value[least] > 0.5:
        text += f" Clients share {most} most, and keep {least} most to themselves."
    return text


def _of_alpha(
    fraction: Callable[..., float], *, with_previous: bool = False
) -> Callable[[Observed], Any]:
    """Returns a function from an evaluation to fraction(alpha), or None if it recorded no alpha.

    Alpha is [N, L, N]. `with_previous` makes it fraction(alpha, alpha of the previous evaluation).
    """

    def value(observed: Observed) -> float | None:
        if "alpha" not in observed.now or (with_previous and "alpha" not in observed.before):
            return None
        previous = [observed.before["alpha"]] if with_previous else []
        return fraction(observed.now["alpha"], *previous)

    return value


DIAGNOSTICS = {
    "peers": Diagnostic(
        meaning="effective number of models mixed into a layer: exponential of the entropy of α",
        value=_models_mixed,
        inactive=_is_uniform,
        warning="every client is served the unweighted mean of all models: α mixes {value:.1f} of "
        "them in every layer; see pfedla.rate",
        explanation=_explain,
    ),
    "one_hot": Diagnostic(
        meaning="fraction of the rows of α that are one-hot",
        value=_of_alpha(one_hot_fraction),
        inactive=lambda value, observed: mean(value) == 1.0,
        warning="every client is served the last model of one client, usually its own: α is "
        "one-hot in {value:.0%} of its rows; see pfedla.rate",
    ),
    "moving": Diagnostic(
        meaning="fraction of clients whose α has changed since the previous evaluation",
        value=_of_alpha(moving_fraction, with_previous=True),
    ),
}
PICTURES = {
    "alpha": Picture(
        "Weights of layers, α", "weight of each client's layer in the model of a client", "from"
    ),
    "candidates": Picture("Candidates", "client id behind each column of α", "column"),
}
