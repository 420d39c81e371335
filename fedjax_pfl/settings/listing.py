"""What there is to choose from as text: settings, methods, datasets, partitions, and so on."""

import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.settings import configuration, general

WIDTH = 100
NAMES = 19  # columns for names
TABLES: dict[str, tuple[str, Mapping[str, Callable[..., Any]]]] = {
    "methods": ("algorithm", configuration.ALGORITHMS),
    "datasets": ("dataset", configuration.DATASETS),
    "partitions": ("partition", configuration.PARTITIONS),
    "models": ("model", configuration.MODELS),
    "tasks": ("task", configuration.TASKS),
}
KINDS = ("settings", *TABLES)


def listing(kind: str) -> str:
    """One kind as text, at most 100 columns wide."""
    if kind == "settings":
        return "\n".join(_settings())
    setting, table = TABLES[kind]
    return "\n".join(_factories(kind, setting, table))


def of_command(method: str) -> str:
    """What --help says of settings: those of every run and of the command's own method."""
    table = {method: configuration.ALGORITHMS[method]}
    own = "\n".join(_factories("methods", "algorithm", table))
    more = "Other methods, datasets, partitions and models: fedjax-pfl list"
    return "\n\n".join((listing("settings"), own, more))


def _settings() -> Iterator[str]:
    """Those of every run, with their defaults and meanings."""
    defaults, shared = configuration.default(), general.GENERAL
    names = [name for group in shared.values() for name in group]
    wide = max(map(len, names)) + 2
    after = wide + _widest(defaults[name] for name in names)
    yield 'Settings of every run: --config.NAME=VALUE, or {"NAME": VALUE} in Python'
    for title, group in shared.items():
        yield f"  {title}"
        for name, one in group.items():
            yield from _row(name, defaults[name], one.meaning, wide, after)
    for said, fact in (
        ("Can differ between phases", "per_phase"),
        ("Can be changed when a run goes on", "resumable"),
    ):
        yield from wrapped(f"  {said}: {', '.join(general.having(fact))}.", 2)


def _factories(kind: str, setting: str, table: Mapping[str, Callable[..., Any]]) -> Iterator[str]:
    defaults = configuration.default()
    homes = Counter(factory.__module__ for factory in table.values())
    own = {name: list(configuration.settings(factory)) for name, factory in table.items()}
    after = NAMES - 2 + _widest(defaults[name][key] for name in own for key in own[name])
    yield f"{kind.capitalize()}: {setting}=NAME, and their own settings NAME.SETTING"
    for name, factory in table.items():
        # A file with one method in it says on top what the method is.
        alone = kind == "methods" and homes[factory.__module__] == 1
        said = sys.modules[factory.__module__] if alone else factory
        first = (inspect.getdoc(said) or "").partition("\n")[0]
        if kind == "methods" and (origin := METHODS[name].origin):
            first += f" {origin[0].upper()}{origin[1:]}."
        head = f"  {name} ".ljust(NAMES + 2)
        yield from wrapped(head + first, len(head))
        meanings = configuration.meanings(factory)
        for key in own[name]:
            yield from _row(key, defaults[name][key], meanings[key], NAMES - 2, after)


def _row(name: str, usual: Any, meaning: str, wide: int, after: int) -> list[str]:
    """A setting; the columns of its default and its meaning begin behind an indent of four."""
    head = f"    {name.ljust(wide)}{_shown(usual)}".ljust(4 + after)
    return wrapped(head + meaning, 4 + after)


def _widest(values: Iterable[Any]) -> int:
    return max((len(_shown(value)) for value in values), default=0) + 2


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value).replace(" ", "") or '""'


def wrapped(text: str, indent: int) -> list[str]:
    """The text's first `indent` columns are kept as they are."""
    beginning, rest = text[:indent], " ".join(text[indent:].split())
    return textwrap.wrap(
        rest,
        WIDTH,
        initial_indent=beginning,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    ) or [beginning.rstrip()]
