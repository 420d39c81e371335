"""Description of a setting that every run has."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Setting:
    """Default, meaning, limits and properties of a setting."""

    default: Any  # or the type, if the setting is unset by default
    meaning: str
    _: dataclasses.KW_ONLY
    low: float | None = None  # least value
    high: float | None = None  # largest value
    above: float | None = None  # exclusive lower bound
    below: float | None = None  # exclusive upper bound
    choices: tuple[str, ...] = ()
    basic: bool = False  # one of the ten settings that are listed first
    per_phase: bool = False  # may differ between the phases of a run
    resumable: bool = False  # may change when a run is resumed, as it changes no result
    per_process: bool = False  # may differ between the processes of one run
    sweepable: bool = False  # may differ between the runs of a sweep in one program
    zero_is_special: bool = False  # 0 needs another program than other values, see `sweepable`
    tunable: bool = False  # may be in a tuning grid
    budget: bool = False  # cost of a run, the same for all methods that are tuned
    sets_participation: bool = False  # decides how often clients train
    defines_data: bool = False  # decides which examples a client has
    # (setting, values): used only if that setting has one of these values. None: always used.
    used_with: tuple[str, tuple[str, ...]] | None = None

    @property
    def default_value(self) -> Any:
        """Returns the default, or None if the setting is unset by default."""
        return None if isinstance(self.default, type) else self.default

    def violation(self, value: Any) -> str:
        """Returns the bound that a value violates, such as "at least 1", or ""."""
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
        """Returns True if the setting has an effect, given the values of other settings."""
        if self.used_with is None:
            return True
        name, values = self.used_with
        return value_of(name) in values
