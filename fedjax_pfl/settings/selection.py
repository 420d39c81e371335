"""Checks that every setting that a user gives has an effect.

A setting of a method, network, dataset or partition that is not selected is an error.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.setting import UsedWith
from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.owners import BY_OWNER
from fedjax_pfl.settings.configuration import (
    BUILTINS,
    Registry,
    component_name,
    default,
    groups,
    phases,
    set_by_name,
)
from fedjax_pfl.settings.general import SETTINGS


def check_used(
    changes: Mapping[str, Any], configs: Sequence[ConfigDict], registry: Registry = BUILTINS
) -> None:
    """Raises UsageError for a setting that none of the configurations uses.

    A setting of a component that is not selected is an error even at its default. A setting that
    depends on another one is an error only if it differs from its default, so the whole
    configuration of a run can be given again. So is a setting that all phases set. Settings of a
    preset are not checked: `changes` are those that the user gave, nested as in Python. A tuning
    run has a configuration per method.
    """
    check_used_in_any(changes, configs, registry)
    check_not_overridden(changes, configs, registry)
    for config in configs:
        by_phase = _by_phase_and_group(config, registry)
        for number, phase_changes in enumerate(config.phases):
            _check_effect(phase_changes, by_phase[number], f"phases[{number}].", registry)
        for number, group_changes in enumerate(config.groups):
            group_configs = [by_group[number] for by_group in by_phase]
            _check_effect(group_changes, group_configs, f"groups[{number}].", registry)


def check_not_overridden(
    changes: Mapping[str, Any], configs: Sequence[ConfigDict], registry: Registry = BUILTINS
) -> None:
    """Raises UsageError for a setting that every phase or group of the configurations sets.

    Arguments as for `check_used`. A setting at its default passes.
    """
    values, defaults = _by_path(changes), _by_path(default(registry).to_dict())
    # `rounds` is often their sum, and a user-defined component is given as the setting of its kind.
    changed = {path for path, value in values.items() if value != defaults.get(path)}
    changed -= {"rounds", *registry._fields}
    for kind in ("phases", "groups"):
        if not all(config[kind] for config in configs):
            continue
        parts = [set(_by_path(part)) for config in configs for part in config[kind]]
        for path in sorted(changed.intersection(*parts)):
            raise UsageError(
                f"{path} has no effect, because every {kind[:-1]} sets it; set it in the {kind}, "
                "or leave it out"
            )


def check_used_in_any(
    changes: Mapping[str, Any], configs: Sequence[ConfigDict], registry: Registry = BUILTINS
) -> None:
    """Like `check_used`, without the changes that phases and groups of the configurations make."""
    by_phase = [part for config in configs for part in _by_phase_and_group(config, registry)]
    _check_effect(changes, [group for by_group in by_phase for group in by_group], "", registry)


def _by_phase_and_group(config: ConfigDict, registry: Registry) -> list[list[ConfigDict]]:
    """Returns all settings of each group of each phase."""
    return [groups(phase, registry) for phase in phases(config, registry)]


def _check_effect(
    changes: Mapping[str, Any], configs: Sequence[ConfigDict], prefix: str, registry: Registry
) -> None:
    """Raises UsageError for a setting in `changes` that none of the configurations uses.

    `changes` are nested settings that the user gave; `configs` are complete configurations.
    `prefix` is the path of the settings for messages, such as "phases[0].".
    """
    for name, values in changes.items():
        if name in SETTINGS:
            _check_condition(name, values, configs, prefix)
        for kind, table in registry._asdict().items():
            selected = dict.fromkeys(component_name(config, kind) for config in configs)
            if name in table and name not in selected and isinstance(values, Mapping) and values:
                path = f"{prefix}{name}.{next(iter(values))}"
                raise UsageError(
                    f"{path} counts with {kind}={name} only, and {kind} is "
                    f"{' or '.join(selected)}; set {prefix}{kind} to {name}, or leave {path} out"
                )


def _check_condition(name: str, value: Any, configs: Sequence[ConfigDict], prefix: str) -> None:
    """Raises UsageError for a setting whose `Setting.used_with` holds in no configuration.

    A setting at its default passes. `prefix` is its path for messages, such as "phases[0].".
    """
    setting = SETTINGS[name]
    value = tuple(value) if isinstance(value, list) else value
    if value == setting.default_value or any(setting.is_used(config.get) for config in configs):
        return
    condition, choices, or_true = setting.used_with or UsedWith("", ())
    needed = f"{condition}={_alternatives(choices)}" + (f" or {or_true}=True" if or_true else "")
    raise UsageError(
        f"{prefix}{name} counts with {needed} only, and {condition} is "
        f"{_alternatives(config[condition] for config in configs)}; change {prefix}{condition}, or "
        f"leave {prefix}{name} out"
    )


def _alternatives(values: Iterable[Any]) -> str:
    """Returns different values as text, such as "sgd or adamw". None is "unset"."""
    return " or ".join(dict.fromkeys("unset" if v is None else str(v) for v in values))


def check_owners(dataset: Dataset | None, configs: Iterable[ConfigDict]) -> None:
    """Raises UsageError if each example names its owner and no configuration partitions by owner.

    `dataset` is user-defined; None passes.
    """
    partitions = {config.partition for config in configs}
    if dataset is not None and dataset.owner_train is not None and not partitions & set(BY_OWNER):
        raise UsageError(
            f"the owners of {dataset.name} count with partition={' or '.join(BY_OWNER)} only, and "
            f"partition is {' or '.join(sorted(partitions))}; set partition to natural, or leave "
            "owners out"
        )


def _by_path(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested settings by name, such as "pfedla.rate", with tuples for lists."""
    by_path = dict[str, Any]()
    for name, value in settings.items():
        if isinstance(value, Mapping):
            by_path |= {f"{name}.{path}": part for path, part in _by_path(value).items()}
        else:
            by_path[name] = tuple(value) if isinstance(value, list) else value
    return by_path


def nested(paths: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by name, such as "pfedla.rate", as nested dicts. Omits those with "["."""
    settings: dict[str, Any] = {}
    for path, value in paths.items():
        if "[" not in path:
            set_by_name(settings, path, value)
    return settings
