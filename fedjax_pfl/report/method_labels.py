"""Names of the methods of a run, and the settings by which it differs from their defaults."""

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
_TRAINING = (*SETTING_GROUPS["Local training"], "zero_head", *transforms.SETTINGS)


def row(name: str) -> str:
    """Returns a method's title for tables and figures; a user's own method keeps its name."""
    return METHODS[name].row if name in METHODS else name


def is_variant(name: str) -> bool:
    """Returns True for a method that this library changed from a paper's."""
    return name in METHODS and METHODS[name].variant_of is not None


def pictures(config: Mapping[str, Any]) -> dict[str, Picture]:
    """Returns titles and captions of what the run's methods expose, of all phases."""
    names = [str(phase.get("algorithm")) for phase in _phases(config)]
    each = [METHODS[name].pictures for name in names if name in METHODS]
    return {name: picture for known in each for name, picture in known.items()}


def diagnostics(config: Mapping[str, Any]) -> Mapping[str, Diagnostic]:
    """Returns the diagnostics of the run's last method; a user's own method has none."""
    *_, last = _phases(config)
    name = str(last.get("algorithm"))
    return METHODS[name].diagnostics if name in METHODS else {}


def label(config: Mapping[str, Any]) -> str:
    """Returns title and origin of a run's method, in order where its phases have several."""
    names = [str(phase.get("algorithm", "?")) for phase in _phases(config)]
    labels = [METHODS[n].label if n in METHODS else f"{n}, a method of your own" for n in names]
    return ", then ".join(dict.fromkeys(labels))


def changes(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Returns KEY=VALUE of method and training settings that differ from their defaults.

    Args:
      config: A run's settings as plain data.
      defaults: All settings at their defaults; a method that they lack is left out.
    """
    changed: dict[str, None] = {}
    for phase in _phases(config):
        name = str(phase.get("algorithm"))
        settings, usual = phase.get(name, {}), defaults.get(name, {})
        pairs = [(f"{name}.{key}", settings[key], usual[key]) for key in usual if key in settings]
        pairs += [(key, phase.get(key), defaults[key]) for key in _TRAINING if key in phase]
        changed |= {f"{key}={_shown(value)}": None for key, value, u in pairs if value != u}
    return list(changed)


def first_line(configs: Sequence[Mapping[str, Any]], words: Registry) -> str:
    """Returns what a run's first line says: its method, and what all of its configurations change.

    Args:
      configs: Settings as plain data, one for each seed and point of the run.
      words: All methods, a user's own among them.
    """
    defaults = run_reader.as_read(configuration.default(words).to_dict())
    first, *rest = (changes(config, defaults) for config in configs)
    changed = [pair for pair in first if all(pair in run for run in rest)]
    return f"{label(configs[0])}; {sentence(changed)}"


def sentence(changed: Sequence[str]) -> str:
    """Returns what was changed in words."""
    if not changed:
        return "all settings of the method and of training at their defaults"
    return f"changed from the defaults: {', '.join(changed)}"


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value).replace(" ", "")


def _phases(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Settings of each phase: those of the run with the phase's own in their place."""
    none: tuple[Mapping[str, Any], ...] = ({},)
    for phase in config.get("phases") or none:
        yield {
            **config,
            **{
                key: {**config.get(key, {}), **value} if isinstance(value, Mapping) else value
                for key, value in phase.items()
            },
        }
