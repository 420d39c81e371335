"""A network that a caller brings, as a factory like those of the library's own.

It is a linen module, or the class of one; the class of an NNX module; or a function that makes one.
Whatever it takes with a default that is a number, a word, a truth or a tuple is its setting. It is
given `outputs` and, to make an NNX module, `rngs` where it takes them.
"""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks.user_defined import LinenNetwork, UserNetwork

_KINDS = (bool, int, float, str, tuple)
_NOT_OURS = ("parent", "name", "outputs", "rngs", "self")


def name_of(given: Any) -> str:
    """The name of a class or function, or of a module's class."""
    return str(getattr(given, "__name__", "") or type(given).__name__)


def own_network(name: str, given: Any, digest: str) -> Callable[..., UserNetwork]:
    """The factory: (*, outputs, digest, its settings) -> UserNetwork.

    digest: of its code, which is a setting, so that a configuration says which code it is.
    """
    if _is_nnx(given):
        raise UsageError(
            f"model= is given an NNX module, {name}, that has its parameters already; give its "
            "class, or a function of rngs that makes it"
        )
    if _is_torch(given):
        raise UsageError(
            f"model={name} is a PyTorch module, and clients train in JAX; give a Flax module, such "
            "as fedjax_pfl.networks.MLP(outputs=10)"
        )
    if not (isinstance(given, nn.Module) or callable(given)):
        raise UsageError(
            f"model= brings a linen module, an NNX module's class or a function that makes one, "
            f"not {given!r}; ours go by their names in the settings, as {{'model': 'mlp'}}"
        )
    taken, usual = _taken(name, given)

    def network(*, outputs: int, **settings: Any) -> UserNetwork:
        said = settings.pop("digest", digest)
        if said != digest:
            raise UsageError(
                f"{name}.digest is {said}, and that of the network given is {digest}: its code is "
                "another"
            )
        facts = {**settings, "digest": digest}
        own = settings | ({"outputs": outputs} if "outputs" in taken else {})
        if isinstance(given, nn.Module):
            return LinenNetwork(name, facts, given.clone(**settings))
        if "rngs" in taken or _makes_nnx(given):
            return _nnx_network(name, facts, given, own, "rngs" in taken)
        return LinenNetwork(name, facts, _made(name, given(**own), nn.Module))

    kinds = {**{key: type(value) for key, value in usual.items()}, "digest": str}
    network.__annotations__ = kinds
    network.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=kind)
            for (key, value), kind in zip(
                {**usual, "digest": digest}.items(), kinds.values(), strict=True
            )
        ]
    )
    return network


def _is_torch(given: Any) -> bool:
    """Returns True for a PyTorch module or its class; PyTorch itself is not imported."""
    classes = (given if isinstance(given, type) else type(given)).__mro__
    return any(one.__module__.partition(".")[0] == "torch" for one in classes)


def _nnx_network(
    name: str, facts: Mapping[str, Any], given: Any, own: Mapping[str, Any], random: bool
) -> UserNetwork:
    from flax import nnx

    from fedjax_pfl.networks.user_defined_nnx import NnxNetwork

    def made(rngs: Any) -> Any:
        return _made(name, given(**own, **({"rngs": rngs} if random else {})), nnx.Module)

    return NnxNetwork(name, facts, made)


def _nnx_module() -> type | None:
    """NNX's Module where a caller has imported NNX, which takes long; without it nothing is one."""
    nnx = sys.modules.get("flax.nnx")
    return nnx.Module if nnx else None


def _is_nnx(thing: Any) -> bool:
    module = _nnx_module()
    return module is not None and isinstance(thing, module)


def _makes_nnx(given: Any) -> bool:
    module = _nnx_module()
    return module is not None and inspect.isclass(given) and issubclass(given, module)


def _made(name: str, made: Any, wanted: type) -> Any:
    if isinstance(made, wanted):
        return made
    if _is_nnx(made):
        raise UsageError(f"{name} makes an NNX module; let it take rngs, an nnx.Rngs, to do so")
    raise UsageError(f"{name} makes no linen or NNX module, but {type(made).__name__}")


def _taken(name: str, given: Any) -> tuple[set[str], Mapping[str, Any]]:
    """What it takes, and of that its settings with their defaults."""
    found: dict[str, Any] = {}  # with their defaults
    if isinstance(given, nn.Module):
        found = {f.name: getattr(given, f.name) for f in dataclasses.fields(given)}
    elif inspect.isclass(given) and issubclass(given, nn.Module):
        empty = inspect.Parameter.empty
        for field in dataclasses.fields(given):
            makes = field.default_factory is not dataclasses.MISSING
            missing = field.default is dataclasses.MISSING
            found[field.name] = ... if makes else empty if missing else field.default
    else:
        # That of an NNX class itself says nothing.
        takes = inspect.signature(given.__init__ if inspect.isclass(given) else given)
        found = {
            p.name: p.default
            for p in takes.parameters.values()
            if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        }
    for key, value in found.items():
        if value is inspect.Parameter.empty and key not in _NOT_OURS:
            raise UsageError(
                f"{name} needs {key}; give it a default, or bring a function that makes the module"
            )
    if "digest" in found:
        raise UsageError(f"{name} has a setting digest, which stands for its code; rename it")
    usual = {k: v for k, v in found.items() if k not in _NOT_OURS and isinstance(v, _KINDS)}
    return set(found), usual
