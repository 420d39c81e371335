"""Distance between two implementations of a method, round by round."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments.libraries.methods import Theirs

# Relative distances below this are rounding: float32 sums in another order.
SAME = 1e-4


class Gap(NamedTuple):
    """‖ours − theirs‖ relative to how far theirs moved since the start; None if it did not move."""

    server: float | None
    clients: float | None

    @property
    def worst(self) -> float:
        """Returns the larger of both."""
        return max((value for value in self if value is not None), default=float("inf"))


def gap(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], t: int) -> Gap:
    """Returns the gap after t rounds over the parameters that both libraries have."""

    def part(is_server: bool) -> float | None:
        distance = movement = 0.0
        for name, value in theirs.items():
            round_, owner, leaf = name.split("/")
            if round_ == str(t) and (owner == "server") == is_server and name in ours:
                distance += float(np.sum(np.square(np.float64(ours[name]) - value)))
                movement += float(
                    np.sum(np.square(np.float64(value) - theirs[f"0/{owner}/{leaf}"]))
                )
        return float(np.sqrt(distance / movement)) if movement else None

    return Gap(part(True), part(False))


def verdict(first: Gap, last: Gap, theirs: Theirs) -> dict[str, Any]:
    """Returns the verdict on a method of a library, as the results file holds it."""
    is_same = max(first.worst, last.worst) < SAME
    word = "same" if is_same else "differs"
    entry = {"after 1": first._asdict(), "after all": last._asdict(), "verdict": word}
    return entry if is_same else {**entry, "why": theirs.why}
