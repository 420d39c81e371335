"""Checks of all data that comes from another machine or process.

A check is a function of a value and of the value's name. It raises `InvalidError`, whose message
never quotes the value. Conditions between values, such as equal lengths of two lists, are checked
where a message is used.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any, str], None]  # takes decoded JSON and its name for the error


class InvalidError(Exception):
    """Error: received data fails a check. The message names the place, not the value."""


def _need(condition: Any, path: str, requirement: str) -> None:
    """Raises InvalidError unless the condition holds for the value named `path`."""
    if not condition:
        raise InvalidError(f"{path} must be {requirement}")


def _condition(requirement: str, is_valid: Callable[[Any], Any]) -> Check:
    """Returns the check that `is_valid` is true for a value; `requirement` is for the error."""
    return lambda value, path: _need(is_valid(value), path, requirement)


def integer(minimum: int, maximum: int) -> Check:
    """Returns a check that a value is an integer from `minimum` to `maximum`."""
    return _condition(
        f"a whole number from {minimum} to {maximum}",
        lambda value: type(value) is int and minimum <= value <= maximum,
    )


def real(minimum: float, maximum: float) -> Check:
    """Returns a check that a value is a number from `minimum` to `maximum`, both finite."""
    return _condition(
        f"a number from {minimum} to {maximum}",
        lambda value: type(value) in (int, float) and minimum <= value <= maximum,
    )


def text(pattern: str) -> Check:
    """Returns a check that a value is text and matches a regular expression as a whole."""
    return _condition(
        f"text of the form {pattern}",
        lambda value: isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII),
    )


def choice(*options: str) -> Check:
    """Returns a check that a value is one of the strings `options`."""
    return _condition(
        " or ".join(options), lambda value: isinstance(value, str) and value in options
    )


def items(item: Check, maximum: int, minimum: int = 0) -> Check:
    """Returns a check that a value is a list of `minimum` to `maximum` values that pass `item`."""

    def check(value: Any, path: str) -> None:
        is_valid = isinstance(value, list) and minimum <= len(value) <= maximum
        _need(is_valid, path, f"a list of {minimum} to {maximum} values")
        for i, element in enumerate(value):
            item(element, f"{path}[{i}]")

    return check


def pair(first: Check, second: Check) -> Check:
    """Returns a check that a value is a list of two values, which pass `first` and `second`."""

    def check(value: Any, path: str) -> None:
        _need(isinstance(value, list) and len(value) == 2, path, "a list of two values")
        first(value[0], f"{path}[0]")
        second(value[1], f"{path}[1]")

    return check


def table(name: Check, item: Check, maximum: int) -> Check:
    """Returns a check that a value is an object (dict) of at most `maximum` fields.

    All names must pass `name`, and all values `item`.
    """

    def check(value: Any, path: str) -> None:
        is_valid = isinstance(value, dict) and len(value) <= maximum
        _need(is_valid, path, f"an object of at most {maximum} values")
        for number, key in enumerate(value):
            name(key, f"name {number} in {path}")
            item(value[key], f"{path}.{key}")

    return check


def fields(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Returns a check that a value is an object (dict) with these fields, and no others.

    Args:
      required: Check of each field that must exist, by name.
      optional: Check of each field that may exist, by name.
    """
    checks = {**required, **(optional or {})}

    def check(value: Any, path: str) -> None:
        _need(isinstance(value, dict), path, "an object")
        for name in required:
            _need(name in value, path, f"an object with the field {name}")
        names = ", ".join(checks)
        _need(set(value) <= set(checks), path, f"an object without fields but {names}")
        for name, field in checks.items():
            if name in value:
                field(value[name], f"{path}.{name}")

    return check


def integer_or(integer_check: Check, value_check: Check) -> Check:
    """Returns the check of an integer by `integer_check` and of other values by `value_check`."""
    return lambda value, path: (integer_check if type(value) is int else value_check)(value, path)


def by_kind(fields_of: Mapping[str, Mapping[str, Check]]) -> Check:
    """Returns a check that a value is an object (dict) whose field `kind` decides its other fields.

    `fields_of` maps each kind to the checks of its other fields.
    """
    known_kind = choice(*fields_of)
    checks = {kind: fields({"kind": known_kind, **extra}) for kind, extra in fields_of.items()}

    def check(value: Any, path: str) -> None:
        kind: Any = value.get("kind") if isinstance(value, dict) else None
        known_kind(kind, f"{path}.kind")
        checks[kind](value, path)

    return check


_MAX_SETTINGS = 1000  # values in one group or list of settings


def settings(value: Any, path: str, depth: int = 8) -> None:
    """Raises InvalidError unless a value is a setting, or a group (dict) or list of settings.

    Checks types, lengths, names and ranges of numbers; their configuration checks the values.
    `depth` is the largest number of groups and lists inside each other.
    """
    requirement = f"settings: numbers, text and groups of them, at most {_MAX_SETTINGS} together"
    _need(depth >= 0, path, requirement)
    if isinstance(value, dict | list):
        _need(len(value) <= _MAX_SETTINGS, path, requirement)
    if isinstance(value, dict):
        for number, name in enumerate(value):
            NAME(name, f"name {number} in {path}")
            settings(value[name], f"{path}.{name}", depth - 1)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            settings(item, f"{path}[{i}]", depth - 1)
    elif isinstance(value, str):
        _need(len(value) <= 1000, path, requirement)
    elif value is not None and type(value) is not bool:
        integer_or(integer(-(2**53), 2**53), real(-1e300, 1e300))(value, path)


# Checks of messages.

MAX_CLIENTS = 1_000_000
MAX_ROUNDS = 999_999_999
MAX_EXAMPLES = 100_000_000  # per node
MAX_ELEMENTS = 2**28  # numbers in one example or constant
MAX_OUTPUTS = 1_000_000
MAX_NAMES = 100_000
MIN_ROWS = 20  # default of `least_rows` in a node's file
MAX_MEAN = 1e30  # squares are still finite in float64
ENROL, TRAIN, EVALUATE = "enrol", "train", "evaluate"

FLAG = _condition("true or false", lambda value: type(value) is bool)
NAME = text(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
# Names without control characters, surrogates, and marks that change the writing direction.
PRINTABLE_NAME = text(
    r"[^\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]{1,200}"
)
RUN = text(r"[0-9a-f]{4,64}")
DIGEST = text(r"[0-9a-f]{64}")
CLIENT = integer(0, MAX_CLIENTS - 1)
ROUND = integer(0, MAX_ROUNDS)
_COUNT = integer(0, MAX_EXAMPLES)
_SHAPE = items(integer(0, MAX_ELEMENTS), 8)
_NUMBERS = choice("bool", "uint8", "int32", "float32")
_SPLITS = {"train": integer(1, MAX_EXAMPLES), "validation": _COUNT, "test": _COUNT}
_WIDTHS = dict.fromkeys(_SPLITS, integer(1, MAX_EXAMPLES))
_CONSTANT = pair(_NUMBERS, _SHAPE)

# Fields that must be equal at all nodes.
_SHARED_FIELDS = {
    "input_shape": items(integer(1, MAX_ELEMENTS), 8, 1),
    "input_dtype": _NUMBERS,
    "each": _SHAPE,
    "target": pair(_NUMBERS, _SHAPE),
    "outputs": integer(1, MAX_OUTPUTS),
    "constants": fields({}, dict.fromkeys(("scale", "shift", "label_map", "classes"), _CONSTANT)),
}
_SHARED_OPTIONAL_FIELDS = {
    "classes": items(PRINTABLE_NAME, MAX_NAMES, 1),
    "input": DIGEST,
    "normalise": fields({"features": items(FLAG, MAX_NAMES), "targets": FLAG}),
}
SHARED_NAMES = (*_SHARED_FIELDS, *_SHARED_OPTIONAL_FIELDS)


def shared_fields(description: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a node's description that must be equal at all nodes."""
    return {name: description[name] for name in SHARED_NAMES if name in description}


_SUMS = fields(
    {
        "n": integer(1, MAX_EXAMPLES * 1000),
        "mean": items(real(-MAX_MEAN, MAX_MEAN), MAX_NAMES, 1),
        "m2": items(real(0, MAX_MEAN**2 * MAX_EXAMPLES), MAX_NAMES, 1),
    }
)
NODE_DESCRIPTION = fields(
    {
        **_SHARED_FIELDS,
        "counts": fields(_SPLITS),
        "widths": fields(_WIDTHS),
        "stored_dtype": _NUMBERS,
    },
    {**_SHARED_OPTIONAL_FIELDS, "sums": _SUMS},
)
FEDERATION = fields(
    {
        "counts": items(fields(_SPLITS), MAX_CLIENTS, 1),
        "held_out": integer(0, MAX_CLIENTS),
        "groups": integer(1, 1000),
        "alike": fields(_SHARED_FIELDS, _SHARED_OPTIONAL_FIELDS),
        "widths": fields(_WIDTHS),
        "stored_dtype": _NUMBERS,
    },
    {
        "mean": items(real(-MAX_MEAN, MAX_MEAN), MAX_NAMES, 1),
        "deviation": items(real(1 / MAX_MEAN, MAX_MEAN**1.5), MAX_NAMES, 1),
    },
)

_START = integer(0, 2**53)
ENVELOPE = fields({}, {"start": _START})
_TO_CLIENT = {"run": RUN, "client": CLIENT, "settings": table(NAME, settings, 1000)}
_IN_ROUND = {
    **_TO_CLIENT,
    "federation": FEDERATION,
    "round": ROUND,
    "settled": integer(-1, MAX_ROUNDS),
}
REQUEST = by_kind({ENROL: _TO_CLIENT, TRAIN: _IN_ROUND, EVALUATE: {**_IN_ROUND, "last": FLAG}})
_FROM_CLIENT = {"run": RUN, "client": CLIENT, "request": DIGEST}
RESPONSE = by_kind(
    {
        ENROL: {**_FROM_CLIENT, "described": NODE_DESCRIPTION},
        TRAIN: {**_FROM_CLIENT, "round": ROUND, "finite": FLAG},
        EVALUATE: {**_FROM_CLIENT, "round": ROUND},
        "refused": {"why": text(r"(?s:.){0,1000}")},
    }
)

# Checks of files.

ROUND_RECORD = fields(
    {"round": ROUND, "start": _START, "request": DIGEST, "answer_bytes": integer(0, 2**40)}
)
CLIENT_FILE = fields({"client": CLIENT})  # client.json in a node's folder
# enrolled.json in a run's folder: digests of the settings, of the node's examples, and of the
# federation in the first training or evaluation request.
ENROLLED = fields(
    {"client": CLIENT, "settings": DIGEST, "examples": DIGEST}, {"federation": DIGEST}
)
# deployed.json of a run directory.
DEPLOYED = fields({}, {"run": RUN, "start": _START, "federation": FEDERATION})
_PATH = text(r"(?s:[^\x00]){1,4096}")
_WAITING = fields(
    {},
    {
        "seconds": real(1, 1e9),
        "min_answers": integer(0, MAX_CLIENTS),
        "tries": integer(1, MAX_ROUNDS),
    },
)
# The file of a run that the server's app is given.
RUN_FILE = fields(
    {"config": table(NAME, settings, 1000), "workdir": _PATH, "log": _PATH},
    {"waiting": _WAITING, "complete": FLAG},
)
KEYS = table(text("0|[1-9][0-9]{0,6}"), DIGEST, MAX_CLIENTS)
OUTCOME = fields({}, {"directory": text(r"(?s:.){1,4096}"), "error": text(r"(?s:.){0,2000}")})
_VOCABULARY = integer_or(integer(1, MAX_OUTPUTS), items(PRINTABLE_NAME, MAX_NAMES, 1))
OWNER_FIELDS = {
    "client": CLIENT,
    "labels": _VOCABULARY,
    "words": table(PRINTABLE_NAME, _VOCABULARY, 1000),
    "least_rows": integer(1, MAX_EXAMPLES),
    "code": items(text(r"[\w.]{1,200}:\w{1,200}"), 100),
}
