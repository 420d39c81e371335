"""Names of a run's methods, and its settings that differ from their defaults."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_pfl import transforms
from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.core.diagnostics import Diagnostic, Picture
from fedjax_pfl.report import run_reader
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.configuration import Registry
from fedjax_pfl.settings.general import SETTING_GROUPS

# Settings of every run that change how a method trains.
_TRAINING = (
    *SETTING_GROUPS["Clients and rounds"],
    *SETTING_GROUPS["Local training"],
    "zero_head",
    *transforms.SETTINGS,
)


def table_label(name: str) -> str:
    """Returns a method's title for tables and figures; a user-defined method keeps its name."""
    return METHODS[name].row if name in METHODS else name


def is_variant(name: str) -> bool:
    """Returns True for a variant of a paper's method that this library adds."""
    return name in METHODS and METHODS[name].variant_of is not None


def pictures(config: Mapping[str, Any]) -> dict[str, Picture]:
    """Returns titles and captions of the arrays that a run's methods expose, by array name."""
    tables = [METHODS[name].pictures for name in methods(config) if name in METHODS]
    return {name: picture for table in tables for name, picture in table.items()}


def diagnostics(config: Mapping[str, Any]) -> Mapping[str, Diagnostic]:
    """Returns the diagnostics of the method of the run's last phase by name, {} if user-defined."""
    *_, last = phases(config)
    name = str(last.get("algorithm"))
    return METHODS[name].diagnostics if name in METHODS else {}


def methods(config: Mapping[str, Any]) -> list[str]:
    """Returns the names of the methods of a run's phases in order, each once."""
    return list(dict.fromkeys(str(phase.get("algorithm", "?")) for phase in phases(config)))


def title(config: Mapping[str, Any]) -> str:
    """Returns the title of a run's method; of several phases in order."""
    return ", then ".join(map(table_label, methods(config)))


def label(config: Mapping[str, Any]) -> str:
    """Returns a run's method with its paper as text; of several phases in order."""
    labels = [
        METHODS[name].label if name in METHODS else f"{name}, a method of your own"
        for name in methods(config)
    ]
    return ", then ".join(labels)


def changes(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Returns "KEY=VALUE" for each method and training setting that is not at its default.

    A setting that phases give several values appears once for each. Settings of a method that is
    not in `defaults` are left out.
    """
    changed: dict[str, None] = {}
    for phase in phases(config):
        name = str(phase.get("algorithm"))
        settings, method_defaults = phase.get(name, {}), defaults.get(name, {})
        pairs = [
            (f"{name}.{key}", settings[key], default)
            for key, default in method_defaults.items()
            if key in settings
        ]
        pairs += [(key, phase.get(key), defaults[key]) for key in _TRAINING if key in phase]
        changed |= {f"{key}={_value_text(value)}": None for key, value, d in pairs if value != d}
    return list(changed)


def first_line(configs: Sequence[Mapping[str, Any]], registry: Registry) -> str:
    """Returns the first line that a run prints: its method and the changed settings.

    Settings of the method and of training count as changed if they are not at their defaults and
    have the same value in every run of a sweep, one of `configs` each.
    """
    defaults = run_reader.as_json(configuration.default(registry).to_dict())
    first, *remaining = (changes(config, defaults) for config in configs)
    changed = [pair for pair in first if all(pair in run for run in remaining)]
    return f"{label(configs[0])}; {sentence(changed)}"


def sentence(changed: Sequence[str]) -> str:
    """Returns a clause that lists changed settings, "KEY=VALUE" each, or says there are none."""
    if not changed:
        return "all settings of the method and of training at their defaults"
    return f"changed from the defaults: {', '.join(changed)}"


def _value_text(value: Any) -> str:
    return "unset" if value is None else str(value).replace(" ", "")


def phases(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the full settings of each phase of a run: the run's with the changes of the phase.

    A run without phases has one.
    """
    single: tuple[Mapping[str, Any], ...] = ({},)
    for phase in config.get("phases") or single:
        yield {
            **config,
            **{
                key: {**config.get(key, {}), **value} if isinstance(value, Mapping) else value
                for key, value in phase.items()
            },
        }
