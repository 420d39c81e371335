"""Results of a run, for reports, comparisons, exports and tuning.

A finished run returns a `Run`, and `read` reads one from a run directory. Reading checks all types.
"""

import csv
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data.dataset_registry import reads_own_files
from fedjax_pfl.report import csv_text
from fedjax_pfl.settings import configuration

Record = Mapping[str, Any]  # a line of metrics.jsonl
CONFIG, METRICS, REPORT = "config.json", "metrics.jsonl", "report.html"
CLIENTS, TRAFFIC, EXAMPLES = "clients.csv", "traffic.json", "data.json"
PROVENANCE, CONFUSION = "provenance.json", "confusion.json"
STAGES = ("before", "after", "validation")
# Figures of every report; no array that `Algorithm.observe` returns can have one of these names.
OWN_FIGURES = frozenset(
    (
        *("answer", "clients", "confusion", "diagnostics", "partition", "traffic", "train_loss"),
        *("score_bytes", "score_rounds", "score_seconds"),
    )
)
_MAX_DEPTH = 12  # of nested settings; the library has three levels
_MAX_NUMBER = 10**30  # a float can hold it
_TEXT_COLUMNS = {"owner"}  # of clients.csv
_REWRITE = "run the command again to write it again"  # hint for a damaged file


class Run(NamedTuple):
    """Results of a run, finished or not, as its directory holds them.

    `examples` is the digest of the examples if they come from files, "" if the configuration
    determines them, None if unknown.
    """

    directory: Path
    config: Mapping[str, Any]  # all settings, as plain data
    metrics: Sequence[Record]  # lines of metrics.jsonl, one per evaluation
    clients: Sequence[Mapping[str, Any]] = ()  # rows of clients.csv; empty before the end
    traffic: Mapping[str, Any] = {}  # bytes by direction and layer; empty before the end
    provenance: Mapping[str, Any] = {}  # command, versions and date
    finished: bool = True
    examples: str | None = ""
    confusion: Mapping[str, Any] = {}  # as in confusion.json; empty if not counted

    @property
    def seed(self) -> int:
        """Returns the seed of the run."""
        return int(self.config.get("seed", 0))

    @property
    def rounds(self) -> int:
        """Returns the number of rounds in the settings, all phases together."""
        phases = self.config.get("phases") or [{}]
        rounds = [phase.get("rounds", self.config.get("rounds")) for phase in phases]
        return sum(count for count in rounds if isinstance(count, int))

    @property
    def ended_early(self) -> bool:
        """Returns True if the run is finished because a callback ended it before its last round."""
        return self.finished and self.metrics[-1]["round"] < self.rounds

    @property
    def on_held_out(self) -> bool:
        """Returns True if the last phase trains the held-out clients instead of the others."""
        last_phase = (self.config.get("phases") or [{}])[-1]
        return last_phase.get("participants", self.config.get("participants")) == "held_out"

    @property
    def participants(self) -> list[Mapping[str, Any]]:
        """Returns the rows of `clients` that take part in the last phase, attackers included."""
        return [row for row in self.clients if bool(row.get("active")) is not self.on_held_out]


class _InvalidFile(ValueError):
    """A file of a run directory has content that no run writes; the message says what is wrong."""


def read(directory: Path) -> Run:
    """Reads a run directory; raises UsageError if it is damaged or has no evaluation yet."""
    missing = [name for name in (CONFIG, METRICS) if not (directory / name).is_file()]
    if missing:
        raise UsageError(f"{directory} is not a run directory: it lacks {' and '.join(missing)}")
    finished = (directory / REPORT).is_file()
    config, metrics = read_config(directory), read_metrics(directory)
    if not metrics:
        raise UsageError(f"{directory} has nothing to show yet: {METRICS} holds no evaluation")

    def read_at_end(name: str, read_content: Callable[[Path], Any], default: Any) -> Any:
        """Reads a file that a run writes at its end; returns `default` if it is not there."""
        path = directory / name
        return _read_file(path, _REWRITE, read_content) if finished and path.is_file() else default

    return Run(
        directory=directory,
        config=config,
        metrics=metrics,
        clients=read_at_end(CLIENTS, _clients, []),
        confusion=read_at_end(CONFUSION, _confusion, {}),
        traffic=read_at_end(TRAFFIC, _traffic, {}),
        provenance=read_provenance(directory),
        finished=finished,
        examples=examples_of(directory, config),
    )


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Reads the evaluations of a run directory; raises UsageError if metrics.jsonl is damaged."""
    finished = (directory / REPORT).is_file()
    return _read_file(directory / METRICS, _REWRITE, lambda path: list(_lines(path, finished)))


def read_config(directory: Path) -> dict[str, Any]:
    """Reads the configuration of a run directory; raises UsageError if it is damaged."""
    hint = "restore it from a copy or choose another directory"
    return _read_file(directory / CONFIG, hint, _config)


def read_provenance(directory: Path) -> dict[str, Any]:
    """Reads command, versions and date of a run; returns {} if the file is missing or damaged."""
    return {str(key): str(value) for key, value in _intact(directory / PROVENANCE).items()}


def _intact(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, or {} if it is missing or damaged."""
    try:
        return _json(path)
    except (OSError, ValueError):
        return {}


def examples_of(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Returns the digest of a run's examples, "" if it reads no files, or None if unknown.

    The examples of a deployed run are unknown: they stay at the nodes.
    """
    if config.get("deployed"):
        return None
    return read_digest(directory) if reads_own_files(str(config.get("dataset"))) else ""


def read_digest(directory: Path, key: str = "digest") -> str | None:
    """Returns the digest of the examples in data.json, or None if that is missing or damaged.

    `key` is "digest", or "initial_weights" for the digest of that file.
    """
    value = _intact(directory / EXAMPLES).get(key)
    return None if value is None else str(value)


def read_deviation(directory: Path) -> float | None:
    """Returns the standard deviation of a regression's targets, from data.json; None: unknown."""
    value = _intact(directory / EXAMPLES).get("score_deviation")
    return value if isinstance(value, int | float) and 0 < value < _MAX_NUMBER else None


def read_class_names(directory: Path) -> list[str]:
    """Returns the names of the classes in data.json, or [] if they have none."""
    classes = _intact(directory / EXAMPLES).get("classes")
    return [str(name) for name in classes] if isinstance(classes, list) else []


def _read_file(path: Path, hint: str, read_content: Callable[[Path], Any]) -> Any:
    """Returns the result of `read_content`, which raises ValueError if the file is damaged.

    Then, or if it is unreadable, raises UsageError with `hint`, what the user can do about it.
    """
    try:
        return read_content(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, csv.Error) as error:
        why = str(error) if isinstance(error, _InvalidFile) else "its format is wrong"
        raise UsageError(f"{path} is damaged ({why}); {hint}") from None


def _parse_json(text: str) -> Any:
    """Returns the value of a JSON text; raises _InvalidFile if it is not JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise _InvalidFile("it is nested too deep") from None
    except ValueError:
        raise _InvalidFile("it is not JSON") from None


def _json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; raises _InvalidFile for other JSON or too deep nesting."""
    content = _parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise _InvalidFile("it is no JSON object")
    remaining: list[tuple[Any, int]] = [(content, 0)]
    while remaining:
        value, depth = remaining.pop()
        if depth > _MAX_DEPTH:
            raise _InvalidFile("it is nested too deep")
        inner = value.values() if isinstance(value, dict) else value
        if isinstance(value, dict | list):
            remaining += [(item, depth + 1) for item in inner]
    return content


def as_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration as a run directory stores it: tuples become lists."""
    return json.loads(json.dumps(config))


@functools.cache
def default_settings() -> Mapping[str, Any]:
    """Returns all settings at their defaults, as a run directory stores them."""
    return as_json(configuration.default().to_dict())


def _config(path: Path) -> dict[str, Any]:
    """Reads config.json at `path` and checks the types of known settings; raises _InvalidFile."""
    config = _json(path)
    if "rounds" not in config:
        raise _InvalidFile("it has no rounds")
    for key, value in config.items():
        usual = default_settings().get(key)
        if usual is None or value is None:
            continue
        kinds = (int, float) if isinstance(usual, float) else (type(usual),)
        if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(usual, bool):
            raise _InvalidFile(f"{key} is {json.dumps(value)[:40]}")
    if not all(isinstance(phase, dict) for phase in config.get("phases") or []):
        raise _InvalidFile("phases are no groups of settings")
    return config


def _lines(path: Path, finished: bool) -> Iterator[dict[str, Any]]:
    """Yields the checked lines of metrics.jsonl, up to a broken last one if not `finished`.

    Raises _InvalidFile for any other line.
    """
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    for number, text in enumerate(lines, 1):
        try:
            line = _parse_json(text)
        except ValueError:
            if number == len(lines) and not finished:
                return
            raise
        if problem := _problem(line):
            raise _InvalidFile(f"line {number}: {problem}")
        yield line


def _problem(line: Any) -> str:
    """Returns the first error in a parsed line of metrics.jsonl as text, or "" if it has none."""
    if not isinstance(line, dict):
        return "it is no JSON object"
    if not isinstance(line.get("round"), int) or not _is_number(line["round"]):
        return "it has no round"
    for key, value in line.items():
        if key in STAGES and (value is None or isinstance(value, dict)):
            for name, score in (value or {}).items():
                if not _is_number(score):
                    return f"{key}.{name} is {json.dumps(score)[:40]}"
        elif key == "diagnostics":
            if not isinstance(value, dict) or not all(map(_are_numbers, value.values())):
                return "diagnostics has a value that is no number"
        elif key == "attack_success":
            if not isinstance(value, dict) or not _are_numbers(value):
                return "attack_success has a value that is no number"
        elif key == "custom_metrics":
            if not isinstance(value, dict) or not all(isinstance(v, dict) for v in value.values()):
                return "custom_metrics has a value that is no JSON object"
        elif key in ("inactive", "remarks"):
            if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
                return f"{key} is no list of strings"
        elif key in STAGES or not _is_number(value):
            return f"{key} is {json.dumps(value)[:40]}"
    return ""


def _are_numbers(value: Any) -> bool:
    return all(map(_is_number, value.values() if isinstance(value, dict) else [value]))


def _is_number(value: Any) -> bool:
    """Returns True for None, which stands for no value, and for a number in the range of floats."""
    if value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) < _MAX_NUMBER


def _clients(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of clients.csv, for each client a dict of values by column.

    Raises _InvalidFile for other content.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    if "client" not in (reader.fieldnames or ()) or not rows:
        raise _InvalidFile("it is no table of clients")
    clients = []
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise _InvalidFile(f"row {number} is not as long as the others")
        clients.append({key: _cell(key, value, number) for key, value in row.items()})
    return clients


def _cell(column: str, text: str, row: int) -> Any:
    """Returns the value of a cell: a number, a string in a text column, or None if it is empty.

    Raises _InvalidFile for other text in a column of numbers.
    """
    if column in _TEXT_COLUMNS:
        return csv_text.unescaped(text)
    if not text:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise _InvalidFile(f"row {row}: {column} is {text[:40]!r}")


def _confusion(path: Path) -> dict[str, Any]:
    """Returns the content of confusion.json; raises _InvalidFile.

    It has the number of classes C, `classes`, and counts [C, C] of test examples, `before` and
    `after` local training, [] if not counted.
    """
    content = _json(path)
    classes = content.get("classes")
    if type(classes) is not int:
        raise _InvalidFile("it has no number of classes")
    for stage in ("before", "after"):
        matrix = content.get(stage, [])
        valid = isinstance(matrix, list) and len(matrix) in (0, classes)
        if not valid or not all(
            isinstance(row, list)
            and len(row) == classes
            and all(type(count) is int and 0 <= count < _MAX_NUMBER for count in row)
            for row in matrix
        ):
            raise _InvalidFile(f"{stage} is no matrix of {classes} by {classes} counts")
    return content


def _traffic(path: Path) -> dict[str, Any]:
    """Returns traffic.json: bytes by layer, `down` and `up`, and sums, `total_down`, `total_up`.

    Raises _InvalidFile for values that are no numbers.
    """
    traffic = _json(path)
    for direction in ("down", "up"):
        by_layer = traffic.get(direction, {})
        if not isinstance(by_layer, dict) or not all(map(_is_number, by_layer.values())):
            raise _InvalidFile(f"{direction} has a value that is no number")
        if not _is_number(traffic.get(f"total_{direction}")):
            raise _InvalidFile(f"total_{direction} is no number")
    return traffic
