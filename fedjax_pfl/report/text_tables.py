"""Tables as text for a terminal, as Markdown and as LaTeX."""

import html
import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

WIDTH = 100
_LEAST = 16  # columns for labels
_LATEX = {
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    "–": "--",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    '"': "''",
}


class Table(NamedTuple):
    """Text in cells; a row begins with its label."""

    caption: str
    heads: list[str]  # of the other columns
    rows: list[list[str]]
    variants: Sequence[list[str]] = ()  # rows below a line: variants of this library
    title: str = ""  # heading on a page

    @property
    def all_rows(self) -> list[list[str]]:
        """Rows above and below the line."""
        return [*self.rows, *self.variants]


LINE = "Variants of this library:"


def text(tables: Sequence[Table]) -> str:
    """At most 100 columns wide; labels are wrapped."""
    parts = []
    for table in tables:
        lines = [table.heads, *(cells for _, *cells in table.all_rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        room = max(_LEAST, WIDTH - sum(widths) - 2 * len(widths))
        said = [[""], *(textwrap.wrap(label, room) for label, *_ in table.all_rows)]
        room = max(len(line) for label in said for line in label)
        out = textwrap.wrap(table.caption, WIDTH)
        for number, (label, cells) in enumerate(zip(said, lines, strict=True)):
            if number == len(table.rows) + 1:
                out.append(f"{LINE} ".ljust(room + sum(widths) + 2 * len(widths), "-"))
            numbers = "".join(f"  {c.rjust(w)}" for c, w in zip(cells, widths, strict=True))
            out += [(label[0].ljust(room) + numbers).rstrip(), *label[1:]]
        parts.append("\n".join(out))
    return "\n\n".join(parts)


def filled(text: str) -> str:
    """A paragraph, no wider than the tables."""
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)


def markdown(tables: Sequence[Table]) -> str:
    """A paragraph and a table each."""

    def plain(text: str) -> str:
        return html.escape(text, quote=False)  # Markdown lets HTML through

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(plain(c).replace("|", r"\|") for c in cells) + " |"

    return "\n\n".join(
        "\n".join(
            [
                plain(table.caption),
                "",
                line(["", *table.heads]),
                line(["---", *("---:" for _ in table.heads)]),
                *map(line, table.rows),
                *([line([LINE, *("" for _ in table.heads)])] if table.variants else []),
                *map(line, table.variants),
            ]
        )
        for table in tables
    )


def latex(tables: Sequence[Table]) -> str:
    """Tables that need no package."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join(map(_escaped, cells)) + r" \\"

    return "\n\n".join(
        "\n".join(
            [
                r"\begin{table}",
                rf"\caption{{{_escaped(table.caption)}}}",
                rf"\begin{{tabular}}{{l{'r' * len(table.heads)}}}",
                r"\hline",
                line(["", *table.heads]),
                r"\hline",
                *map(line, table.rows),
                *([r"\hline", rf"{LINE} \\"] if table.variants else []),
                *map(line, table.variants),
                r"\hline",
                r"\end{tabular}",
                r"\end{table}",
            ]
        )
        for table in tables
    )


def _escaped(cell: str) -> str:
    plain = "".join(_LATEX.get(character, character) for character in cell)
    return re.sub(r"^([-+])(?=[\d.])", r"$\1$", plain)
