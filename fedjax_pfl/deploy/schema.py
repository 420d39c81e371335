"""The form of everything that comes from another machine or another process, as data.

`check` compares a value with a form and raises `InvalidError`, whose one line never quotes the
value. A form is one of the tuples below; `Fields` hold forms by name. What a form cannot say, such
as that two lists have the same length, is checked where the message is used.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class InvalidError(Exception):
    """A value does not have its form; one line that says where, without the value."""


class Integer(NamedTuple):
    """A whole number."""

    least: int
    most: int


class Real(NamedTuple):
    """A finite number."""

    least: float
    most: float


class Flag(NamedTuple):
    """True or false."""


class Text(NamedTuple):
    """Text that matches a pattern from its first to its last character."""

    pattern: str


class Choice(NamedTuple):
    """One of some words."""

    options: tuple[str, ...]


class Items(NamedTuple):
    """A list of values of one form."""

    of: Any
    most: int
    least: int = 0


class Pair(NamedTuple):
    """A list of two values."""

    first: Any
    second: Any


class Table(NamedTuple):
    """Values of one form under names that match a pattern."""

    names: Text
    of: Any
    most: int


class Fields(NamedTuple):
    """Values under known names; no other name may be there."""

    required: Mapping[str, Any]
    optional: Mapping[str, Any] = {}


class Either(NamedTuple):
    """A value of one of two forms, told apart by the JSON type of the first."""

    first: Any
    second: Any


class ByKind(NamedTuple):
    """Fields whose form depends on the word under `kind`."""

    kinds: Mapping[str, Any]


class Settings(NamedTuple):
    """Values of a configuration, which checks them itself: bounded in depth and length only."""

    depth: int = 8


_MOST_SETTINGS = 1000  # values in one group or list of settings


def check(form: Any, value: Any, path: str) -> None:
    """Raises InvalidError unless `value` has the form.

    Args:
      path: name of the value in the error.
    """
    match form:
        case Integer(least, most):
            _need(type(value) is int and least <= value <= most, path,
                  f"a whole number from {least} to {most}")  # fmt: skip
        case Real(least, most):
            is_finite = type(value) in (int, float) and -math.inf < value < math.inf
            _need(is_finite and least <= value <= most, path, f"a number from {least} to {most}")
        case Flag():
            _need(type(value) is bool, path, "true or false")
        case Text(pattern):
            matches = isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII)
            _need(matches, path, f"text of the form {pattern}")
        case Choice(options):
            is_option = isinstance(value, str) and value in options
            _need(is_option, path, " or ".join(options))
        case Items(of, most, least):
            _need(isinstance(value, list) and least <= len(value) <= most, path,
                  f"a list of {least} to {most} values")  # fmt: skip
            for i, item in enumerate(value):
                check(of, item, f"{path}[{i}]")
        case Pair(first, second):
            _need(isinstance(value, list) and len(value) == 2, path, "a list of two values")
            check(first, value[0], f"{path}[0]")
            check(second, value[1], f"{path}[1]")
        case Table(names, of, most):
            _need(isinstance(value, dict) and len(value) <= most, path,
                  f"an object of at most {most} values")  # fmt: skip
            for number, name in enumerate(value):
                check(names, name, f"name {number} in {path}")
                check(of, value[name], f"{path}.{name}")
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
            raise TypeError(f"{form} is no form")


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
    for name, form in fields.items():
        if name in value:
            check(form, value[name], f"{path}.{name}")


def _check_settings(value: Any, depth: int, path: str) -> None:
    requirement = f"settings: numbers, text and groups of them, at most {_MOST_SETTINGS} together"
    _need(depth >= 0, path, requirement)
    if isinstance(value, dict):
        _need(len(value) <= _MOST_SETTINGS, path, requirement)
        for number, name in enumerate(value):
            check(NAME, name, f"name {number} in {path}")
            _check_settings(value[name], depth - 1, f"{path}.{name}")
    elif isinstance(value, list):
        _need(len(value) <= _MOST_SETTINGS, path, requirement)
        for i, item in enumerate(value):
            _check_settings(item, depth - 1, f"{path}[{i}]")
    elif isinstance(value, str):
        _need(len(value) <= 1000, path, requirement)
    elif value is not None and type(value) is not bool:
        check(Either(Integer(-(2**53), 2**53), Real(-1e300, 1e300)), value, path)


# The forms of messages.

MOST_CLIENTS = 1_000_000
MOST_ROUNDS = 999_999_999
MOST_EXAMPLES = 100_000_000  # of one node
MOST_ELEMENTS = 2**28  # numbers of one example, or of one constant
MOST_OUTPUTS = 1_000_000
MOST_NAMES = 100_000
LEAST_ROWS = 20  # that a node's sums are taken over, unless its file says otherwise
LARGEST = 1e30  # of a mean; squares of it still are finite in float64
ENROL, TRAIN, EVALUATE = "enrol", "train", "evaluate"

NAME = Text(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
# Names that people have chosen, without control characters, halves of a character, and marks that
# change the direction of writing.
SPOKEN = Text(
    r"[^\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]{1,200}"
)
RUN = Text(r"[0-9a-f]{4,64}")
DIGEST = Text(r"[0-9a-f]{64}")
CLIENT = Integer(0, MOST_CLIENTS - 1)
ROUND = Integer(0, MOST_ROUNDS)
SETTLED = Integer(-1, MOST_ROUNDS)
_COUNT = Integer(0, MOST_EXAMPLES)
_SHAPE = Items(Integer(0, MOST_ELEMENTS), 8)
_NUMBERS = Choice(("bool", "uint8", "int32", "float32"))
_SPLITS = {"train": Integer(1, MOST_EXAMPLES), "validation": _COUNT, "test": _COUNT}
_WIDTHS = dict.fromkeys(_SPLITS, Integer(1, MOST_EXAMPLES))
_CONSTANT = Pair(_NUMBERS, _SHAPE)

# What all nodes must say alike, see `enrolment.agreed`.
ALIKE = {
    "input_shape": Items(Integer(1, MOST_ELEMENTS), 8, 1),
    "input_dtype": _NUMBERS,
    "each": _SHAPE,
    "target": Pair(_NUMBERS, _SHAPE),
    "outputs": Integer(1, MOST_OUTPUTS),
    "constants": Fields({}, dict.fromkeys(("scale", "shift", "label_map", "classes"), _CONSTANT)),
}
ALIKE_OPTIONAL = {
    "classes": Items(SPOKEN, MOST_NAMES, 1),
    "input": DIGEST,
    "normalise": Fields({"features": Items(Flag(), MOST_NAMES), "targets": Flag()}),
}
SUMS = Fields(
    {
        "n": Integer(1, MOST_EXAMPLES * 1000),
        "mean": Items(Real(-LARGEST, LARGEST), MOST_NAMES, 1),
        "m2": Items(Real(0, LARGEST**2 * MOST_EXAMPLES), MOST_NAMES, 1),
    }
)
DESCRIBED = Fields(
    {
        **ALIKE,
        "counts": Fields(_SPLITS),
        "widths": Fields(_WIDTHS),
        "stored_dtype": _NUMBERS,
    },
    {**ALIKE_OPTIONAL, "sums": SUMS},
)
FEDERATION = Fields(
    {
        "counts": Items(Fields(_SPLITS), MOST_CLIENTS, 1),
        "held_out": Integer(0, MOST_CLIENTS),
        "groups": Integer(1, 1000),
        "alike": Fields(ALIKE, ALIKE_OPTIONAL),
        "widths": Fields(_WIDTHS),
        "stored_dtype": _NUMBERS,
    },
    {
        "mean": Items(Real(-LARGEST, LARGEST), MOST_NAMES, 1),
        "deviation": Items(Real(1 / LARGEST, LARGEST**1.5), MOST_NAMES, 1),
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
_OF_CLIENT = {"run": RUN, "client": CLIENT, "request": DIGEST}
_REFUSED = "refused"
REFUSAL = Fields({"kind": Choice((_REFUSED,)), "why": Text(r"(?s:.){0,1000}")})
ANSWER = ByKind(
    {
        ENROL: Fields({"kind": Choice((ENROL,)), **_OF_CLIENT, "described": DESCRIBED}),
        TRAIN: Fields({"kind": Choice((TRAIN,)), **_OF_CLIENT, "round": ROUND, "finite": Flag()}),
        EVALUATE: Fields({"kind": Choice((EVALUATE,)), **_OF_CLIENT, "round": ROUND}),
        _REFUSED: REFUSAL,
    }
)

# The forms of files.

VISIT = Fields(
    {
        "round": ROUND,
        "start": Integer(0, 2**53),
        "request": DIGEST,
        "answer_bytes": Integer(0, 2**40),
    }
)
CLIENT_FILE = Fields({"client": CLIENT})  # client.json of a node's folder
# enrolled.json of a run at a node, as digests: the settings that it was asked with, its examples,
# and the federation that its first request of a round described
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
                "least": Integer(0, MOST_CLIENTS),
                "tries": Integer(1, MOST_ROUNDS),
            },
        )
    },
)  # the file of a run that the server's app is given
KEYS = Table(Text("0|[1-9][0-9]{0,6}"), DIGEST, MOST_CLIENTS)
OUTCOME = Fields({}, {"directory": Text(r"(?s:.){1,4096}"), "error": Text(r"(?s:.){0,2000}")})
_VOCABULARY = Either(Integer(1, MOST_OUTPUTS), Items(SPOKEN, MOST_NAMES, 1))
NODE_FILE_OWN = {
    "client": CLIENT,
    "labels": _VOCABULARY,
    "words": Table(SPOKEN, _VOCABULARY, 1000),
    "least_rows": Integer(1, MOST_EXAMPLES),
    "code": Items(Text(r"[\w.]{1,200}:\w{1,200}"), 100),
}
