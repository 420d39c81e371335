"""Text listings of settings, methods, datasets, partitions, models and tasks."""

import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.core.setting import Role
from fedjax_pfl.settings import configuration, general

WIDTH = 100
NAME_WIDTH = 19
TABLES: dict[str, tuple[str, Mapping[str, Callable[..., Any]]]] = {
    "methods": ("algorithm", configuration.ALGORITHMS),
    "datasets": ("dataset", configuration.DATASETS),
    "partitions": ("partition", configuration.PARTITIONS),
    "models": ("model", configuration.MODELS),
    "tasks": ("task", configuration.TASKS),
}
KINDS = ("settings", *TABLES)


def listing(kind: str) -> str:
    """Returns a listing of "settings", "methods", "datasets", "partitions", "models" or "tasks"."""
    return "\n".join(_settings() if kind == "settings" else _factories(kind, *TABLES[kind]))


def command_help(method: str) -> str:
    """Returns the text for --help: the general settings and those of `method`, such as "fedavg"."""
    table = {method: configuration.ALGORITHMS[method]}
    method_settings = "\n".join(_factories("methods", "algorithm", table))
    hint = "Other methods, datasets, partitions and models: fedjax-pfl list"
    return "\n\n".join((listing("settings"), method_settings, hint))


def _settings() -> Iterator[str]:
    """Yields lines with the settings of every run, their defaults and meanings."""
    defaults, settings = configuration.default(), general.SETTINGS
    name_width = max(map(len, settings)) + 2
    indent = name_width + _default_width(defaults[name] for name in settings)
    sections = {"Basic": {name: settings[name] for name in general.settings_with("basic")}}
    for title, group in general.SETTING_GROUPS.items():
        advanced = {
            name: setting for name, setting in group.items() if "basic" not in setting.roles
        }
        sections[f"Advanced: {title.lower()}"] = advanced
    yield 'Settings of every run: --config.NAME=VALUE, or {"NAME": VALUE} in Python'
    for title, group in sections.items():
        yield f"  {title}"
        for name, setting in group.items():
            yield from _setting(name, defaults[name], setting.meaning, name_width, indent)
    roles: tuple[tuple[str, Role], ...] = (
        ("Can differ between phases", "per_phase"),
        ("Can change when a run is resumed", "resumable"),
    )
    for title, role in roles:
        yield from wrapped(f"  {title}: {', '.join(general.settings_with(role))}.", 2)


def _factories(kind: str, setting: str, table: Mapping[str, Callable[..., Any]]) -> Iterator[str]:
    """Yields lines with factories, their descriptions and their settings.

    `kind` is the title, such as "methods"; `setting` selects a factory, such as "algorithm";
    `table` has the factories by name.
    """
    defaults = configuration.default()
    per_module = Counter(factory.__module__ for factory in table.values())
    names = {name: list(configuration.factory_settings(factory)) for name, factory in table.items()}
    width = NAME_WIDTH - 2
    indent = width + _default_width(defaults[name][key] for name in names for key in names[name])
    yield f"{kind.capitalize()}: {setting}=NAME, and their own settings NAME.SETTING"
    for name, factory in table.items():
        # The first line of a module with one method describes the method.
        is_only = kind == "methods" and per_module[factory.__module__] == 1
        described = sys.modules[factory.__module__] if is_only else factory
        description = (inspect.getdoc(described) or "").partition("\n")[0]
        if kind == "methods" and (origin := METHODS[name].origin):
            description += f" {origin[0].upper()}{origin[1:]}."
        head = f"  {name} ".ljust(NAME_WIDTH + 2)
        yield from wrapped(head + description, len(head))
        meanings = configuration.meanings(factory)
        for key in names[name]:
            yield from _setting(key, defaults[name][key], meanings[key], width, indent)


def _setting(name: str, default: Any, meaning: str, name_width: int, indent: int) -> list[str]:
    """Returns the lines of a list that describe a setting: name, default and meaning in columns.

    Names start after four spaces; `indent` is the width of the columns of names and defaults.
    """
    head = f"    {name.ljust(name_width)}{_default_text(default)}".ljust(4 + indent)
    return wrapped(head + meaning, 4 + indent)


def _default_width(defaults: Iterable[Any]) -> int:
    return max((len(_default_text(value)) for value in defaults), default=0) + 2


def _default_text(value: Any) -> str:
    return "unset" if value is None else str(value).replace(" ", "") or '""'


def wrapped(text: str, indent: int) -> list[str]:
    """Returns a text wrapped into lines that are indented below its label.

    The first `indent` characters are the label, which stays unchanged.
    """
    label, body = text[:indent], " ".join(text[indent:].split())
    return textwrap.wrap(
        body, WIDTH, initial_indent=label, subsequent_indent=" " * indent, break_on_hyphens=False
    ) or [label.rstrip()]
