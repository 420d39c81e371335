"""The points that `seeds` and `sweep` ask for: which runs, and in what they differ."""

import itertools
import math
from collections.abc import Container, Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.general import SETTINGS, settings_with
from fedjax_pfl.simulation.sweep import SeparateRunsError

_MOST = 1000  # points


def expand(
    config: ConfigDict, words: configuration.Registry = configuration.BUILTINS
) -> dict[str, ConfigDict]:
    """The points that `seeds` and `sweep` ask for, each the configuration of a run of its own.

    Returns:
      By name, for a folder; one without a name where one is all.
    """
    if config.seeds == 1 and config.sweep == "":
        return {"": config}
    configuration.specify(config, words)
    grid = _parsed(config.sweep)
    if config.seeds == 1 and not grid:
        return {"": config}
    for name in grid:
        if name not in dict(_leaves(config)) and not isinstance(config.get(name), ConfigDict):
            can = [*settings_with("sweepable"), *(one for one, _ in _real(config))]
            raise UsageError(
                f"sweep: there is no setting {name}{configuration.suggestion(name, can)}"
            )
        if (kind := _type(config, name)) is not float:
            raise UsageError(
                f"sweep: {name} is of type {kind.__name__}, and only real-valued settings can "
                f"differ in one program ({_what_can(config.algorithm)}); run its values one by one"
            )
    count = config.seeds * math.prod(map(len, grid.values()))
    if count > _MOST:
        raise UsageError(f"seeds and sweep ask for {count} runs; at most {_MOST} can be together")
    found = {}
    for values in itertools.product(*grid.values()):
        for seed in range(config.seed, config.seed + config.seeds):
            one = config.copy_and_resolve_references()
            one.update(seeds=1, sweep="", seed=seed)
            for name, value in zip(grid, values, strict=True):
                group, _, last = name.rpartition(".")
                configuration.override(one, {group: {last: value}} if group else {last: value})
            pairs = [*zip(grid, values, strict=True), ("seed", seed)]
            found[",".join(f"{name}={value}" for name, value in pairs)] = one
    return found


def _real(config: ConfigDict) -> Iterator[tuple[str, float]]:
    """The real-valued settings of the methods of all phases."""
    for method in {config.algorithm, *(one.get("algorithm") for one in config.phases)} - {None}:
        for name, value in config.get(method, {}).items():
            if isinstance(value, float):
                yield f"{method}.{name}", value


def _what_can(algorithm: str) -> str:
    return f"seed, {', '.join(settings_with('sweepable'))} and real-valued settings of {algorithm}"


def _type(config: ConfigDict, name: str) -> type:
    group, _, last = name.rpartition(".")
    level = config[group] if group else config
    return ConfigDict if isinstance(level.get(last), ConfigDict) else level.get_type(last)


def _parsed(text: str) -> dict[str, list[float]]:
    """name=1,2; group.name=3,4"""
    grid: dict[str, list[float]] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, _, values = (word.strip() for word in part.partition("="))
        if name in grid:
            raise UsageError(f"sweep has {name} twice; give all its values at once")
        try:
            grid[name] = list(dict.fromkeys(float(value) for value in values.split(",")))
        except ValueError:
            raise UsageError(
                f"sweep has {part!r}, which is no NAME=NUMBER,NUMBER; "
                "write learning_rate=.1,.01; pfedla.rate=1,2"
            ) from None
    return grid


def differing(configs: Sequence[ConfigDict]) -> set[str]:
    """The names of all settings in which configurations differ, but for the seed."""
    first, *others = (dict(_leaves(config)) for config in configs)
    return {name for name in first if any(one[name] != first[name] for one in others)} - {"seed"}


def names(configs: Sequence[ConfigDict], algorithms: Container[str]) -> list[str]:
    """The settings in which the configurations of a phase differ and that its rounds read.

    Raises SeparateRunsError for one that makes more different than numbers.

    Args:
      algorithms: by which names there are settings that belong to an algorithm.
    """
    algorithm, found = configs[0].algorithm, []
    for name in sorted(differing(configs)):
        group, _, _ = name.rpartition(".")
        each = values(configs, [name])[name]
        if name in SETTINGS and not SETTINGS[name].is_used(configs[0].get):
            continue
        own = group == algorithm or name in settings_with("sweepable")
        if own and all(isinstance(value, float) for value in each):
            if name in settings_with("zero_is_special") and 0 in each:
                words = " or ".join(dict.fromkeys(f"{value:g}" for value in each))
                line = f"{name} is {words}, which makes different programs; run them one by one"
                raise SeparateRunsError([name], line)
            found.append(name)
        elif own or group not in algorithms:  # a phase of another method may read it
            raise SeparateRunsError(
                [name],
                f"{name} cannot differ in one program (it is {', '.join(map(str, each))}); "
                f"{_what_can(algorithm)} can",
            )
    return found


def values(configs: Sequence[ConfigDict], names: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """What each configuration has for these settings."""
    each = [dict(_leaves(config)) for config in configs]
    return {name: tuple(one[name] for one in each) for name in names}


def _leaves(config: ConfigDict, prefix: str = "") -> Any:
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
