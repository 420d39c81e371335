"""Checks of the arguments of a method's factory: model, local training, clients and settings."""

import functools
import inspect
from collections.abc import Callable
from numbers import Integral
from typing import Any

import flax.linen as nn
import jax

from fedjax_pfl.core.algorithm import Algorithm, Federation
from fedjax_pfl.core.arguments import check_arguments
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.local_training import Training
from fedjax_pfl.networks.user_defined import check_fits
from fedjax_pfl.networks.user_networks import from_flax, is_nnx, is_nnx_class

# Networks are traced once: a run or a test creates many methods with the same one.
_check_fits_once = functools.lru_cache(maxsize=256)(check_fits)


def checked_factory(factory: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
    """Returns a factory with the same signature that raises UsageError for wrong arguments.

    It also gives a user's network the form of the built-in ones.
    """

    signature = inspect.signature(factory)
    integers = {n for n, p in signature.parameters.items() if p.annotation in (int, int | None)}

    @functools.wraps(factory)
    def create(*arguments: Any, **keywords: Any) -> Algorithm:
        name, bound = factory.__name__, signature.bind(*arguments, **keywords)
        (argument, model), (_, training), (_, federation) = list(bound.arguments.items())[:3]
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
        if isinstance(model, tuple):
            _check_groups(name, len(model), argument, federation)
            bound.arguments[argument] = tuple(_network(name, net, federation) for net in model)
        else:
            bound.arguments[argument] = _network(name, model, federation)
        for setting in integers & bound.arguments.keys():
            value = bound.arguments[setting]
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise UsageError(f"{name}.{setting} is {value!r}; it must be an integer")
        return factory(*bound.args, **bound.kwargs)

    return check_arguments(create)


def _check_groups(name: str, networks: int, argument: str, federation: Federation) -> None:
    """Raises UsageError unless a method takes several networks and each group of clients has one.

    `argument` is the name of its parameter for networks.
    """
    if argument != "models":
        raise UsageError(
            f"{name} takes one network, got a tuple of {networks}; give one, or set groups in "
            "run(...) to train each group separately"
        )
    groups = int(federation.groups.max()) + 1
    if networks != groups:
        raise UsageError(
            f"{name} takes a network for each group of clients, got {networks} for {groups} "
            f"{'group' if groups == 1 else 'groups'}; give as many, or set groups in partition(...)"
        )


def _network(name: str, model: Any, federation: Federation) -> Any:
    """Returns the model, in the form of the built-in networks if it is a user's.

    `name` is the method's, for messages. Raises UsageError if it is no network.
    """
    kind = type(model)
    if isinstance(model, nn.Module):
        accepted = inspect.signature(kind.__call__).parameters
        has_names = {"layers", "head"} <= {*dir(kind), *vars(model)}  # a wrong field may raise
        if not ({"train", "mask"} <= set(accepted) and has_names):
            return from_flax(model, federation)
        examples = jax.eval_shape(lambda: federation.examples(2))
        try:
            _check_fits_once(kind.__name__, model, examples)
        except TypeError:  # a field of the network has no hash
            check_fits(kind.__name__, model, examples)
        return model
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise UsageError(f"{name} takes a network, got the class {model.__name__}; call it first")
    if is_nnx(model) or inspect.isfunction(model) or is_nnx_class(model):
        return from_flax(model, federation)
    if hasattr(model, "apply") and hasattr(model, "init"):
        return model  # an adapted network
    raise UsageError(
        f"{name} takes a Flax module as its model, got {kind.__module__}.{kind.__qualname__}; "
        "docs/your_model.md shows how to write one"
    )
