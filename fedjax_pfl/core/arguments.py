"""Errors for wrong arguments of public functions: one line, before anything is compiled."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fedjax_pfl.core.errors import UsageError, nearest

Function = TypeVar("Function", bound=Callable[..., Any])

# Names in papers and other libraries that are not similar to the name here.
_ALIASES = {"lr": "learning_rate", "eta": "learning_rate", "wd": "weight_decay", "bs": "batch_size"}


def unknown_argument(owner: str, name: str, allowed: Iterable[str]) -> UsageError:
    """Returns, without raising, the error for a keyword that does not exist.

    `owner` is the name of the function, or a phrase such as "partition classes". The message names
    the nearest of the `allowed` keywords and lists them.
    """
    names = list(allowed)
    alias = _ALIASES.get(name)
    match = alias if alias in names else nearest(name, names)
    hint = f"did you mean {match!r}? " if match else ""
    return UsageError(
        f"{owner} has no argument {name!r}; {hint}it takes {', '.join(names) or 'none'}"
    )


def check_arguments(function: Function) -> Function:
    """Makes a function raise UsageError instead of TypeError for arguments that it does not take.

    Signature and docstring stay the same. The message names the nearest keyword.
    """
    signature = inspect.signature(function)
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        try:
            signature.bind(*arguments, **keywords)
        except TypeError as error:
            raise _argument_error(owner, signature, arguments, keywords, error) from None
        return function(*arguments, **keywords)

    return checked  # type: ignore[return-value]


def _argument_error(
    owner: str,
    signature: inspect.Signature,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    error: TypeError,
) -> UsageError:
    """Returns the error for a call of `owner` that does not fit its signature.

    `error` is what `Signature.bind` raised.
    """
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = [p.name for p in parameters if p.name != "self"]
    unknown = [name for name in keywords if name not in names]
    if unknown and len(parameters) == len(signature.parameters):
        return unknown_argument(owner, unknown[0], names)
    given_names = {p.name for p in parameters[: len(arguments)]} | set(keywords)
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in given_names]
    if not missing:
        return UsageError(f"{owner}: {error}; it takes {', '.join(names)}")
    similar = next((name for name in unknown if nearest(name, missing)), None)
    hint = f", got {similar!r}; did you mean {nearest(similar, missing)!r}?" if similar else ""
    return UsageError(f"{owner} needs {', '.join(missing)}{hint}")
