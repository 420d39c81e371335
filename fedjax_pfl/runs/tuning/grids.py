"""Grids of settings for each method, their points, and an equal number of points per method."""

import hashlib
import itertools
import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.general import settings_with

Grid = dict[str, tuple[Any, ...]]  # values of each setting, in the given order
Point = dict[str, Any]  # one value of each setting

# Settings that can be tuned, besides settings of a method. All others define the problem, the
# budget or the computation, and are the same for all methods.
TRAINING = settings_with("tunable")
_EXAMPLE = '"learning_rate=0.1,0.01; pfedla.rate=0.05,0.5"'
_MAX_POINTS = 1000  # of a method


def grids(
    texts: Sequence[str],
    methods: Sequence[str],
    registry: configuration.Registry = configuration.BUILTINS,
) -> dict[str, Grid]:
    """Returns the values of each setting to tune, by method.

    A text is KEY=VALUE,VALUE; KEY=VALUE,VALUE. A key is a training setting, for all methods, or
    METHOD.SETTING for one method. SETTING is a setting of the method, or a training setting whose
    values replace those for all methods.
    """
    common: Grid = {}
    specific: dict[str, Grid] = {method: {} for method in methods}
    keys, defaults = set[str](), configuration.default(registry)
    for key, values in _parse(texts):
        if key in keys:
            raise UsageError(f"the grid has {key} twice; give all of its values together")
        keys.add(key)
        method, name = _method_and_name(key, methods, defaults, registry.algorithm)
        grid = common if method is None else specific[method]
        grid[name] = tuple(dict.fromkeys(_value(defaults, name, text) for text in values))
    if not keys:
        raise UsageError(f"there is nothing to tune; give a grid, such as {_EXAMPLE}")
    return {method: {**common, **specific[method]} for method in methods}


def _parse(texts: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields each key of "KEY=VALUE,VALUE; KEY=VALUE" with its values as text.

    Raises UsageError for other text.
    """
    for part in filter(None, (part.strip() for text in texts for part in text.split(";"))):
        key, _, values = part.partition("=")
        value_texts = [text.strip() for text in values.split(",")]
        if not all(value_texts):
            raise UsageError(
                f"the grid has {part!r}, which is no KEY=VALUE,VALUE; write {_EXAMPLE}"
            )
        yield key.strip(), value_texts


def _method_and_name(
    key: str, methods: Sequence[str], defaults: ConfigDict, registered: Container[str]
) -> tuple[str | None, str]:
    """Returns the method of a grid's key, None for all methods, and the name of the setting.

    The name is such as "pfedla.rate", or "learning_rate" for a training setting. Raises UsageError
    for an unknown key. `methods` are those to tune, `registered` all methods; `defaults` has all
    settings.
    """
    group, _, last = key.rpartition(".")
    if not group and last in TRAINING:
        return None, last
    if group not in registered:
        raise _unknown_key(key, methods, defaults, registered)
    if group not in methods:
        raise UsageError(
            f"the grid has {key}, and {group} is none of the methods ({', '.join(methods)}); name "
            "it in methods"
        )
    if last in defaults.get(group, ()):
        return group, key
    if last in TRAINING:
        return group, last
    names = [*defaults.get(group, ()), *TRAINING]
    hint = configuration.suggestion(last, names, f"{group}.{{}}")
    raise UsageError(f"there is no setting {key}{hint}")


def _unknown_key(
    key: str, methods: Sequence[str], defaults: ConfigDict, registered: Container[str]
) -> UsageError:
    """Returns the error for a key that is no training setting and no METHOD.SETTING.

    Arguments are as for `_method_and_name`.
    """
    top = key.partition(".")[0]
    if top in settings_with("budget"):
        return UsageError(
            f"{key} cannot be tuned: it is a part of the budget; set it outside the grid"
        )
    if top in registered:
        return UsageError(f"the grid has {key}, which is no METHOD.SETTING; write {_EXAMPLE}")
    if top in defaults:
        return UsageError(
            f"{key} cannot be tuned: the problem and the measurements are the same for all; "
            f"set it outside the grid ({', '.join(TRAINING)} and a method's own can be tuned)"
        )
    names = [f"{method}.{name}" for method in methods for name in defaults.get(method, ())]
    hint = configuration.suggestion(key, [*TRAINING, *names])
    return UsageError(f"there is no setting {key}{hint}")


def _value(defaults: ConfigDict, name: str, text: str) -> Any:
    """Parses the value of the setting `name`, with the type of its default; "unset" is None.

    Raises UsageError for a setting that cannot be tuned, and for a value of another type.
    """
    kind = configuration.setting_type(defaults, name)
    if kind not in (bool, int, float, str):
        raise UsageError(f"{name} is a {kind.__name__}, which cannot be tuned; set it instead")
    group, _, last = name.rpartition(".")
    if text == "unset" and (defaults[group] if group else defaults)[last] is None:
        return None
    try:
        value = {"true": True, "false": False}[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        expected = "true or false" if kind is bool else f"of type {kind.__name__}"
        raise UsageError(f"the grid has {name}={text}; it must be {expected}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"the grid has {name}={text}; it must be a finite number")
    return value


def points(method: str, grid: Grid) -> list[Point]:
    """Returns all combinations of a grid's values, at most 1,000. The last varies fastest.

    Raises UsageError for more.
    """
    if (count := math.prod(map(len, grid.values()))) > _MAX_POINTS:
        raise UsageError(f"the grid of {method} has {count} points; use at most {_MAX_POINTS}")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def equal(
    points_of: Mapping[str, Sequence[Point]], budget: int | None, seed: int
) -> dict[str, list[Point]]:
    """Returns the points to run of each method: the same number, so far as grids are large enough.

    `budget` points are sampled; a method with fewer keeps all. Without a budget all points are run,
    and methods must have equal numbers. Raises UsageError if their numbers differ anyway.
    """
    if budget is not None:
        return {method: sample(points, budget, seed) for method, points in points_of.items()}
    by_count: dict[int, list[str]] = {}
    for method, points in points_of.items():
        by_count.setdefault(len(points), []).append(method)
    if len(by_count) > 1:
        counts = ", ".join(f"{' and '.join(m)} {n}" for n, m in sorted(by_count.items()))
        raise UsageError(
            f"the methods' grids have different numbers of points ({counts}), and budgets are "
            f"equal; give {by_count[min(by_count)][0]} more values, or sample the same number with "
            f"a budget of {min(by_count)}"
        )
    return {method: list(points) for method, points in points_of.items()}


def sample(points: Sequence[Point], count: int, seed: int) -> list[Point]:
    """Samples points without replacement. Returns them in grid order.

    Points are ranked by a digest of their values and the seed. Methods with the same grid get the
    same points, and a larger count keeps the points of a smaller one; it may exceed their number.
    """
    order = sorted(range(len(points)), key=lambda i: _digest(points[i], seed))
    return [points[i] for i in sorted(order[:count])]


def _digest(point: Point, seed: int) -> str:
    # The full name too: pfedhn.momentum and momentum may both be tuned.
    names = sorted(point, key=lambda name: (name.rpartition(".")[2], name))
    values = [[name.rpartition(".")[2], point[name]] for name in names]
    return hashlib.sha256(json.dumps([seed, values]).encode()).hexdigest()


def apply(config: ConfigDict, point: Point) -> ConfigDict:
    """Returns a copy of a configuration with the values of a point.

    If it sets `local_steps`, `local_epochs` becomes unset, and vice versa.
    """
    changed = configuration.with_values(config, point)
    for name, replaced in (("local_steps", "local_epochs"), ("local_epochs", "local_steps")):
        if point.get(name) is not None and replaced not in point:
            changed[replaced] = None
    return changed


def label(point: Point) -> str:
    """Formats a point as "learning_rate=0.1, pfedla.rate=1"; "as configured" if it is empty."""
    pairs = (f"{name}={format_value(value)}" for name, value in point.items())
    return ", ".join(pairs) or "as configured"


def format_value(value: Any) -> str:
    """Formats a value as in the text of a grid: None as "unset", True as "true"."""
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)
