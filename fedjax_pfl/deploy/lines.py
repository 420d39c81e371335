"""Lines of text for logs and terminals, some of whose words come from other machines."""

import sys

LONGEST = 1000


def one_line(text: str, most: int = LONGEST) -> str:
    """Returns text with everything escaped that is not printable, cut to `most` characters.

    Newlines, terminal escapes and marks that change the direction of writing are not printable.
    """
    shown = (
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
        for c in text[:most]
    )
    return "".join(shown)[:most]


def to_stderr(line: str) -> None:
    """Prints one escaped line."""
    print(one_line(line), file=sys.stderr, flush=True)
