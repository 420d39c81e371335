"""Selects the best point of a grid by validation examples, and writes a preset with it."""

import functools
import math
import pprint
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from fedjax_pfl.report.numbers import direction, mean_score, metric_of
from fedjax_pfl.report.run_reader import Run
from fedjax_pfl.runs.tuning.grids import Point, format_value
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.general import settings_with
from fedjax_pfl.simulation.summaries import mean_std


class PointResult(NamedTuple):
    """A point of a method's grid, a combination of values, and its finished runs, one per seed."""

    point: Point  # values of the tuned settings, by name
    config: ConfigDict  # all settings of the run with the first seed
    runs: Mapping[int, Run]  # by seed
    seeds: int  # planned number of runs

    @property
    def complete(self) -> bool:
        """Returns True if all runs are finished."""
        return len(self.runs) == self.seeds


def score(run: Run) -> float:
    """Returns the validation score of a run's best round in its last phase; NaN without one.

    The score is the mean over clients.
    """
    best = run.metrics[-1].get("best_round")
    lines = [line for line in run.metrics if line["round"] == best]
    return mean_score(lines[0], metric_of(run.metrics), "validation") if lines else math.nan


def spread(result: PointResult) -> dict[str, Any]:
    """Returns `mean` and sample deviation `std` of the validation score over the finished seeds."""
    return mean_std([score(run) for run in result.runs.values()])


def sign(result: PointResult) -> int:
    """Returns 1 if a higher score is better, else -1; 1 without finished runs."""
    runs = list(result.runs.values())
    return direction(metric_of(runs[0].metrics)) if runs else 1


def ranked(results: Sequence[PointResult]) -> list[PointResult]:
    """Sorts points from the best mean score to the worst, in grid order if scores are equal.

    Points without a finite score follow, then unfinished points.
    """

    def key(result: PointResult) -> tuple[bool, float]:
        if not result.complete:
            return True, 0.0
        # Twelve digits: 0.9 + 0.3 and 0.8 + 0.4 are equal.
        mean = round(spread(result)["mean"], 12)
        return False, math.inf if math.isnan(mean) else -sign(result) * mean

    return sorted(results, key=key)


def best_point(results: Sequence[PointResult]) -> PointResult | None:
    """Returns a method's best point, or None if any point lacks runs or no score is finite."""
    if not results or not all(result.complete for result in results):
        return None
    best = ranked(results)[0]
    return None if math.isnan(spread(best)["mean"]) else best


def close(best: PointResult, results: Sequence[PointResult]) -> list[PointResult]:
    """Returns the points that are about as good as the best one. Empty with one seed.

    Their mean distance to it in score, over seeds, is at most the distance's standard deviation.
    """
    ties = []
    for result in results:
        leads = [score(run) - score(result.runs[seed]) for seed, run in best.runs.items()]
        lead = mean_std([sign(best) * difference for difference in leads])
        if result is not best and len(best.runs) > 1 and lead["mean"] <= lead["std"]:
            ties.append(result)
    return ties


def edges(best: Point, points: Sequence[Point]) -> list[str]:
    """Returns notes on settings of the best point whose value is the smallest or largest tried.

    A point maps settings to values; `points` are all of the grid. Omits settings with one number,
    and smallest values that cannot be smaller: 0, or a count of 1.
    """
    notes = []
    for name, value in best.items():
        values = sorted({point[name] for point in points if is_number(point[name])})
        if len(values) < 2 or not is_number(value):
            continue
        if value == values[-1]:
            notes.append(f"{name} {format_value(value)} is the largest tried")
        elif value == values[0] and value > (1 if isinstance(value, int) else 0):
            notes.append(f"{name} {format_value(value)} is the smallest tried")
    return notes


def is_still_rising(run: Run) -> bool:
    """Returns True if a run has several evaluations and the last has the best validation score."""
    last = run.metrics[-1]
    return len(run.metrics) > 1 and last.get("best_round") == last["round"]


def is_number(value: Any) -> bool:
    """Returns True for an int or float that is not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def preset(best: Mapping[str, PointResult], remarks: Mapping[str, str], header: str) -> str:
    """Returns the Python code of a configuration file with a preset for each method.

    `header` and the `remarks` on each method become comments.
    """
    changed = {method: changed_settings(result.config) for method, result in best.items()}
    tuned = {name.partition(".")[0] for result in best.values() for name in result.point}
    first, *other_methods = changed.values()
    common = {
        key: value
        for key, value in first.items()
        if key not in tuned | {"algorithm"}
        and all(key in settings and settings[key] == value for settings in other_methods)
    }
    by_method = {}
    for method, settings in changed.items():
        by_method[method] = {"algorithm": method}
        by_method[method] |= {k: v for k, v in settings.items() if k not in {*common, "algorithm"}}
        for name, value in best[method].point.items():  # also values that are the default
            configuration.set_by_name(by_method[method], name, value)
    comments = [*header.splitlines(), *(f"{method}: {remarks[method]}" for method in best)]
    wrap = functools.partial(textwrap.fill, width=100, initial_indent="# ", subsequent_indent="# ")
    return _FILE.format(
        header="\n".join(map(wrap, comments)),
        common=pprint.pformat(common, width=88, sort_dicts=False),
        chosen=pprint.pformat(by_method, width=88, sort_dicts=False),
        first=repr(next(iter(changed))),
    )


def changed_settings(
    config: ConfigDict, registry: configuration.Registry = configuration.BUILTINS
) -> dict[str, Any]:
    """Returns, in nested dicts, settings of selected components that differ from their defaults.

    Omits settings that may change when a run is resumed, such as `devices`.
    """
    resolved = configuration.resolve(config, registry)
    defaults = configuration.default(registry).to_dict()
    machine = settings_with("resumable")
    return _differences({k: v for k, v in resolved.items() if k not in machine}, defaults)


def _differences(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that differ from their defaults, nested like the settings."""
    changed = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            if inner := _differences(value, defaults[key]):
                changed[key] = inner
        elif value != defaults[key]:
            changed[key] = value
    return changed


_FILE = '''"""Settings chosen on validation examples: a preset for each method.

fedjax-pfl baseline --config=THIS_FILE.py:METHOD
"""

{header}

from fedjax_pfl.settings import configuration
from fedjax_pfl.core.errors import UsageError

# Settings that all methods have in common and that are not the default.
COMMON = {common}

CHOSEN = {chosen}


def get_config(preset={first}):
    """Returns the settings that were chosen for a method."""
    if preset not in CHOSEN:
        hint = configuration.suggestion(preset, CHOSEN)
        raise UsageError(f"there is no preset {{preset!r}}{{hint}}")
    config = configuration.complete(COMMON)
    configuration.override(config, CHOSEN[preset])
    return config
'''
