"""What is known of a setting that every run has."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting of every run, and all that is known of it."""

    default: Any  # or its type, where it is unset
    meaning: str
    _: dataclasses.KW_ONLY
    low: float | None = None  # the least that it can be
    high: float | None = None
    above: float | None = None  # what it must be above
    below: float | None = None
    choices: tuple[str, ...] = ()
    per_phase: bool = False  # a phase can change it; the others hold for all of a run
    resumable: bool = False  # it may differ when a run goes on: it changes no result
    per_process: bool = False  # it may differ between the processes of one run
    sweepable: bool = False  # points of one program can differ in it
    zero_is_special: bool = False  # but 0 leaves it out of the program, and other numbers do not
    tunable: bool = False  # it can be in a grid: the others are the problem, or the budget
    budget: bool = False  # how much a run may cost, which is the same for all that are tuned
    sets_participation: bool = False  # it says how often clients train in a run
    defines_data: bool = False  # it says which examples a client has
    used_with: tuple[str, tuple[str, ...]] | None = None  # another and its values, or always

    @property
    def default_value(self) -> Any:
        """Its default, None where it is unset."""
        return None if isinstance(self.default, type) else self.default

    def violation(self, value: Any) -> str:
        """What a value must be and is not, in words; nothing where it can be."""
        if value is None:
            return ""
        if self.low is not None and value < self.low:
            return f"at least {self.low}"
        if self.high is not None and value > self.high:
            return f"at most {self.high}"
        if self.above is not None and value <= self.above:
            return f"above {self.above}"
        if self.below is not None and value >= self.below:
            return f"below {self.below}"
        return ""

    def is_used(self, value_of: Callable[[str], Any]) -> bool:
        """Whether anything reads it beside these values of other settings."""
        if self.used_with is None:
            return True
        name, values = self.used_with
        return value_of(name) in values
