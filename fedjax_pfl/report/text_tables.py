"""Tables as plain text, Markdown, LaTeX and CSV."""

import csv
import html
import io
import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from fedjax_pfl.report import csv_text

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
    "ε": r"$\varepsilon$",
    "δ": r"$\delta$",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    '"': "''",
}


class Table(NamedTuple):
    """A table of text cells; each row starts with its label."""

    caption: str
    heads: list[str]  # column heads, without the labels' head
    rows: list[list[str]]  # [label, cell for each head]
    variants: Sequence[list[str]] = ()  # rows of this library's variants of methods
    title: str = ""  # heading on a page
    best: Sequence[int] = ()  # per head: 1 if higher is better, -1 if lower is better, 0 if neither

    @property
    def all_rows(self) -> list[list[str]]:
        """Returns `rows`, then `variants`."""
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
    """Returns a paragraph wrapped to the width of the tables, 100 columns."""
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
    """Returns tables as LaTeX for the package booktabs, with the best values of columns in bold."""
    return "\n\n".join(map(_latex_table, tables))


def _latex_table(table: Table) -> str:
    """Returns a table as a LaTeX `table` environment."""
    best = best_values(table)

    def cell(text: str, column: int) -> str:
        is_best = best[column] is not None and _value(text) == best[column]
        return rf"\textbf{{{_escaped(text)}}}" if is_best else _escaped(text)

    def line(label: str, *cells: str) -> str:
        return " & ".join([_escaped(label), *map(cell, cells, range(len(cells)))]) + r" \\"

    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_escaped(table.caption)}}}",
        r"\footnotesize\setlength{\tabcolsep}{3pt}",  # eight columns fit the width of an article
        rf"\begin{{tabular}}{{l{'r' * len(table.heads)}}}",
        r"\toprule",
        line("", *table.heads),
        r"\midrule",
        *(line(*row) for row in table.rows),
        *([r"\midrule", rf"{LINE} \\"] if table.variants else []),
        *(line(*row) for row in table.variants),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines)


def best_values(table: Table) -> list[float | None]:
    """Returns the best value of each column as printed, without deviations, one for each head.

    It is None if `Table.best` is 0 for the column, or if all its values are equal.
    """
    best: list[float | None] = []
    for column, sign in enumerate(table.best or [0] * len(table.heads), 1):
        values = {_value(row[column]) for row in table.all_rows}
        numbers = sorted(sign * value for value in values if value is not None)
        best.append(sign * numbers[-1] if sign and len(numbers) > 1 else None)
    return best


def _value(cell: str) -> float | None:
    """Returns the number at the start of a cell, such as 12.3 of "12.3 ± 0.4", or None if none."""
    try:
        return float(cell.split(" ")[0].replace(",", ""))
    except ValueError:
        return None


def as_csv(table: Table) -> str:
    """Returns heads and cells of a table as CSV, without its caption; `variants` come last."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(
        map(csv_text.escaped, row) for row in [["", *table.heads], *table.all_rows]
    )
    return buffer.getvalue().rstrip("\n")


def _escaped(cell: str) -> str:
    escaped = "".join(_LATEX.get(character, character) for character in cell)
    return re.sub(r"^([-+])(?=[\d.])", r"$\1$", escaped)
