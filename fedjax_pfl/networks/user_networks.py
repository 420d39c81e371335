"""Factories of user-defined networks, with the interface of the built-in ones.

A network is a linen module or its class, the class of an NNX module, or a function that creates
either. Its settings are the arguments or fields whose default is a bool, a number, a string or a
tuple of these. It is called with `outputs` and, to create an NNX module, with `rngs`, if it accepts
them.
"""

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax

from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.errors import UsageError, first_line
from fedjax_pfl.networks.user_defined import (
    LinenNetwork,
    UserNetwork,
    check_fits,
    check_output_shape,
)

_PASSED = ("parent", "name", "outputs", "rngs", "self")  # arguments that are no settings


def is_plain(value: Any) -> bool:
    """Returns True for a bool, number or string, or a tuple of these, which JSON can hold."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return isinstance(value, bool | int | float | str)


def as_float(default: Any, hint: Any) -> Any:
    """Returns a default with floats in place of integers if the type hint asks for floats."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if is_union else (hint,)
    if type(default) is int and float in kinds and int not in kinds:
        return float(default)
    is_floats = isinstance(default, tuple) and tuple[float, ...] in kinds
    return tuple(map(float, default)) if is_floats else default


def object_name(component: Any) -> str:
    """Returns the name of a class or function, or of the class of another object."""
    return str(getattr(component, "__name__", "") or type(component).__name__)


def from_flax(network: Any, federation: Federation) -> UserNetwork:
    """Returns a network of your own in the form of the built-in ones.

    The methods' factories call it for a network that is none of the library's. Call it yourself to
    get a network with `apply(variables, x)` for an NNX module.

    Args:
      network: A linen module, the class of an NNX module, or a function that creates a module.
      federation: Clients whose examples the network is checked with.

    Raises:
      UsageError: If the network cannot be trained on such examples.
    """
    name, shape = object_name(network), federation.input_shape
    try:
        created = user_network(name, network, digest="")(outputs=federation.outputs)
    except UsageError:
        raise
    except Exception as error:  # a constructor may raise anything
        raise UsageError(f"{name} cannot be created: {first_line(error)}") from error
    adapted = dataclasses.replace(created, input_shape=shape, input_dtype=federation.input_dtype)
    examples = jax.eval_shape(lambda: federation.examples(2))
    check_output_shape(name, check_fits(name, adapted, examples), federation.output_shape)
    return adapted


def user_network(name: str, network: Any, digest: str) -> Callable[..., UserNetwork]:
    """Returns a factory (*, outputs, **settings) -> UserNetwork.

    `network` is a linen module or class, an NNX class, or a function that creates one. The settings
    are its arguments; those with a default of a plain type are in the factory's signature. The
    network records the `digest` of its code as a setting. Raises UsageError for a network with
    parameters, and for one of PyTorch.
    """
    if is_nnx(network):
        raise UsageError(
            f"model={name} is an NNX module that has parameters already; pass its class, or a "
            "function of rngs that creates it"
        )
    if _is_torch(network):
        raise UsageError(
            f"model={name} is a PyTorch module, and clients train in JAX; give a Flax module, such "
            "as fedjax_pfl.networks.MLP(outputs=10)"
        )
    if not (isinstance(network, nn.Module) or callable(network)):
        raise UsageError(
            "model= must be a linen module, an NNX class or a function that creates one, got "
            f"{network!r}; select a built-in network in the settings: {{'model': 'mlp'}}"
        )
    accepted, defaults = _signature(name, network)

    def factory(*, outputs: int, **settings: Any) -> UserNetwork:
        """Returns the network with other values of its arguments; `outputs` only if it takes it."""
        facts = {**settings, "digest": digest}
        arguments = settings | ({"outputs": outputs} if "outputs" in accepted else {})
        if isinstance(network, nn.Module):
            return LinenNetwork(name, facts, network.clone(**settings))
        if "rngs" in accepted or is_nnx_class(network):
            from flax import nnx

            from fedjax_pfl.networks.user_defined_nnx import NnxNetwork

            def create(rngs: Any) -> Any:
                created = network(**arguments, **({"rngs": rngs} if "rngs" in accepted else {}))
                return _check_module(name, created, nnx.Module)

            return NnxNetwork(name, facts, create)
        return LinenNetwork(name, facts, _check_module(name, network(**arguments), nn.Module))

    factory.__annotations__ = {key: type(value) for key, value in defaults.items()}
    factory.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter("outputs", inspect.Parameter.KEYWORD_ONLY),
            *(
                inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=value)
                for key, value in defaults.items()
            ),
        ]
    )
    return factory


def _is_torch(network: Any) -> bool:
    """Returns True for a PyTorch module or its class, without importing PyTorch."""
    classes = (network if isinstance(network, type) else type(network)).__mro__
    return any(base.__module__.partition(".")[0] == "torch" for base in classes)


def is_nnx(value: Any) -> bool:
    """Returns True for an NNX module, without importing NNX, which is slow."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Module)


def is_nnx_class(value: Any) -> bool:
    """Returns True for the class of an NNX module, without importing NNX."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and inspect.isclass(value) and issubclass(value, nnx.Module)


def _check_module(name: str, module: Any, kind: type) -> Any:
    """Returns `module`; raises UsageError, with the network's `name`, if it is of another kind."""
    if isinstance(module, kind):
        return module
    if is_nnx(module):
        raise UsageError(f"{name} returns an NNX module; give it an argument rngs, an nnx.Rngs")
    raise UsageError(f"{name} must return a linen or NNX module, got {type(module).__name__}")


def _signature(name: str, network: Any) -> tuple[set[str], Mapping[str, Any]]:
    """Returns the names of the arguments of a network, and the defaults of its settings by name.

    Arguments of a linen module are its fields. Settings are those whose default is a bool, number,
    string or tuple of these and that the library does not pass itself. Raises UsageError, with the
    network's `name`, for another argument without a default.
    """
    defaults: dict[str, Any] = {}
    empty = inspect.Parameter.empty
    if isinstance(network, nn.Module):
        defaults = {f.name: getattr(network, f.name) for f in dataclasses.fields(network)}
    elif inspect.isclass(network) and issubclass(network, nn.Module):
        for field in dataclasses.fields(network):
            computed = field.default_factory is not dataclasses.MISSING
            missing = field.default is dataclasses.MISSING
            defaults[field.name] = ... if computed else empty if missing else field.default
    else:
        # The signature of an NNX class belongs to its metaclass.
        function = network.__init__ if inspect.isclass(network) else network
        defaults = {
            p.name: p.default
            for p in inspect.signature(function).parameters.values()
            if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        }
    for key, value in defaults.items():
        if value is empty and key not in _PASSED:
            raise UsageError(
                f"{name} needs {key}; give it a default, or pass a function that creates the module"
            )
    hints = _type_hints(network)
    settings = {
        key: as_float(value, hints.get(key))
        for key, value in defaults.items()
        if key not in _PASSED and is_plain(value)
    }
    return set(defaults), settings


def _type_hints(network: Any) -> dict[str, Any]:
    """Returns the types of a network's arguments by name; none if they cannot be read."""
    owner = type(network) if isinstance(network, nn.Module) else network
    is_other_class = inspect.isclass(owner) and not issubclass(owner, nn.Module)
    try:
        return typing.get_type_hints(owner.__init__ if is_other_class else owner)
    except (NameError, TypeError):  # types imported for type checkers only, or a partial function
        return {}
