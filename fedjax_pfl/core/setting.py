"""Description of a setting that every run has."""

import dataclasses
from collections.abc import Callable, Set
from typing import Any, Literal, NamedTuple

Role = Literal[
    "basic",  # one of the ten settings that are listed first
    "per_phase",  # may differ between the phases of a run
    "resumable",  # may change when a run is resumed, as it changes no result
    "per_process",  # may differ between the processes of one run
    "sweepable",  # may differ between the runs of a sweep in one program
    "zero_is_special",  # 0 needs another program than other values, see "sweepable"
    "tunable",  # may be in a tuning grid
    "budget",  # cost of a run, the same for all methods that are tuned
    "sets_participation",  # decides how often clients train
    "defines_data",  # decides which examples a client has
    "simulation_only",  # a transform's setting without a meaning in a run on several machines
]


class Limits(NamedTuple):
    """Smallest and largest values of a setting. None: no such bound."""

    low: float | None = None  # inclusive lower bound
    high: float | None = None  # inclusive upper bound
    above: float | None = None  # exclusive lower bound
    below: float | None = None  # exclusive upper bound

    def violation(self, value: Any) -> str:
        """Returns the bound that a value violates, such as "at least 1"; "" if none or no value."""
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


_UNLIMITED = Limits()


class UsedWith(NamedTuple):
    """Condition under which a setting has an effect: another setting has one of some values."""

    name: str  # of the other setting
    values: tuple[str | None, ...]  # of the other setting; None: unset
    or_true: str = ""  # name of a setting that is sufficient if it is True


@dataclasses.dataclass(frozen=True)
class Setting:
    """Default and meaning of a setting, its valid values, and what the library does with it."""

    default: Any  # or the type, if the setting is unset by default
    meaning: str  # description for lists of settings
    _: dataclasses.KW_ONLY
    limits: Limits = _UNLIMITED  # smallest and largest valid value
    choices: tuple[str, ...] = ()  # the only valid values; (): any value within the limits
    roles: Set[Role] = frozenset()  # where it may vary and what it affects; see `Role`
    used_with: UsedWith | None = None  # None: always used

    @property
    def default_value(self) -> Any:
        """Returns the default, or None if the setting is unset by default."""
        return None if isinstance(self.default, type) else self.default

    def is_used(self, value_of: Callable[[str], Any]) -> bool:
        """Returns True if the setting has an effect. `value_of`: name of a setting -> its value."""
        if self.used_with is None:
            return True
        name, values, or_true = self.used_with
        return value_of(name) in values or bool(or_true and value_of(or_true))
