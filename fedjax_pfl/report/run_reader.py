"""A run as its report, a comparison, an export and a search over settings see it.

`Run` is what a run hands over when it ends, and what `read` finds in a directory of another day.
Everything that is read is checked here, once: whoever has a Run need not doubt its types.
"""

import csv
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data.sources import reads_own_files
from fedjax_pfl.report import csv_tables
from fedjax_pfl.settings import configuration

Record = Mapping[str, Any]  # one line of metrics.jsonl
CONFIG, METRICS, CLIENTS, TRAFFIC, MADE, REPORT, EXAMPLES = (
    "config.json",
    "metrics.jsonl",
    "clients.csv",
    "traffic.json",
    "made.json",
    "report.html",
    "data.json",
)
STAGES = ("before", "after", "validation")
_DEEPEST = 12  # levels of settings in settings, of which there are three
_LARGEST = 10**30  # of a number, which a float can hold
_TEXTS = {"owner"}  # columns of clients.csv that hold no numbers


class Run(NamedTuple):
    """A run, finished or not."""

    directory: Path
    config: Mapping[str, Any]
    metrics: Sequence[Record]  # a line per evaluation
    clients: Sequence[Mapping[str, Any]] = ()  # a row per client; none before the end
    traffic: Mapping[str, Any] = {}  # bytes by layer and direction, likewise
    made: Mapping[str, Any] = {}  # the command, the versions and the date
    finished: bool = True
    # digest of the examples of files; "": the configuration says which examples; None: unknown
    examples: str | None = ""

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))


class _Odd(ValueError):
    """What is wrong in a file."""


def read(directory: Path) -> Run:
    """One run directory; UsageError where it is none, is damaged or has no evaluation yet."""
    missing = [n for n in (CONFIG, METRICS) if not (directory / n).is_file()]
    if missing:
        raise UsageError(f"{directory} is not a run directory: it lacks {' and '.join(missing)}")
    finished = (directory / REPORT).is_file()
    config = read_config(directory)
    again = "give the run's command again, which writes it anew"
    metrics = _reading(directory / METRICS, again, lambda path: list(_lines(path, finished)))
    if not metrics:
        raise UsageError(f"{directory} has nothing to show yet: {METRICS} holds no evaluation")
    clients: list[dict[str, Any]] = []
    traffic: Mapping[str, Any] = {}
    if finished:
        if (directory / CLIENTS).is_file():
            clients = _reading(directory / CLIENTS, again, _clients)
        if (directory / TRAFFIC).is_file():
            traffic = _reading(directory / TRAFFIC, again, _traffic)
    made = read_made(directory)
    examples = examples_of(directory, config)
    return Run(directory, config, metrics, clients, traffic, made, finished, examples)


def read_config(directory: Path) -> dict[str, Any]:
    """The configuration of a run directory; UsageError where it is damaged."""
    hint = "bring it back from a copy or choose another directory"
    return _reading(directory / CONFIG, hint, _config)


def read_made(directory: Path) -> dict[str, Any]:
    """Command, versions and date, as far as they are there: nothing depends on them."""
    try:
        found = _json(directory / MADE)
        return {str(key): str(value) for key, value in found.items()}
    except (OSError, ValueError):
        return {}


def examples_of(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Returns the digest of a run's examples: "" if it reads no files, None if it is unknown."""
    return read_examples(directory) if reads_own_files(str(config.get("dataset"))) else ""


def read_examples(directory: Path) -> str | None:
    """Returns the digest in data.json, or None if it is missing or damaged."""
    try:
        return str(_json(directory / EXAMPLES)["digest"])
    except (OSError, ValueError, KeyError):
        return None


def read_deviation(directory: Path) -> float | None:
    """That of a regression's targets, as far as it is there: nothing depends on it."""
    try:
        found = float(_json(directory / EXAMPLES)["score_deviation"])
        return found if 0 < found < _LARGEST else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _reading(path: Path, hint: str, content: Callable[[Path], Any]) -> Any:
    try:
        return content(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, csv.Error) as error:
        why = str(error) if isinstance(error, _Odd) else "it is not what a run writes"
        raise UsageError(f"{path} is damaged ({why}); {hint}") from None


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise _Odd("it is nested too deep") from None
    except ValueError:
        raise _Odd("it is not JSON") from None


def _json(path: Path) -> dict[str, Any]:
    found = _loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise _Odd("it holds no group of values by name")
    left: list[tuple[Any, int]] = [(found, 0)]
    while left:
        value, depth = left.pop()
        if depth > _DEEPEST:
            raise _Odd("it is nested too deep")
        inner = value.values() if isinstance(value, dict) else value
        if isinstance(value, dict | list):
            left += [(one, depth + 1) for one in inner]
    return found


def as_read(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as it comes back from a run directory: tuples are lists."""
    return json.loads(json.dumps(config))


@functools.cache
def known_settings() -> Mapping[str, Any]:
    """All settings at their defaults, as a run directory would have them."""
    return as_read(configuration.default().to_dict())


def _config(path: Path) -> dict[str, Any]:
    found = _json(path)
    if "rounds" not in found:
        raise _Odd("it has no rounds")
    for key, value in found.items():
        usual = known_settings().get(key)
        if usual is None or value is None:
            continue
        kinds = (int, float) if isinstance(usual, float) else (type(usual),)
        if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(usual, bool):
            raise _Odd(f"{key} is {json.dumps(value)[:40]}")
    if not all(isinstance(phase, dict) for phase in found.get("phases") or []):
        raise _Odd("phases are no groups of settings")
    return found


def _lines(path: Path, finished: bool) -> Iterator[dict[str, Any]]:
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    for number, text in enumerate(lines, 1):
        try:
            line = _loads(text)
        except ValueError:
            if number == len(lines) and not finished:
                return  # a run that is going on may be half-way through its last line
            raise
        if problem := _problem(line):
            raise _Odd(f"line {number}: {problem}")
        yield line


def _problem(line: Any) -> str:
    """What is wrong with an evaluation."""
    if not isinstance(line, dict):
        return "it is no group of values by name"
    if not isinstance(line.get("round"), int) or not _is_number(line["round"]):
        return "it has no round"
    for key, value in line.items():
        if key in STAGES:
            if value is not None and not isinstance(value, dict):
                return f"{key} is {json.dumps(value)[:40]}"
            for name, score in (value or {}).items():
                if not _is_number(score):
                    return f"{key}.{name} is {json.dumps(score)[:40]}"
        elif key == "observed":
            if not isinstance(value, dict) or not all(map(_are_numbers, value.values())):
                return "observed is no group of numbers by name"
        elif key == "own_metrics":
            if not isinstance(value, dict) or not all(isinstance(v, dict) for v in value.values()):
                return "own_metrics is no group of metrics by name"
        elif key in ("dead", "remarks"):
            if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
                return f"{key} is no list of texts"
        elif not _is_number(value):
            return f"{key} is {json.dumps(value)[:40]}"
    return ""


def _are_numbers(value: Any) -> bool:
    return all(map(_is_number, value.values() if isinstance(value, dict) else [value]))


def _is_number(value: Any) -> bool:
    """Or nothing, where there was none."""
    if value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) < _LARGEST


def _clients(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    if "client" not in (reader.fieldnames or ()) or not rows:
        raise _Odd("it is no table of clients")
    found = []
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise _Odd(f"row {number} is not as long as the others")
        found.append({key: _cell(key, value, number) for key, value in row.items()})
    return found


def _cell(column: str, text: str, row: int) -> Any:
    """Numbers as numbers, and None where there is none."""
    if column in _TEXTS:
        return csv_tables.unescaped(text)
    if not text:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise _Odd(f"row {row}: {column} is {text[:40]!r}")


def _traffic(path: Path) -> dict[str, Any]:
    found = _json(path)
    for direction in ("down", "up"):
        bill = found.get(direction, {})
        if not isinstance(bill, dict) or not all(map(_is_number, bill.values())):
            raise _Odd(f"{direction} is no group of bytes by layer")
        if not _is_number(found.get(f"total_{direction}")):
            raise _Odd(f"total_{direction} is no number")
    return found
