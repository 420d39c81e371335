"""What is tried of each method: grids of settings, their points, and equally many of them."""

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

Grid = dict[
    str, tuple[Any, ...]
]  # the values of each setting, in the order in which they are given
Point = dict[str, Any]  # a value of each

# What can be tuned besides a method's own settings: all else is the problem, the budget, or how
# things are computed and measured, and is the same for all.
TRAINING = settings_with("tunable")
_EXAMPLE = '"learning_rate=.1,.01; pfedla.rate=.05,.5"'
_MOST = 1000  # points of a method
_WORDS = {"true": True, "false": False}


def grids(
    texts: Sequence[str],
    methods: Sequence[str],
    words: configuration.Registry = configuration.BUILTINS,
) -> dict[str, Grid]:
    """The grid of each method.

    A key is a training setting, for all methods, or METHOD.SETTING, for one: a setting of its own,
    or a training setting whose values for this method replace those for all.

    Args:
      texts: each KEY=VALUE,VALUE; KEY=VALUE,VALUE.
    """
    common: Grid = {}
    own: dict[str, Grid] = {method: {} for method in methods}
    seen, like = set[str](), configuration.default(words)
    for key, values in _parts(texts):
        if key in seen:
            raise UsageError(f"the grid has {key} twice; give all of its values at once")
        seen.add(key)
        method, name = _place(key, methods, like, words.algorithm)
        place = common if method is None else own[method]
        place[name] = tuple(dict.fromkeys(_value(like, name, value) for value in values))
    if not seen:
        raise UsageError(f"there is nothing to tune; give a grid, such as {_EXAMPLE}")
    return {method: {**common, **own[method]} for method in methods}


def _parts(texts: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    for part in filter(None, (part.strip() for text in texts for part in text.split(";"))):
        key, _, values = part.partition("=")
        words = [word.strip() for word in values.split(",")]
        if not all(words):
            raise UsageError(
                f"the grid has {part!r}, which is no KEY=VALUE,VALUE; write {_EXAMPLE}"
            )
        yield key.strip(), words


def _place(
    key: str, methods: Sequence[str], like: ConfigDict, there: Container[str]
) -> tuple[str | None, str]:
    """The one method that a key is for, if it is for one, and the name of the setting."""
    group, _, last = key.rpartition(".")
    if not group and last in TRAINING:
        return None, last
    if group not in there:
        top = key.partition(".")[0]
        if top in settings_with("budget"):
            raise UsageError(
                f"{key} cannot be tuned: it is a part of the budget; set it outside the grid"
            )
        if top in there:
            raise UsageError(f"the grid has {key}, which is no METHOD.SETTING; write {_EXAMPLE}")
        if top in like:
            raise UsageError(
                f"{key} cannot be tuned: the problem and what is measured are the same for all; "
                f"set it outside the grid ({', '.join(TRAINING)} and a method's own can be tuned)"
            )
        known = [f"{method}.{name}" for method in methods for name in like.get(method, ())]
        raise UsageError(
            f"there is no setting {key}{configuration.suggestion(key, [*TRAINING, *known])}"
        )
    if group not in methods:
        raise UsageError(
            f"the grid has {key}, and {group} is none of the methods ({', '.join(methods)}); name "
            "it in methods"
        )
    if last in like.get(group, ()):
        return group, key
    if last in TRAINING:
        return group, last
    hint = configuration.suggestion(last, [*like.get(group, ()), *TRAINING], f"{group}.{{}}")
    raise UsageError(f"there is no setting {key}{hint}")


def _value(like: ConfigDict, name: str, word: str) -> Any:
    """A word of the command line as a value of a setting."""
    group, _, last = name.rpartition(".")
    level = like[group] if group else like
    kind = level.get_type(last)
    try:
        if word == "unset" and level[last] is None:
            return None
        if kind is bool:
            return _WORDS[word]
        if kind not in (int, float, str):
            raise UsageError(f"{name} is a {kind.__name__}, which cannot be tuned; set it instead")
        value = kind(word)
    except (KeyError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        wanted = "true or false" if kind is bool else f"of type {kind.__name__}"
        raise UsageError(f"the grid has {name}={word}; it must be {wanted}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"the grid has {name}={word}; it must be a finite number")
    return value


def points(method: str, grid: Grid) -> list[Point]:
    """All combinations, the last setting's values in the inner order."""
    if (count := math.prod(map(len, grid.values()))) > _MOST:
        raise UsageError(f"the grid of {method} has {count} points; at most {_MOST} can be")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def equal(
    each: Mapping[str, Sequence[Point]], budget: int | None, seed: int
) -> dict[str, list[Point]]:
    """Equally many points of each method: all of them, or as many as the budget says.

    A method with fewer points than the budget keeps what it has.
    """
    if budget is not None:
        return {method: drawn(found, budget, seed) for method, found in each.items()}
    by_count: dict[int, list[str]] = {}
    for method, found in each.items():
        by_count.setdefault(len(found), []).append(method)
    if len(by_count) > 1:
        counts = ", ".join(f"{' and '.join(m)} {n}" for n, m in sorted(by_count.items()))
        raise UsageError(
            f"the methods' grids have different numbers of points ({counts}), and budgets are "
            f"equal; give {by_count[min(by_count)][0]} more values, or draw as many of each with a "
            f"budget of {min(by_count)}"
        )
    return {method: list(found) for method, found in each.items()}


def drawn(found: Sequence[Point], number: int, seed: int) -> list[Point]:
    """So many points in grid order, drawn without replacement and without regard to the method.

    A point's rank is a digest of its values, so that methods with one grid get the same points, and
    a larger budget keeps those that were drawn before.
    """
    order = sorted(range(len(found)), key=lambda i: _rank(found[i], seed))
    return [found[i] for i in sorted(order[:number])]


def _rank(point: Point, seed: int) -> str:
    values = sorted([name.rpartition(".")[2], value] for name, value in point.items())
    return hashlib.sha256(json.dumps([seed, values]).encode()).hexdigest()


def apply(config: ConfigDict, point: Point) -> ConfigDict:
    """A configuration with the values of a point. Steps replace epochs, and epochs steps."""
    one = config.copy_and_resolve_references()
    for name, value in point.items():
        group, _, last = name.rpartition(".")
        configuration.override(one, {group: {last: value}} if group else {last: value})
    for chosen, other in (("local_steps", "local_epochs"), ("local_epochs", "local_steps")):
        if point.get(chosen) is not None and other not in point:
            one[other] = None
    return one


def label(point: Point) -> str:
    """A point in words."""
    return ", ".join(f"{name}={word(value)}" for name, value in point.items()) or "as configured"


def word(value: Any) -> str:
    """A value as it is written in a grid."""
    return (
        "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
