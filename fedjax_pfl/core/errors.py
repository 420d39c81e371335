"""The one kind of error that is the user's to mend."""

from collections.abc import Sequence
from typing import Any

import jax


class UsageError(ValueError):
    """One line: what is wrong and what would be right. Commands print it and exit with status 2."""


def removed_directory(directory: Any) -> UsageError:
    """Of a run's directory that is not where it was."""
    return UsageError(
        f"{directory} was removed or moved during its run; put it back and give the same "
        "command or call again, or choose another workdir to start anew"
    )


MAX_LAYERS = 1000  # of one kind, which Python goes through one by one


def require(condition: Any, line: str) -> None:
    """Raise UsageError with this line where the condition is false.

    A traced condition has no value yet: a method's numbers are traced in the program of a sweep,
    and were checked before, when each point's method was made with its own.
    """
    if not isinstance(condition, jax.core.Tracer) and not condition:
        raise UsageError(line)


def require_at_least(name: str, value: Any, bound: float) -> None:
    """Raise UsageError where a setting is below its bound; None is unset, and passes."""
    require(value is None or value >= bound, f"{name} is {value}; it must be at least {bound}")


def require_above(name: str, value: Any, bound: float) -> None:
    """Raise UsageError where a setting is not above its bound; None is unset, and passes."""
    require(value is None or value > bound, f"{name} is {value}; it must be above {bound}")


def require_one_of(name: str, value: Any, words: Sequence[str]) -> None:
    """Raise UsageError where a setting is none of these words."""
    *first, last = words
    require(value in words, f"{name} is {value!r}; choose {', '.join(first)} or {last}")
