"""UsageError, for mistakes that the user can fix, and checks that raise it."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import jax

MAX_LAYERS = 1000  # most layers of one kind: the layers of a network are built in a Python loop


class UsageError(ValueError):
    """A mistake of the user, in one line: what is wrong, where, and what to do.

    Commands print the line and exit with status 2. Factories also raise it for settings out of
    range, and readers for files that do not have the described format.
    """


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or its type's name if there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(word: Any, names: Iterable[Any]) -> Any:
    """Returns the most similar of the names, ignoring case, or None if no name is similar."""
    by_lower = {str(name).lower(): name for name in names}
    matches = difflib.get_close_matches(str(word).lower(), by_lower, 1, 0.5)
    return by_lower[matches[0]] if matches else None


def removed_directory(directory: Any) -> UsageError:
    """Returns, without raising, the error for a run directory that was removed during the run."""
    return UsageError(
        f"{directory} was removed or moved during its run; put it back and repeat the command "
        "or call, or choose another workdir"
    )


def require(condition: Any, message: str) -> None:
    """Raises UsageError with this message if the condition is false.

    A traced condition passes. It occurs in the program of a sweep, whose settings were checked when
    each run's method was built with concrete numbers.
    """
    if not isinstance(condition, jax.core.Tracer) and not condition:
        raise UsageError(message)


def require_at_least(name: str, value: Any, bound: float) -> None:
    """Raises UsageError if the value of a setting is below its bound, or no number. None passes."""
    holds = _holds(name, value, lambda number: number >= bound)
    require(holds, f"{name} is {value}; it must be at least {bound}")


def require_above(name: str, value: Any, bound: float) -> None:
    """Raises UsageError unless the value of a setting is a number above its bound. None passes."""
    holds = _holds(name, value, lambda number: number > bound)
    require(holds, f"{name} is {value}; it must be above {bound}")


def _holds(name: str, value: Any, condition: Callable[[Any], Any]) -> Any:
    """Returns condition(value), True for None. Raises UsageError if the value is no number."""
    try:
        return value is None or condition(value)
    except TypeError:
        raise UsageError(f"{name} is {value!r}; it must be a number") from None


def require_count(name: str, value: Any) -> None:
    """Raises UsageError unless a value is an integer of at least 1. None passes."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    is_count = value is None or (is_integer and int(value) >= 1)
    require(is_count, f"{name} is {value!r}; it must be an integer, at least 1")


def require_one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises UsageError if the value of a setting is not among the choices, at least two."""
    *first, last = choices
    require(value in choices, f"{name} is {value!r}; choose {', '.join(first)} or {last}")
