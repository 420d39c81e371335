"""What there is to choose from, and the settings of each: their defaults, and what they mean.

python -m experiments.list             settings, methods, datasets, partitions, models, presets
python -m experiments.list settings    one of them
"""

import re
from collections.abc import Iterator, Sequence

from fedjax_pfl.cli.command import command, description
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.presets import SYSTEMS
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.listing import KINDS as LIBRARY
from fedjax_pfl.settings.listing import NAMES, listing, wrapped

KINDS = (*LIBRARY, "presets")


def shown(kind: str) -> str:
    """One kind as text, at most 100 columns wide."""
    return "\n".join(presets()) if kind == "presets" else listing(kind)


def presets() -> Iterator[str]:
    """The words of every system's presets."""
    yield "Presets: fedjax-pfl SYSTEM --config=SYSTEM:PRESET"
    for system in SYSTEMS:
        paragraphs = re.split(r"\n\s*\n", description(system))
        yield from wrapped(f"  {system}".ljust(NAMES + 2) + paragraphs[0], NAMES + 2)
        for paragraph in paragraphs[1:]:
            if paragraph.startswith("Presets"):
                yield from wrapped(" " * (NAMES + 4) + paragraph, NAMES + 4)


def main(argv: Sequence[str]) -> None:
    """Print one kind or all."""
    if len(argv) > 2:
        raise UsageError(f"name one kind, or none for all: {', '.join(KINDS)}")
    for word in argv[1:]:
        if word not in KINDS:
            raise UsageError(f"there is no kind {word!r}{configuration.nearest(word, KINDS)}")
    print("\n\n".join(shown(kind) for kind in argv[1:] or KINDS))


if __name__ == "__main__":
    command(main)
