"""The command fedjax-pfl list."""

import re
from collections.abc import Iterator

from fedjax_pfl.cli.command import Call, Command
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.presets import SYSTEMS
from fedjax_pfl.settings import configuration, listing

HELP = """
fedjax-pfl list             settings, methods, datasets, partitions, models, tasks, presets
fedjax-pfl list settings    one of them

Settings are listed with their defaults and meanings.
"""
KINDS = (*listing.KINDS, "presets")


def text(kind: str) -> str:
    """Returns the list of one of `KINDS`, such as "methods", at most 100 columns wide."""
    return "\n".join(_presets()) if kind == "presets" else listing.listing(kind)


def _presets() -> Iterator[str]:
    """Yields lines of text: each system, such as pfedla, and the words that name its presets."""
    column = listing.NAME_WIDTH + 2
    yield "Presets: fedjax-pfl SYSTEM --config=SYSTEM:PRESET"
    for name, module in SYSTEMS.items():
        about, *paragraphs = re.split(r"\n\s*\n", module.__doc__ or "")
        yield from listing.wrapped(f"  {name}".ljust(column) + about, column)
        for paragraph in paragraphs:
            if paragraph.startswith(("Presets", "- ")):
                yield from listing.wrapped(" " * (column + 2) + paragraph, column + 2)


def print_lists(call: Call) -> None:
    """Prints the list of the kind in `call.positional`, or of all kinds if none is given."""
    if len(call.positional) > 1:
        raise UsageError(f"name one kind, or none for all: {', '.join(KINDS)}")
    for word in call.positional:
        if word not in KINDS:
            raise UsageError(f"there is no kind {word!r}{configuration.suggestion(word, KINDS)}")
    print("\n\n".join(text(kind) for kind in call.positional or KINDS))


COMMANDS = {"list": Command(lambda: HELP, lambda options: None, print_lists)}
