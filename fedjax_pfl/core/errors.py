"""The one kind of error that is the user's to mend."""

from typing import Any

import jax


class UsageError(ValueError):
    """One line: what is wrong and what would be right. Commands print it and exit with status 2."""


def need(condition: Any, line: str) -> None:
    """Raise UsageError with this line where the condition is false.

    A traced condition has no value yet: a method's numbers are traced in the program of a sweep,
    and were checked before, when each point's method was made with its own.
    """
    if not isinstance(condition, jax.core.Tracer) and not condition:
        raise UsageError(line)
