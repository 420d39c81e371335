"""Which point is chosen: by validation examples alone; and the preset that says so."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from fedjax_pfl.report.numbers import metric_of, number
from fedjax_pfl.report.run_reader import Run
from fedjax_pfl.runs.tuning.grids import Point, word
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.general import settings_with
from fedjax_pfl.simulation.metrics import mean_std


class Tried(NamedTuple):
    """A point of a method and its finished runs."""

    point: Point
    config: ConfigDict  # of its first seed
    runs: Mapping[int, Run]  # by seed
    seeds: int  # that there are to be

    @property
    def complete(self) -> bool:
        return len(self.runs) == self.seeds


def score(run: Run) -> float:
    """On validation examples, mean over clients, at the run's best round of its last phase.

    It is that of the model which a run keeps as its best. NaN where there is none.
    """
    best = run.metrics[-1].get("best_round")
    lines = [line for line in run.metrics if line["round"] == best and line.get("validation")]
    return (
        number(lines[0]["validation"][f"{metric_of(run.metrics).name}_mean"]) if lines else math.nan
    )


def spread(tried: Tried) -> dict[str, Any]:
    """Mean and deviation of the score over the seeds that there are."""
    return mean_std([score(run) for run in tried.runs.values()])


def sign(tried: Tried) -> int:
    """1 where a higher score is better, -1 where a lower one is."""
    runs = list(tried.runs.values())
    return 1 if not runs or metric_of(runs[0].metrics).higher_is_better else -1


def ranked(tried: Sequence[Tried]) -> list[Tried]:
    """From the best mean score to the worst; equal ones, and at last unfinished ones, as given.

    A point with a run that has no finite score comes after all that have.
    """

    def key(one: Tried) -> tuple[bool, float]:
        if not one.complete:
            return True, 0.0
        # To twelve digits: .9 + .3 and .8 + .4 are equal, which binary fractions would deny.
        mean = round(spread(one)["mean"], 12)
        return False, math.inf if math.isnan(mean) else -sign(one) * mean

    return sorted(tried, key=key)


def chosen(tried: Sequence[Tried]) -> Tried | None:
    """The first in rank, as soon as all are finished and where it has a finite score."""
    if not tried or not all(one.complete for one in tried):
        return None
    best = ranked(tried)[0]
    return None if math.isnan(spread(best)["mean"]) else best


def close(best: Tried, tried: Sequence[Tried]) -> list[Tried]:
    """Points over which the lead, seed by seed, is no larger in mean than its deviation."""
    found = []
    for one in tried:
        leads = [score(run) - score(one.runs[seed]) for seed, run in best.runs.items()]
        lead = mean_std([sign(best) * each for each in leads])
        if one is not best and len(best.runs) > 1 and lead["mean"] <= lead["std"]:
            found.append(one)
    return found


def edges(best: Point, tried: Sequence[Point]) -> list[str]:
    """Numbers of a point that are the smallest or largest tried: beyond may be better ones.

    Below 0, and below a count of 1, there are none.
    """
    notes = []
    for name, value in best.items():
        values = sorted({point[name] for point in tried if numeric(point[name])})
        if len(values) < 2 or not numeric(value):
            continue
        if value == values[-1]:
            notes.append(f"{name} {word(value)} is the largest tried")
        elif value == values[0] and value > (1 if isinstance(value, int) else 0):
            notes.append(f"{name} {word(value)} is the smallest tried")
    return notes


def numeric(value: Any) -> bool:
    """Whether it has a place on an axis."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def preset(best: Mapping[str, Tried], remarks: Mapping[str, str], header: str) -> str:
    """A configuration file with a preset for each method: what was chosen, and what is not default.

    Args:
      best: by method.
      remarks: what is to be said of each.
      header: from what they were chosen.
    """
    whole = {method: given(one.config) for method, one in best.items()}
    tuned = {name.partition(".")[0] for one in best.values() for name in one.point} | {"algorithm"}
    first = next(iter(whole.values()))
    common = {
        key: value
        for key, value in first.items()
        if key not in tuned and all(key in one and one[key] == value for one in whole.values())
    }
    lines = [
        "# What all have in common, where it is not the default.",
        f"COMMON = {_python(common)}",
    ]
    lines += ["", "CHOSEN = {"]
    for method, own in whole.items():
        rest: dict[str, Any] = {"algorithm": method}
        rest |= {key: value for key, value in own.items() if key not in {*common, "algorithm"}}
        put(rest, best[method].point)  # which may be the default
        lines += _comment(remarks[method], "    ")
        lines += textwrap.indent(f"{method!r}: {_python(rest)},", "    ").splitlines()
    return _FILE.format(
        header="\n".join(_comment(header)),
        settings="\n".join([*lines, "}"]),
        first=repr(next(iter(whole))),
    )


def put(settings: dict[str, Any], point: Point) -> None:
    """Write the values of a point into settings."""
    for name, value in point.items():
        group, _, last = name.rpartition(".")
        (settings.setdefault(group, {}) if group else settings)[last] = value


def given(
    config: ConfigDict, words: configuration.Registry = configuration.BUILTINS
) -> dict[str, Any]:
    """What differs from the defaults in the settings that are used; not what suits a machine."""
    plain = configuration.resolve(config, words)
    usual = configuration.default(words).to_dict()
    kept = {key: v for key, v in plain.items() if key not in settings_with("resumable")}
    return _different(kept, usual)


def _different(plain: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in plain.items():
        if isinstance(value, dict):
            if inner := _different(value, usual[key]):
                found[key] = inner
        elif value != usual[key]:
            found[key] = value
    return found


def _python(settings: Mapping[str, Any]) -> str:
    """A dict as code, a line for each of its keys."""
    lines = [f"{key!r}: {_code(value)}," for key, value in settings.items()]
    return "\n".join(["{", *(textwrap.indent(line, "    ") for line in lines), "}"])


def _code(value: Any) -> str:
    whole = repr(value)
    return _python(value) if isinstance(value, dict) and len(whole) > 60 else whole


def _comment(text: str, indent: str = "") -> list[str]:
    start = f"{indent}# "
    return [
        line
        for part in text.splitlines()
        for line in textwrap.wrap(
            part, 100, initial_indent=start, subsequent_indent=start, break_on_hyphens=False
        )
    ]


_FILE = '''"""Settings chosen on validation examples: a preset for each method.

fedjax-pfl baseline --config=THIS_FILE.py:METHOD
"""

{header}

from fedjax_pfl.settings import configuration
from fedjax_pfl.core.errors import UsageError

{settings}


def get_config(preset={first}):
    """What was chosen for a method."""
    if preset not in CHOSEN:
        hint = configuration.suggestion(preset, CHOSEN)
        raise UsageError(f"there is no preset {{preset!r}}{{hint}}")
    config = configuration.complete(COMMON)
    configuration.override(config, CHOSEN[preset])
    return config
'''
