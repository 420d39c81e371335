"""Escaped lines for logs and terminals, which may quote text from other machines."""

import sys
from collections.abc import Callable, Sequence

from fedjax_pfl.core.errors import UsageError

MAX_LENGTH = 1000


def one_line(text: str) -> str:
    """Escapes all characters that are not printable, and cuts the text to `MAX_LENGTH`.

    Newlines, terminal escapes and marks that change the writing direction are not printable.
    """
    characters = (
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
        for c in text[:MAX_LENGTH]
    )
    return "".join(characters)[:MAX_LENGTH]


def to_stderr(line: str) -> None:
    """Prints one escaped line."""
    print(one_line(line), file=sys.stderr, flush=True)


def run_command(main: Callable[[Sequence[str]], None]) -> None:
    """Calls `main` with the arguments of this process, which ends with 2 if they are wrong."""
    try:
        main(sys.argv[1:])
    except UsageError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
