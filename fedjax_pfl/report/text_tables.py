"""Tables as plain text, Markdown and LaTeX."""

import html
import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

WIDTH = 100
_MIN_LABEL_WIDTH = 16
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
    """A table of text cells; each row starts with its label."""

    caption: str
    heads: list[str]  # column heads, without that of the labels
    rows: list[list[str]]
    variants: Sequence[list[str]] = ()  # variants of this library, below a line
    title: str = ""  # heading on a page

    @property
    def all_rows(self) -> list[list[str]]:
        """Returns the rows above and below the line."""
        return [*self.rows, *self.variants]


LINE = "Variants of this library:"


def text(tables: Sequence[Table]) -> str:
    """Returns tables as plain text with wrapped labels, at most 100 columns wide if possible."""
    parts = []
    for table in tables:
        lines = [table.heads, *(cells for _, *cells in table.all_rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        label_width = max(_MIN_LABEL_WIDTH, WIDTH - sum(widths) - 2 * len(widths))
        labels = [[""], *(textwrap.wrap(label, label_width) for label, *_ in table.all_rows)]
        label_width = max(len(line) for label in labels for line in label)
        out = textwrap.wrap(table.caption, WIDTH)
        for number, (label, cells) in enumerate(zip(labels, lines, strict=True)):
            if number == len(table.rows) + 1:
                out.append(f"{LINE} ".ljust(label_width + sum(widths) + 2 * len(widths), "-"))
            numbers = "".join(f"  {c.rjust(w)}" for c, w in zip(cells, widths, strict=True))
            out += [(label[0].ljust(label_width) + numbers).rstrip(), *label[1:]]
        parts.append("\n".join(out))
    return "\n\n".join(parts)


def fill_paragraph(text: str) -> str:
    """Wraps a paragraph to the width of the tables."""
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)


def markdown(tables: Sequence[Table]) -> str:
    """Returns tables as Markdown, each after its caption."""

    def escape(text: str) -> str:
        return html.escape(text, quote=False)  # Markdown lets HTML through

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(escape(c).replace("|", r"\|") for c in cells) + " |"

    return "\n\n".join(
        "\n".join(
            [
                escape(table.caption),
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
    """Returns tables as LaTeX that needs no package."""

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
    escaped = "".join(_LATEX.get(character, character) for character in cell)
    return re.sub(r"^([-+])(?=[\d.])", r"$\1$", escaped)
