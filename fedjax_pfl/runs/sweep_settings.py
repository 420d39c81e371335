"""Runs of the settings `seeds` and `sweep`, and the settings that differ between them."""

import itertools
import math
from collections.abc import Container, Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs.run_partitions import PARTITION_SEED
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.general import SETTINGS, settings_with
from fedjax_pfl.simulation.sweep import SeparateRunsError

_MAX_RUNS = 1000


def expand(
    config: ConfigDict, registry: configuration.Registry = configuration.BUILTINS
) -> dict[str, ConfigDict]:
    """Returns the configuration of each run of `seeds` and `sweep`.

    They are by name, such as "learning_rate=0.1,seed=3"; a single run has the name "".
    """
    if config.own_partitions and config.seeds == 1:
        raise UsageError("own_partitions is for several seeds; set seeds, or leave it out")
    if config.seeds == 1 and config.sweep == "":
        return {"": config}
    configuration.specify(config, registry)
    grid = _parse(config.sweep)
    if config.seeds == 1 and not grid:  # such as sweep=";"
        return {"": config}
    for name in grid:
        _check_name(config, name)
    count = config.seeds * math.prod(map(len, grid.values()))
    if count > _MAX_RUNS:
        raise UsageError(f"seeds and sweep request {count} runs; use at most {_MAX_RUNS}")
    configs = {}
    for values in itertools.product(*grid.values()):
        for number in range(config.seeds):
            point = {**dict(zip(grid, values, strict=True)), "seed": config.seed + number}
            run_name = ",".join(f"{name}={value}" for name, value in point.items())
            configs[run_name] = configuration.with_values(config, point | of_seed(config, number))
    return configs


def of_seed(config: ConfigDict, number: int) -> dict[str, Any]:
    """Returns the changes of `config` that make the run of its seed with this number, from 0."""
    return {
        "seed": config.seed + number,
        PARTITION_SEED: config.partition_seed + number * config.own_partitions,
        "seeds": 1,
        "sweep": "",
        "own_partitions": False,
    }


def _check_name(config: ConfigDict, name: str) -> None:
    """Raises UsageError if `sweep` has an unknown setting, or one that is no real number."""
    if name not in dict(_leaves(config)) and not isinstance(config.get(name), ConfigDict):
        sweepable = [*settings_with("sweepable"), *_real_settings(config)]
        raise UsageError(
            f"sweep: there is no setting {name}{configuration.suggestion(name, sweepable)}"
        )
    if (kind := configuration.setting_type(config, name)) is not float:
        raise UsageError(
            f"sweep: {name} is of type {kind.__name__}, and only real-valued settings can "
            f"differ in one program ({_sweepable(config.algorithm)}); run its values one by one"
        )


def _real_settings(config: ConfigDict) -> Iterator[str]:
    """Yields the real-valued settings of the methods of all phases."""
    methods = {config.algorithm, *(phase.get("algorithm") for phase in config.phases)} - {None}
    for method in methods:
        for name, value in config.get(method, {}).items():
            if isinstance(value, float):
                yield f"{method}.{name}"


def _sweepable(algorithm: str) -> str:
    """Returns the names of the settings that can differ in one program, for messages."""
    return f"seed, {', '.join(settings_with('sweepable'))} and real-valued settings of {algorithm}"


def _parse(text: str) -> dict[str, list[float]]:
    """Parses "name=1,2; group.name=3,4" into values by setting, without repeated values.

    Raises UsageError for other text, and for a setting named twice.
    """
    grid: dict[str, list[float]] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, _, values = (piece.strip() for piece in part.partition("="))
        if name in grid:
            raise UsageError(f"sweep has {name} twice; give all its values together")
        try:
            grid[name] = list(dict.fromkeys(float(value) for value in values.split(",")))
        except ValueError:
            raise UsageError(
                f"sweep has {part!r}, which is no NAME=NUMBER,NUMBER; "
                "write learning_rate=0.1,0.01; pfedla.rate=1,2"
            ) from None
    return grid


def differing_settings(configs: Sequence[ConfigDict]) -> set[str]:
    """Returns the names of all settings that differ between configurations, except seeds."""
    leaves = [dict(_leaves(config)) for config in configs]
    differ = {name for name in leaves[0] if any(run[name] != leaves[0][name] for run in leaves)}
    return differ - {"seed", PARTITION_SEED}


def swept_settings(configs: Sequence[ConfigDict], algorithms: Container[str]) -> list[str]:
    """Returns names of settings that differ between the runs of a phase and that its rounds read.

    Raises SeparateRunsError for a setting whose values need different programs. `algorithms` has
    the names of methods, under which a configuration holds their settings.
    """
    algorithm, swept = configs[0].algorithm, []
    for name in sorted(differing_settings(configs)):
        group, _, _ = name.rpartition(".")
        values = setting_values(configs, [name])[name]
        if name in SETTINGS and not SETTINGS[name].is_used(configs[0].get):
            continue
        is_read = group == algorithm or name in settings_with("sweepable")
        if is_read and all(isinstance(value, float) for value in values):
            if name in settings_with("zero_is_special") and 0 in values:
                text = " or ".join(dict.fromkeys(f"{value:g}" for value in values))
                line = f"{name} is {text}, which makes different programs; run them one by one"
                raise SeparateRunsError([name], line)
            swept.append(name)
        elif is_read or group not in algorithms:  # a phase of another method may read it
            raise SeparateRunsError(
                [name],
                f"{name} cannot differ in one program (it is {', '.join(map(str, values))}); "
                f"{_sweepable(algorithm)} can",
            )
    return swept


def setting_values(
    configs: Sequence[ConfigDict], names: Sequence[str]
) -> dict[str, tuple[Any, ...]]:
    """Returns by name the values of settings, such as "pfedla.rate", one for each configuration."""
    leaves = [dict(_leaves(config)) for config in configs]
    return {name: tuple(run_leaves[name] for run_leaves in leaves) for name in names}


def _leaves(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields all settings by name; a setting of a group has a name such as "pfedla.rate"."""
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
