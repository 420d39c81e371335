"""CSV files whose texts a spreadsheet takes for text, not for formulas."""

import csv
import re
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

_FORMULA = re.compile(r"'*[=+\-@\t\r]")  # how a cell begins that a spreadsheet may evaluate


def write(file: TextIO, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows with a first line of names; a row may lack some of them."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: escaped(value) for name, value in row.items()} for row in rows)


def escaped(value: Any) -> Any:
    """Returns a text with an apostrophe in front if a spreadsheet would evaluate it."""
    if not isinstance(value, str) or not _FORMULA.match(value) or _is_number(value):
        return value
    return f"'{value}"


def unescaped(text: str) -> str:
    """Returns the text that `escaped` was given."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
