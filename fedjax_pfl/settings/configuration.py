"""Settings with their defaults, and the checks of a configuration.

The settings of every run are in general.py. The settings of a method, partition, network or
dataset are the keyword arguments of its factory, with their meanings under `Args:` of its
docstring. They form a sub-config under the factory's name.
"""

import dataclasses
import difflib
import inspect
import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict, FrozenConfigDict, config_dict

from fedjax_pfl import algorithms, data, networks
from fedjax_pfl.core import optimizers, task
from fedjax_pfl.core.errors import MAX_LAYERS, UsageError, nearest
from fedjax_pfl.networks.mobilenet import NORMS
from fedjax_pfl.settings.general import SETTINGS, settings_with
from fedjax_pfl.transforms import SERVER_OPTIMIZERS

ALGORITHMS: dict[str, Callable[..., Any]] = {
    name: method.factory for name, method in algorithms.METHODS.items()
}
PARTITIONS: dict[str, Callable[..., Any]] = data.PARTITIONS
MODELS: dict[str, Callable[..., Any]] = dict(networks.MODELS)
DATASETS: dict[str, Callable[..., Any]] = dict(data.SOURCES)
TASKS: dict[str, Callable[..., Any]] = {"auto": task.infer_task, **task.TASKS}


class Registry(NamedTuple):
    """Factories by name for each kind of component.

    A field has the name of the setting that selects one of its factories.
    """

    algorithm: Mapping[str, Callable[..., Any]] = ALGORITHMS
    dataset: Mapping[str, Callable[..., Any]] = DATASETS
    partition: Mapping[str, Callable[..., Any]] = PARTITIONS
    model: Mapping[str, Callable[..., Any]] = MODELS
    optimizer: Mapping[str, Callable[..., Any]] = optimizers.OPTIMIZERS
    server_optimizer: Mapping[str, Callable[..., Any]] = SERVER_OPTIMIZERS
    task: Mapping[str, Callable[..., Any]] = TASKS


BUILTINS = Registry()  # custom.py adds the components of a user for one run
SCHEDULE_ARGUMENTS = {"rounds", "first_round"}  # a method that has them depends on its phase
# Arguments of factories that are no settings: the library passes them.
PASSED = {"outputs", "conv", "parent", "name", "data_dir"} | SCHEDULE_ARGUMENTS
_MAX_LISTED = 25  # names in an error message
_MAX_UNITS = 1_000_000  # per layer of a built-in network
_MAX_INT = 2**31 - 1  # rounds, clients and seeds are 32 bits in compiled code
# Names of settings in other libraries.
_ALIASES = {
    "lr": "learning_rate",
    "local_learning_rate": "learning_rate",
    "epochs": "local_epochs",
    "num_clients": "clients",
    "n_clients": "clients",
    "num_rounds": "rounds",
    "global_rounds": "rounds",
    "method": "algorithm",
    "network": "model",
    "random_seed": "seed",
    "gpu": "devices",
}


def factory_settings(factory: Callable[..., Any]) -> dict[str, Any]:
    """Returns defaults of a factory's settings by name; a typed placeholder instead of None."""
    if dataclasses.is_dataclass(factory):
        defaults = {f.name: f.default for f in dataclasses.fields(factory) if f.name not in PASSED}
    else:
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(factory).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
            and parameter.default is not parameter.empty
            and name not in PASSED
        }
    hints = typing.get_type_hints(factory)
    for name, value in defaults.items():
        if value is None:
            kinds = [kind for kind in typing.get_args(hints[name]) if kind is not type(None)]
            defaults[name] = config_dict.placeholder(float if float in kinds else kinds[0])
    return defaults


def meanings(factory: Callable[..., Any]) -> dict[str, str]:
    """Returns the meaning of each setting of a factory by name, from `Args:` of its docstring.

    A subclass inherits the meanings of its base classes.
    """
    by_name: dict[str, str] = {}
    for documented in reversed(getattr(factory, "__mro__", (factory,))):
        docstring = inspect.cleandoc(documented.__doc__ or "")
        section = docstring.partition("\nArgs:\n")[2].partition("\n\n")[0]
        for names, text in re.findall(r"^  (\w+(?:, \w+)*): (.*(?:\n   .*)*)", section, re.M):
            meaning = " ".join(text.split()).removesuffix(".")
            by_name |= dict.fromkeys(names.split(", "), meaning)
    return {name: meaning for name, meaning in by_name.items() if name not in PASSED}


def component_name(config: Mapping[str, Any], kind: str) -> str:
    """Returns the value of the setting `kind` (a field of `Registry`); no path of a dataset."""
    return data.source_name(config[kind]) if kind == "dataset" else config[kind]


def default(registry: Registry = BUILTINS) -> ConfigDict:
    """Returns all settings with their defaults: FedAvg on the embedded digits."""
    config = ConfigDict()
    for name, setting in SETTINGS.items():
        unset = setting.default_value is None
        config[name] = config_dict.placeholder(setting.default) if unset else setting.default
    for table in registry:
        for name, factory in table.items():
            if sub_config := factory_settings(factory):
                config[name] = ConfigDict(sub_config)
    config.classes.update(per_client=4, examples=160)
    return config


def suggestion(word: Any, names: Iterable[Any], template: str = "{}") -> str:
    """Returns the end of an error message about an unknown name: a hint at existing names.

    The hint is the most similar name. Without a similar one it lists all names, or the three
    nearest of a long list.

    Args:
      word: The unknown name, also as papers write it (LG-FedAvg), or a number.
      names: The existing names.
      template: Where the name stands in the hint, such as "pfedla.{}".
    """
    names = list(names)
    if (match := nearest(word, names)) is not None:
        return f"; did you mean {template.replace('{}', match)}?"
    by_lower = {str(name).lower(): name for name in names}
    if len(by_lower) <= _MAX_LISTED:
        return f"; there are {', '.join(sorted(names))}"
    first, second, third = (
        template.replace("{}", by_lower[match])
        for match in difflib.get_close_matches(str(word).lower(), by_lower, 3, 0.0)
    )
    return f"; the nearest of {len(by_lower)} are {first}, {second} and {third}"


def setting_hint(key: Any, config: ConfigDict, prefix: str = "") -> str:
    """Returns the end of an error message about the unknown setting `key`: a hint at existing ones.

    `prefix` is the path of `config` in the whole configuration, such as "pfedla.".
    """
    if not prefix and key in _ALIASES:
        return f"; did you mean {_ALIASES[key]}?"
    owners = [name for name, v in config.items() if isinstance(v, ConfigDict) and key in v]
    if owners:
        selected = [config.get(kind) for kind in Registry._fields]
        owner = next((name for name in owners if name in selected), owners[0])
        return (
            f"; groups with {key} are {', '.join(owners)}: write {prefix}{owner}.{key}, in Python "
            f"{{{owner!r}: {{{key!r}: VALUE}}}}"
        )
    return suggestion(key, config.keys(), f"{prefix}{{}}")


def complete(changes: Mapping[str, Any], registry: Registry = BUILTINS) -> ConfigDict:
    """Returns the defaults with `changes`, nested; UsageError as `override` and `_check_types`."""
    config = default(registry)
    override(config, changes)
    _check_types(config, default(registry), "")
    return config


def override(config: ConfigDict, changes: Mapping[str, Any], prefix: str = "") -> None:
    """Changes settings in place; raises UsageError for an unknown setting or a wrong type.

    `changes` are nested as in Python. `prefix` is the path of `config` in the whole configuration,
    such as "pfedla.", for messages.
    """
    for key, value in changes.items():
        if key not in config:
            group, _, last = str(key).partition(".")
            if isinstance(config.get(group), ConfigDict):  # a dotted name, as on the command line
                hint = f"; write {{{group!r}: {{{last!r}: {value!r}}}}}"
            else:
                hint = setting_hint(key, config, prefix)
            raise UsageError(f"there is no setting {prefix}{key}{hint}")
        if isinstance(config[key], ConfigDict):
            if not isinstance(value, Mapping):
                raise UsageError(
                    f"{prefix}{key} is a group of settings; give {prefix}{key}.NAME, in Python "
                    f"{{{key!r}: {{NAME: VALUE}}}}"
                )
            override(config[key], value, f"{prefix}{key}.")
            continue
        expected = config.get_type(key)
        try:
            if isinstance(value, bool) and expected is not bool:  # a bool is an int in Python
                raise TypeError
            config[key] = value
        except (TypeError, ValueError):
            problem = f"{value!r}; it must be of type {expected.__name__}"
            raise UsageError(f"{prefix}{key} is {problem}") from None
        except OverflowError:  # of an integer that no float can hold
            raise UsageError(f"{prefix}{key} is too large; it must be at most 1e308") from None


def set_by_name(settings: dict[str, Any], name: str, value: Any) -> None:
    """Writes the value of a setting such as "pfedla.rate" into nested settings, in place."""
    group, _, last = name.rpartition(".")
    (settings.setdefault(group, {}) if group else settings)[last] = value


def with_values(config: ConfigDict, values: Mapping[str, Any]) -> ConfigDict:
    """Returns a copy of a configuration with new values of settings such as "pfedla.rate"."""
    changed, changes = config.copy_and_resolve_references(), dict[str, Any]()
    for name, value in values.items():
        set_by_name(changes, name, value)
    override(changed, changes)
    return changed


def setting_type(config: ConfigDict, name: str) -> type:
    """Returns the type of a setting such as "pfedla.rate"; ConfigDict for a group."""
    group, _, last = name.rpartition(".")
    level = config[group] if group else config
    return ConfigDict if isinstance(level.get(last), ConfigDict) else level.get_type(last)


def phases(config: ConfigDict, registry: Registry = BUILTINS) -> list[ConfigDict]:
    """Returns all settings of each phase, at least one; UsageError if a phase cannot change one."""
    configs = []
    for number, changes in enumerate(config.phases or [{}]):
        phase = config.copy_and_resolve_references()
        phase.phases = ()
        if not isinstance(changes, Mapping):
            raise UsageError(f"phases[{number}] must be a group of settings, such as rounds=10")
        for key in changes:
            allowed = settings_with("per_phase")
            if key not in allowed and key not in {**registry.algorithm, **registry.model}:
                raise UsageError(f"a phase cannot change {key}{suggestion(key, allowed)}")
        override(phase, changes, f"phases[{number}].")
        configs.append(phase)
    return configs


def groups(config: ConfigDict, registry: Registry = BUILTINS) -> list[ConfigDict]:
    """Returns all settings of each group, at least one; UsageError if they are not a network's."""
    configs = []
    for number, changes in enumerate(config.groups or [{}]):
        if not isinstance(changes, Mapping) or not set(changes) <= {"model", *registry.model}:
            raise UsageError(
                f"groups[{number}] must be settings of a model, such as model='lenet' or "
                "lenet={'kernels': (8, 16)}"
            )
        group = config.copy_and_resolve_references()
        override(group, changes, f"groups[{number}].")
        if group.model not in registry.model:
            hint = suggestion(group.model, registry.model)
            raise UsageError(f"there is no model {group.model!r}{hint}")
        configs.append(group)
    return configs


def resolve(config: ConfigDict, registry: Registry = BUILTINS) -> dict[str, Any]:
    """Returns a configuration as nested dicts, without settings of unselected components."""
    all_settings = config.copy_and_resolve_references().to_dict()
    configs = [group for phase in phases(config, registry) for group in groups(phase, registry)]
    used = {component_name(group, kind) for group in configs for kind in registry._fields}
    unused = {name for table in registry for name in table} - used
    return {key: value for key, value in all_settings.items() if key not in unused}


class PhaseSpecification(NamedTuple):
    """All settings of one phase, validated and immutable; `phases` and `groups` are empty."""

    settings: ConfigDict  # settings of the run with the changes of the phase
    groups: tuple[ConfigDict, ...]  # settings of each client group, at least one


class Specification(NamedTuple):
    """All settings of a run, validated and immutable; `phases` and `groups` are empty in them."""

    settings: ConfigDict  # settings of the run, without the changes of phases
    phases: tuple[PhaseSpecification, ...]  # at least one


def specify(config: ConfigDict, registry: Registry = BUILTINS) -> Specification:
    """Validates a configuration by phase; raises UsageError for the first invalid setting."""
    defaults = default(registry)
    specified = []
    for number, phase in enumerate(phases(config, registry)):
        prefix = f"phases[{number}]." if config.phases else ""
        _check_types(phase, defaults, prefix)
        for kind, table in registry._asdict().items():
            if (name := component_name(phase, kind)) not in table:
                raise UsageError(f"there is no {kind} {name!r}{suggestion(name, table)}")
        _check_values(phase, prefix)
        configs = groups(phase, registry)
        for i, group in enumerate(configs):
            group_prefix = f"groups[{i}]." if phase.groups else prefix
            _check_types(group, defaults, group_prefix)
            _check_network(group, registry, group_prefix)
        _check_combinations(phase, prefix)
        specified.append(PhaseSpecification(_frozen(phase), tuple(map(_frozen, configs))))
    if (total := sum(phase.settings.rounds for phase in specified)) > _MAX_INT:
        raise UsageError(f"all phases have {total} rounds; together at most {_MAX_INT} can be")
    return Specification(_frozen(config), tuple(specified))


def _frozen(config: ConfigDict) -> ConfigDict:
    """Returns an immutable copy with empty settings `phases` and `groups`."""
    copy = config.copy_and_resolve_references()
    copy.update(phases=(), groups=())
    return FrozenConfigDict(copy)


def _check_values(config: ConfigDict, prefix: str) -> None:
    """Raises UsageError for a value out of bounds. Its message has the name after `prefix`."""
    for name, setting in SETTINGS.items():
        value = config[name]
        if bound := setting.limits.violation(value):
            raise UsageError(f"{prefix}{name} is {value}; it must be {bound}")
        if setting.choices and value not in setting.choices:
            raise UsageError(f"{prefix}{name} is {value!r}{suggestion(value, setting.choices)}")


def _check_combinations(config: ConfigDict, prefix: str) -> None:
    """Raises UsageError for contradictions; settings of the whole run are named without prefix."""
    if config.local_epochs is not None and config.local_steps is not None:
        raise UsageError(f"{prefix}local_epochs and local_steps are both set; choose one")
    if config.validate_after and not config.evaluate_after:
        raise UsageError(f"{prefix}validate_after needs evaluate_after; set both or neither")
    drops = config.learning_rate_drops
    if not all(isinstance(drop, (int, float)) and 0 < drop < 1 for drop in drops):
        raise UsageError(f"{prefix}learning_rate_drops must be shares between 0 and 1")
    active = config.clients - config.held_out
    if active < 1:
        raise UsageError(
            f"held_out is {config.held_out} of {config.clients} clients; at least one must take "
            "part"
        )
    if config.participants == "held_out" and not config.held_out:
        raise UsageError(
            f"{prefix}participants is held_out, and held_out is 0; hold some clients out"
        )
    count = active if config.participants == "active" else config.held_out
    for name in ("clients_per_round", "evaluate_clients"):
        if config[name] is not None and config[name] > count:
            raise UsageError(
                f"{prefix}{name} is {config[name]}, and there are {count} clients; choose 1 to "
                f"{count}"
            )
    # split=official ignores test_fraction.
    if config.split != "official" and config.test_fraction + config.validation_fraction >= 1:
        raise UsageError("test_fraction and validation_fraction leave nothing to train on")


def _check_types(config: ConfigDict, defaults: ConfigDict, prefix: str) -> None:
    """Raises UsageError for values that a ConfigDict accepts but no run can use.

    These are None, NaN, integers beyond 32 bits, and tuples with items of another type.
    """
    for key, usual in defaults.items():
        value, kind = config[key], defaults.get_type(key)
        if isinstance(usual, ConfigDict):
            _check_types(value, usual, f"{prefix}{key}.")
            continue
        if value is None and usual is not None:
            raise UsageError(f"{prefix}{key} is {value!r}; it must be of type {kind.__name__}")
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(n, float) and not math.isfinite(n) for n in numbers):
            raise UsageError(f"{prefix}{key} is {value}; it must be finite")
        if any(isinstance(n, int) and abs(n) > _MAX_INT for n in numbers):
            raise UsageError(f"{prefix}{key} is {value}; it must be at most {_MAX_INT}")
        if isinstance(usual, tuple) and usual and {type(v) for v in value} - {type(usual[0])}:
            raise UsageError(f"{prefix}{key} is {value!r}; it must be numbers as in {usual!r}")


def _check_network(config: ConfigDict, registry: Registry, prefix: str) -> None:
    """Raises UsageError for a setting of the selected built-in network out of its bounds."""
    if registry.model[config.model] is not MODELS.get(config.model):
        return
    for key, value in config.get(config.model, ConfigDict()).items():
        for number in value if isinstance(value, tuple) else (value,):
            most = MAX_LAYERS if key in ("blocks", "kernel_size") else _MAX_UNITS
            if type(number) is int and not 1 <= number <= most:
                bound = f"from 1 to {most:,}"
            elif key == "norm" and number not in NORMS:
                bound = " or ".join(NORMS)
            elif key == "dropout" and not 0 <= number < 1:
                bound = "at least 0 and below 1"
            elif isinstance(number, float) and key != "dropout" and not 0 < number <= MAX_LAYERS:
                bound = f"above 0 and at most {MAX_LAYERS:,}"
            else:
                continue
            raise UsageError(f"{prefix}{config.model}.{key} is {value}; it must be {bound}")
