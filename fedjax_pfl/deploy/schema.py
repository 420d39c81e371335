"""Specifications of all data that comes from another machine or process.

`check` compares a value with a specification and raises `InvalidError`, whose message never quotes
the value. A specification is one of the tuples below. Conditions between values, such as equal
lengths of two lists, are checked where the message is used.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class InvalidError(Exception):
    """A value does not match its specification. The message names the place, not the value."""


class Integer(NamedTuple):
    """An integer in a range."""

    minimum: int
    maximum: int


class Real(NamedTuple):
    """A finite number in a range."""

    minimum: float
    maximum: float


class Flag(NamedTuple):
    """True or false."""


class Text(NamedTuple):
    """Text that fully matches a regular expression."""

    pattern: str


class Choice(NamedTuple):
    """One of several strings."""

    options: tuple[str, ...]


class Items(NamedTuple):
    """A list whose items match one specification."""

    item: Any
    maximum: int
    minimum: int = 0


class Pair(NamedTuple):
    """A list of two values."""

    first: Any
    second: Any


class Table(NamedTuple):
    """An object with names that match a pattern and values that match one specification."""

    names: Text
    item: Any
    maximum: int


class Fields(NamedTuple):
    """An object with the given fields and no others."""

    required: Mapping[str, Any]
    optional: Mapping[str, Any] = {}


class Either(NamedTuple):
    """A value that matches `first` if it has its JSON type, and `second` otherwise."""

    first: Any
    second: Any


class ByKind(NamedTuple):
    """An object whose specification depends on its field `kind`."""

    kinds: Mapping[str, Any]


class Settings(NamedTuple):
    """Settings, bounded in depth and length; their configuration checks the values."""

    depth: int = 8


_MAX_SETTINGS = 1000  # values in one group or list of settings


def check(spec: Any, value: Any, path: str) -> None:
    """Raises InvalidError unless a value matches a specification.

    Args:
      spec: The specification.
      value: Decoded JSON.
      path: Name of the value in the error.
    """
    match spec:
        case Integer(minimum, maximum):
            _need(type(value) is int and minimum <= value <= maximum, path,
                  f"a whole number from {minimum} to {maximum}")  # fmt: skip
        case Real(minimum, maximum):
            is_finite = type(value) in (int, float) and -math.inf < value < math.inf
            _need(
                is_finite and minimum <= value <= maximum,
                path,
                f"a number from {minimum} to {maximum}",
            )
        case Flag():
            _need(type(value) is bool, path, "true or false")
        case Text(pattern):
            matches = isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII)
            _need(matches, path, f"text of the form {pattern}")
        case Choice(options):
            is_option = isinstance(value, str) and value in options
            _need(is_option, path, " or ".join(options))
        case Items(item, maximum, minimum):
            _need(isinstance(value, list) and minimum <= len(value) <= maximum, path,
                  f"a list of {minimum} to {maximum} values")  # fmt: skip
            for i, element in enumerate(value):
                check(item, element, f"{path}[{i}]")
        case Pair(first, second):
            _need(isinstance(value, list) and len(value) == 2, path, "a list of two values")
            check(first, value[0], f"{path}[0]")
            check(second, value[1], f"{path}[1]")
        case Table(names, item, maximum):
            _need(isinstance(value, dict) and len(value) <= maximum, path,
                  f"an object of at most {maximum} values")  # fmt: skip
            for number, name in enumerate(value):
                check(names, name, f"name {number} in {path}")
                check(item, value[name], f"{path}.{name}")
        case Fields(required, optional):
            _check_fields(required, optional, value, path)
        case Either(first, second):
            simple = type(value) is int if isinstance(first, Integer) else isinstance(value, list)
            check(first if simple else second, value, path)
        case ByKind(kinds):
            kind: Any = value.get("kind") if isinstance(value, dict) else None
            check(Choice(tuple(kinds)), kind, f"{path}.kind")
            check(kinds[kind], value, path)
        case Settings(depth):
            _check_settings(value, depth, path)
        case _:
            raise TypeError(f"{spec} is not a specification")


def _need(condition: Any, path: str, requirement: str) -> None:
    if not condition:
        raise InvalidError(f"{path} must be {requirement}")


def _check_fields(
    required: Mapping[str, Any], optional: Mapping[str, Any], value: Any, path: str
) -> None:
    _need(isinstance(value, dict), path, "an object")
    for name in required:
        _need(name in value, path, f"an object with the field {name}")
    fields = {**required, **optional}
    _need(set(value) <= set(fields), path, f"an object without fields but {', '.join(fields)}")
    for name, spec in fields.items():
        if name in value:
            check(spec, value[name], f"{path}.{name}")


def _check_settings(value: Any, depth: int, path: str) -> None:
    requirement = f"settings: numbers, text and groups of them, at most {_MAX_SETTINGS} together"
    _need(depth >= 0, path, requirement)
    if isinstance(value, dict):
        _need(len(value) <= _MAX_SETTINGS, path, requirement)
        for number, name in enumerate(value):
            check(NAME, name, f"name {number} in {path}")
            _check_settings(value[name], depth - 1, f"{path}.{name}")
    elif isinstance(value, list):
        _need(len(value) <= _MAX_SETTINGS, path, requirement)
        for i, item in enumerate(value):
            _check_settings(item, depth - 1, f"{path}[{i}]")
    elif isinstance(value, str):
        _need(len(value) <= 1000, path, requirement)
    elif value is not None and type(value) is not bool:
        check(Either(Integer(-(2**53), 2**53), Real(-1e300, 1e300)), value, path)


# Specifications of messages.

MAX_CLIENTS = 1_000_000
MAX_ROUNDS = 999_999_999
MAX_EXAMPLES = 100_000_000  # per node
MAX_ELEMENTS = 2**28  # numbers in one example or constant
MAX_OUTPUTS = 1_000_000
MAX_NAMES = 100_000
MIN_ROWS = 20  # default of `least_rows` in a node's file
MAX_MEAN = 1e30  # squares are still finite in float64
ENROL, TRAIN, EVALUATE = "enrol", "train", "evaluate"

NAME = Text(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
# Names without control characters, surrogates, and marks that change the writing direction.
PRINTABLE_NAME = Text(
    r"[^\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]{1,200}"
)
RUN = Text(r"[0-9a-f]{4,64}")
DIGEST = Text(r"[0-9a-f]{64}")
CLIENT = Integer(0, MAX_CLIENTS - 1)
ROUND = Integer(0, MAX_ROUNDS)
SETTLED = Integer(-1, MAX_ROUNDS)
_COUNT = Integer(0, MAX_EXAMPLES)
_SHAPE = Items(Integer(0, MAX_ELEMENTS), 8)
_NUMBERS = Choice(("bool", "uint8", "int32", "float32"))
_SPLITS = {"train": Integer(1, MAX_EXAMPLES), "validation": _COUNT, "test": _COUNT}
_WIDTHS = dict.fromkeys(_SPLITS, Integer(1, MAX_EXAMPLES))
_CONSTANT = Pair(_NUMBERS, _SHAPE)

# Fields that must be equal at all nodes.
SHARED_FIELDS = {
    "input_shape": Items(Integer(1, MAX_ELEMENTS), 8, 1),
    "input_dtype": _NUMBERS,
    "each": _SHAPE,
    "target": Pair(_NUMBERS, _SHAPE),
    "outputs": Integer(1, MAX_OUTPUTS),
    "constants": Fields({}, dict.fromkeys(("scale", "shift", "label_map", "classes"), _CONSTANT)),
}
SHARED_OPTIONAL_FIELDS = {
    "classes": Items(PRINTABLE_NAME, MAX_NAMES, 1),
    "input": DIGEST,
    "normalise": Fields({"features": Items(Flag(), MAX_NAMES), "targets": Flag()}),
}
SUMS = Fields(
    {
        "n": Integer(1, MAX_EXAMPLES * 1000),
        "mean": Items(Real(-MAX_MEAN, MAX_MEAN), MAX_NAMES, 1),
        "m2": Items(Real(0, MAX_MEAN**2 * MAX_EXAMPLES), MAX_NAMES, 1),
    }
)
NODE_DESCRIPTION = Fields(
    {
        **SHARED_FIELDS,
        "counts": Fields(_SPLITS),
        "widths": Fields(_WIDTHS),
        "stored_dtype": _NUMBERS,
    },
    {**SHARED_OPTIONAL_FIELDS, "sums": SUMS},
)
FEDERATION = Fields(
    {
        "counts": Items(Fields(_SPLITS), MAX_CLIENTS, 1),
        "held_out": Integer(0, MAX_CLIENTS),
        "groups": Integer(1, 1000),
        "alike": Fields(SHARED_FIELDS, SHARED_OPTIONAL_FIELDS),
        "widths": Fields(_WIDTHS),
        "stored_dtype": _NUMBERS,
    },
    {
        "mean": Items(Real(-MAX_MEAN, MAX_MEAN), MAX_NAMES, 1),
        "deviation": Items(Real(1 / MAX_MEAN, MAX_MEAN**1.5), MAX_NAMES, 1),
    },
)

ENVELOPE = Fields({}, {"start": Integer(0, 2**53)})
_TO_CLIENT = {"run": RUN, "client": CLIENT, "settings": Table(NAME, Settings(), 1000)}
_IN_ROUND = {**_TO_CLIENT, "federation": FEDERATION, "round": ROUND, "settled": SETTLED}
REQUEST = ByKind(
    {
        ENROL: Fields({"kind": Choice((ENROL,)), **_TO_CLIENT}),
        TRAIN: Fields({"kind": Choice((TRAIN,)), **_IN_ROUND}),
        EVALUATE: Fields({"kind": Choice((EVALUATE,)), **_IN_ROUND, "last": Flag()}),
    }
)
_FROM_CLIENT = {"run": RUN, "client": CLIENT, "request": DIGEST}
_REFUSED = "refused"
REFUSAL = Fields({"kind": Choice((_REFUSED,)), "why": Text(r"(?s:.){0,1000}")})
RESPONSE = ByKind(
    {
        ENROL: Fields({"kind": Choice((ENROL,)), **_FROM_CLIENT, "described": NODE_DESCRIPTION}),
        TRAIN: Fields({"kind": Choice((TRAIN,)), **_FROM_CLIENT, "round": ROUND, "finite": Flag()}),
        EVALUATE: Fields({"kind": Choice((EVALUATE,)), **_FROM_CLIENT, "round": ROUND}),
        _REFUSED: REFUSAL,
    }
)

# Specifications of files.

ROUND_RECORD = Fields(
    {
        "round": ROUND,
        "start": Integer(0, 2**53),
        "request": DIGEST,
        "answer_bytes": Integer(0, 2**40),
    }
)
CLIENT_FILE = Fields({"client": CLIENT})  # client.json in a node's folder
# enrolled.json in a run's folder: digests of the settings, of the node's examples, and of the
# federation in the first training or evaluation request.
ENROLLED = Fields(
    {"client": CLIENT, "settings": DIGEST, "examples": DIGEST}, {"federation": DIGEST}
)
DEPLOYED = Fields(
    {}, {"run": RUN, "starts": Integer(0, 2**53), "federation": FEDERATION}
)  # deployed.json of a run directory
_PATH = Text(r"(?s:[^\x00]){1,4096}")
RUN_FILE = Fields(
    {"config": Table(NAME, Settings(), 1000), "workdir": _PATH, "log": _PATH},
    {
        "waiting": Fields(
            {},
            {
                "seconds": Real(1, 1e9),
                "least": Integer(0, MAX_CLIENTS),
                "tries": Integer(1, MAX_ROUNDS),
            },
        )
    },
)  # the file of a run that the server's app is given
KEYS = Table(Text("0|[1-9][0-9]{0,6}"), DIGEST, MAX_CLIENTS)
OUTCOME = Fields({}, {"directory": Text(r"(?s:.){1,4096}"), "error": Text(r"(?s:.){0,2000}")})
_VOCABULARY = Either(Integer(1, MAX_OUTPUTS), Items(PRINTABLE_NAME, MAX_NAMES, 1))
OWNER_FIELDS = {
    "client": CLIENT,
    "labels": _VOCABULARY,
    "words": Table(PRINTABLE_NAME, _VOCABULARY, 1000),
    "least_rows": Integer(1, MAX_EXAMPLES),
    "code": Items(Text(r"[\w.]{1,200}:\w{1,200}"), 100),
}
