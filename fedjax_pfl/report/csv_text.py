"""CSV files whose text a spreadsheet does not evaluate as formulas."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

_FORMULA = re.compile(r"'*[=+\-@\t\r]")  # start of a cell that a spreadsheet may evaluate


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a CSV header and rows; columns in order of appearance, missing cells are empty."""
    names, file = list(dict.fromkeys(name for row in rows for name in row)), io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: escaped(value) for name, value in row.items()} for row in rows)
    return file.getvalue()


def escaped(value: Any) -> Any:
    """Returns a cell's value.

    Text that a spreadsheet would run as a formula gets an apostrophe in front.
    """
    if not isinstance(value, str) or not _FORMULA.match(value) or _is_number(value):
        return value
    return f"'{value}"


def unescaped(text: str) -> str:
    """Returns the text without the apostrophe that `escaped` added."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def _is_number(text: str) -> bool:
    """Returns True if Python can read the text as a float."""
    try:
        float(text)
    except ValueError:
        return False
    return True
