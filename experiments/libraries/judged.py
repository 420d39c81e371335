"""How far two implementations are apart, round by round."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments.libraries.methods import Theirs

# Below this share of what training has moved, two are the same: float32 in another order of sums.
SAME = 1e-4


class Gap(NamedTuple):
    """‖ours − theirs‖ in parts of how far theirs has moved since the start; None: nothing has."""

    server: float | None
    clients: float | None

    @property
    def worst(self) -> float:
        """The larger of both."""
        return max((one for one in self if one is not None), default=float("inf"))


def gap(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], t: int) -> Gap:
    """After t rounds, over the parameters that both have."""

    def part(is_server: bool) -> float | None:
        apart = moved = 0.0
        for name, value in theirs.items():
            at, where, leaf = name.split("/")
            if at == str(t) and (where == "server") == is_server and name in ours:
                apart += float(np.sum(np.square(np.float64(ours[name]) - value)))
                moved += float(np.sum(np.square(np.float64(value) - theirs[f"0/{where}/{leaf}"])))
        return float(np.sqrt(apart / moved)) if moved else None

    return Gap(part(True), part(False))


def verdict(first: Gap, last: Gap, theirs: Theirs) -> dict[str, Any]:
    """What is written down of a method in a library."""
    same = max(first.worst, last.worst) < SAME
    said = "same" if same else "differs"
    shown = {"after 1": first._asdict(), "after all": last._asdict(), "verdict": said}
    return shown if same else {**shown, "why": theirs.why}
