"""Checks of the arguments of a method's factory: model, local training, clients and settings."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn

from fedjax_pfl.core.algorithm import Algorithm, Federation
from fedjax_pfl.core.arguments import check_arguments
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.local_training import Training

_GUIDE = "docs/your_model.md shows how to write one"


def checked_factory(factory: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
    """Returns a factory with the same signature that raises UsageError for wrong arguments."""

    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def create(*arguments: Any, **keywords: Any) -> Algorithm:
        name, values = factory.__name__, signature.bind(*arguments, **keywords).arguments
        model, training, federation = list(values.values())[:3]
        for network in model if isinstance(model, tuple) else (model,):
            _check_model(name, network)
        if not isinstance(training, Training):
            raise UsageError(
                f"{name} takes a Training as its second argument, got {type(training).__name__}; "
                "make one with local_sgd(learning_rate=0.05), or local_training(OPTIMIZER)"
            )
        if not isinstance(federation, Federation):
            raise UsageError(
                f"{name} takes a Federation as its third argument, got "
                f"{type(federation).__name__}; give data.federation, with data = partition(...)"
            )
        return factory(*arguments, **keywords)

    return check_arguments(create)


def _check_model(name: str, model: Any) -> None:
    """Raises UsageError if `model` is no network. `name` is the method's, for the message."""
    if isinstance(model, type):
        raise UsageError(f"{name} takes a network, got the class {model.__name__}; call it first")
    kind = type(model)
    if not (hasattr(model, "apply") and hasattr(model, "init")):
        raise UsageError(
            f"{name} takes a Flax linen module as its model, got {kind.__module__}."
            f"{kind.__qualname__}; {_GUIDE}"
        )
    accepted = inspect.signature(kind.__call__).parameters
    missing = [argument for argument in ("train", "mask") if argument not in accepted]
    if isinstance(model, nn.Module) and missing:
        raise UsageError(
            f"{name} calls its model as (x, train=False, mask=None), and {kind.__name__} does not "
            f"take {' and '.join(missing)}; {_GUIDE}"
        )
