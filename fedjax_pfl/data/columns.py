"""Datasets from tables: selects the input, label and owner columns and converts their values."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.core.errors import UsageError, require_one_of
from fedjax_pfl.data import labels
from fedjax_pfl.data.dataset import PADDING, Dataset, Normalisation, number_owners
from fedjax_pfl.data.numbers import as_float
from fedjax_pfl.data.tables import Table, is_number
from fedjax_pfl.data.tokens import KINDS, encode_texts

LABEL_KINDS, CATEGORIES = ("auto", "class", "number"), ("onehot", "index")
NORMALISE = ("federation", "client", "none")
_MOST_CATEGORIES = 1000
_HINT = ", normalise them (normalise, normalise_label), or leave the column out"


class Roles(NamedTuple):
    """Settings that say which columns to use and how; `ROLES` documents them."""

    owner: str  # column with the owner of a row; "": no owners
    input: str  # input columns, separated by commas; "": all except owner and label
    label: str  # column to predict
    label_kind: str  # auto (by the values), class, or number (integers as a regression)
    categories: str  # encoding of text columns: onehot, or index
    normalise: str  # moments of input numbers: over the federation, of each client, or none
    normalise_label: bool  # also normalise the target of a regression
    tokens: str = ""  # read the inputs as text: words, or bytes; "": not as text
    length: int = 64  # number of tokens of an example
    words: int = 10_000  # size of the vocabulary


ROLES = """
Args:
  owner: Column with the owner of a row, for the partition natural. Empty: no owners.
  input: Columns of the input, separated by commas. Empty: all except owner and label.
  label: Column to predict. Text and integers are classes, real numbers are a target.
  label_kind: auto, class, or number to predict integers as a regression.
  categories: Encoding of text columns: onehot, or index (place among the sorted values).
  normalise: Scale each input that is a number to mean 0 and deviation 1: by the training examples
    of all active clients (federation), by those of each client (client), or not at all (none).
  normalise_label: Scale the target of a regression too, always over the federation.
  tokens: Read the input columns as one text, a sequence of tokens: words, or bytes. Empty: no.
  length: For tokens, number of tokens to read. Shorter texts are padded with 0.
  words: For tokens, size of the vocabulary, which has the most frequent tokens of the table for
    training. 0 is no token, 1 any other token.
"""


def table_dataset(source: str, tables: tuple[Table, Table | None], roles: Roles) -> Dataset:
    """Makes a dataset whose examples are the rows of a table.

    `tables` are the table for training and, if there is one, the table for testing. `source`, such
    as csv, is the prefix of setting names in messages. Raises UsageError without rows or input
    columns, and if an input column is the label.
    """
    require_one_of(f"{source}.label_kind", roles.label_kind, LABEL_KINDS)
    require_one_of(f"{source}.categories", roles.categories, CATEGORIES)
    require_one_of(f"{source}.normalise", roles.normalise, NORMALISE)
    if roles.tokens:
        require_one_of(f"{source}.tokens", roles.tokens, tuple(KINDS))
    train, test = tables
    name = train.name
    files = [table for table in tables if table]
    for table in files:
        if not table.rows:
            raise UsageError(f"{table.name} has no rows")

    def read(column: str, setting: str, *, as_text: bool = False) -> np.ndarray:
        parts = [table.column(column, f"{source}.{setting}", as_text=as_text) for table in files]
        parts = [_class_names(t, column, part) for t, part in zip(files, parts, strict=True)]
        return _join(files, column, parts)

    parts = _label_columns(source, roles, files)
    y, outputs, label_metadata = _labels(
        source, roles, files, parts, _join(files, roles.label, parts)
    )
    inputs = [column.strip() for column in roles.input.split(",") if column.strip()]
    inputs = inputs or [c for c in train.columns if c not in (roles.owner, roles.label)]
    if not inputs:
        raise UsageError(f"{name} has no column besides label and owner; add an input column")
    if roles.label in inputs:
        raise UsageError(f"{name}: column {roles.label!r} is both input and label; choose one")
    if roles.tokens:
        x, is_number, input_metadata = _texts(source, roles, files, inputs)
    else:
        x, is_number, input_metadata = _inputs(
            name, source, roles, [(column, read(column, "input")) for column in inputs]
        )
    if y.ndim == 2 and y.dtype == x.dtype == np.int32:  # tokens of one vocabulary
        outputs = max(outputs, int(x.max()) + 1)

    def split(array: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        return array[: train.rows], array[train.rows :] if test else None

    (x_train, x_test), (y_train, y_test) = split(x), split(y)
    owners: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
    if roles.owner:
        owners = split(_owner_ids(read(roles.owner, "owner", as_text=True)))
    owner_train, owner_test, owner_names = number_owners(name, *owners)
    return Dataset(
        name=name,
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        outputs=outputs,
        scale=np.array(1 / 255, np.float32) if x.dtype == np.uint8 else None,
        shift=np.array(0, np.float32) if x.dtype == np.uint8 else None,
        owner_train=owner_train,
        owner_test=owner_test,
        owner_names=owner_names,
        normalise=_normalisation(roles, is_number, y),
        metadata={**label_metadata, **input_metadata},
    )


def _label_columns(source: str, roles: Roles, files: Sequence[Table]) -> list[np.ndarray]:
    """Returns the label column of each table: as text if label_kind is class and it has any."""
    setting = f"{source}.label"
    for table in files:
        table.require_column(roles.label, setting)
    as_text = roles.label_kind == "class" and not all(
        is_number(cell) for table in files if table.cells for cell in table.cells(roles.label)
    )
    return [table.column(roles.label, setting, as_text=as_text) for table in files]


def _join(files: Sequence[Table], column: str, parts: list[np.ndarray]) -> np.ndarray:
    """Joins the `parts` of a column, one of each table, to one array.

    Raises UsageError, which names table and column, if types differ or a value is infinite.
    """
    if len({(p.shape[1:], p.dtype.kind in "US") for p in parts}) > 1:
        raise UsageError(f"{files[0].name}: column {column!r} differs between training and test")
    if any(p.dtype == np.uint64 for p in parts) and all(_are_nonnegative(p) for p in parts):
        parts = [p.astype(np.uint64) for p in parts]  # NumPy would join them as float64
    for table, values in zip(files, parts, strict=True):
        with np.errstate(over="ignore"):  # beyond 32 bits counts as infinite
            finite = values.dtype.kind != "f" or np.isfinite(values.astype(np.float32))
        if not np.all(finite):
            rows = np.flatnonzero(~np.reshape(finite, (len(values), -1)).all(1))
            raise UsageError(
                f"{table.name}: column {column!r} is not finite in {len(rows)} rows, the first is "
                f"row {rows[0] + 1}; fill or remove these rows, or leave the column out"
            )
    return np.concatenate(parts)


def _are_nonnegative(values: np.ndarray) -> bool:
    """Returns True if the values are integers and none is negative."""
    return values.dtype.kind in "iu" and bool(np.all(values >= 0))


def _class_names(table: Table, column: str, values: np.ndarray) -> np.ndarray:
    """Returns a column's values, with class names instead of integers if its file has the names."""
    names = table.classes.get(column)
    if not names or values.ndim > 1:
        return values
    label = f"{table.name}: column {column!r}"
    return np.array(names)[labels.class_numbers(label, values, end=len(names))]


def _owner_ids(owner: np.ndarray) -> np.ndarray:
    """Returns owners [rows] as integers if all are integers from 0, else as text; 01 is text."""
    if owner.dtype.kind != "U":
        return owner if _are_nonnegative(owner) else owner.astype(str)
    try:
        numbers = owner.astype(np.int64)
    except (ValueError, OverflowError):
        return owner
    is_exact = np.array_equal(numbers.astype(str), owner) and _are_nonnegative(numbers)
    return numbers if is_exact else owner


def _normalisation(roles: Roles, is_number: np.ndarray, y: np.ndarray) -> Normalisation | None:
    """Returns the normalisation that the settings request, or None if no number is normalised.

    `is_number`, bool [features], is True for inputs that are numbers; `y` has the labels.
    """
    targets = y.dtype.kind == "f" and roles.normalise_label
    features = is_number if roles.normalise != "none" else np.zeros_like(is_number)
    if not features.any() and not targets:
        return None
    scope = "client" if roles.normalise == "client" else "federation"
    return Normalisation(scope, features, targets)


def _labels(
    source: str, roles: Roles, files: list[Table], parts: list[np.ndarray], y: np.ndarray
) -> tuple[np.ndarray, int, dict[str, Any]]:
    """Converts the label column.

    Returns y as for `Dataset`, the number of outputs, and metadata: "label", the column's name,
    and "classes", their names, if a row has one class. `parts` are the label columns of the `files`
    for training and testing, `y` the same joined. Raises UsageError for labels with several axes,
    missing values, or other class names in the test file.
    """
    name, label, kind = files[0].name, roles.label, roles.label_kind
    setting = f"{source}.label_kind"
    if y.dtype.kind in "US" and (kind == "number" or (y == "").any()):
        reason = "is text" if kind == "number" else "has empty cells"
        raise UsageError(f"{name}: column {label!r} {reason} and cannot be a label; correct it")
    if y.ndim > 2 or (y.ndim == 2 and y.dtype.kind not in "iuf"):
        raise UsageError(
            f"{name}: column {label!r} is {y.dtype} {list(y.shape)}; a label is one value, or one "
            "for each position"
        )
    if labels.are_measurements(files, parts, label, setting, kind):
        # float64 until normalisation, which needs the precision
        dtype = np.float64 if roles.normalise_label else np.float32
        targets = as_float(f"{name}: column {label!r}", y, dtype, _HINT).reshape(len(y), -1)
        return targets, targets.shape[1], {"label": label}
    names = files[0].classes.get(label, ())
    if any(file.classes.get(label, names) != names for file in files):
        raise UsageError(f"{name}: column {label!r} has other classes in {files[-1].name}")
    if y.ndim == 1 and not names:
        for file, part in zip(files, parts, strict=True):
            labels.check_present(file.name, label, part)
        numbers, classes = labels.number_classes(name, label, setting, kind, y)
        return numbers, len(classes), {"label": label, "classes": classes}
    least, end = (0, len(names)) if y.ndim == 1 else (PADDING, labels.MOST_CLASSES)
    checked = [
        labels.class_numbers(file.name, part, least=least, end=end)
        for file, part in zip(files, parts, strict=True)
    ]
    y = np.concatenate(checked)
    if y.ndim == 2:  # a class number for each position
        return y, int(y.max(initial=0)) + 1, {"label": label}
    return y, len(names), {"label": label, "classes": list(names)}


def _inputs(
    name: str, source: str, roles: Roles, columns: list[tuple[str, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Joins the input columns of dataset `name`, given by name and values.

    Returns x [rows, features], a mask, bool [features], of features that are numbers, and metadata:
    "input", the names of features, and "categories", the texts of each text column. `source`, such
    as csv, is the prefix of setting names in messages. Raises UsageError for a text column with too
    many categories.
    """
    # float64 until normalisation, which needs the precision
    dtype = np.float32 if roles.normalise == "none" else np.float64
    if any(values.ndim > 1 for _, values in columns):
        return _wide_input(name, source, columns, dtype)
    parts, features, is_number = list[np.ndarray](), list[str](), list[bool]()
    categories = dict[str, list[str]]()
    for column, values in columns:
        if values.dtype.kind not in "US":
            parts.append(as_float(f"{name}: column {column!r}", values, dtype, _HINT)[:, None])
            features, is_number = [*features, column], [*is_number, True]
            continue
        texts, place = np.unique(values, return_inverse=True)
        if len(texts) > _MOST_CATEGORIES:
            raise UsageError(
                f"{name}: column {column!r} has {len(texts):,} different texts, more than "
                f"{_MOST_CATEGORIES:,}; leave it out of {source}.input"
            )
        categories[column] = texts.tolist()
        if roles.categories == "index":
            parts.append(place[:, None])
            features, is_number = [*features, column], [*is_number, False]
        else:
            parts.append(np.eye(len(texts), dtype=np.float32)[place])
            features += [f"{column}={category}" for category in categories[column]]
            is_number += [False] * len(texts)
    x, metadata = np.concatenate(parts, 1), {"input": features, "categories": categories}
    if roles.categories == "index" and not any(is_number):  # only categories
        return x.astype(np.int32), np.array(is_number), metadata
    return x.astype(dtype if any(is_number) else np.float32), np.array(is_number), metadata


def _texts(
    source: str, roles: Roles, files: list[Table], inputs: list[str]
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Like `_inputs`, for columns of text that are joined and read as tokens.

    Returns x int32 [rows, length], a mask that is False everywhere, and metadata: "input", the
    names of the columns, and "tokens", the text of each token.
    """
    for file in files:
        for column in inputs:
            file.require_column(column, f"{source}.input")
    parts = [[" ".join(row) for row in zip(*map(f.texts, inputs), strict=True)] for f in files]
    x, vocabulary = encode_texts(source, parts, roles.tokens, roles.length, roles.words)
    metadata = {"input": inputs, "tokens": vocabulary}
    return np.concatenate(x), np.zeros(roles.length, bool), metadata


def _wide_input(
    name: str, source: str, columns: list[tuple[str, np.ndarray]], dtype: Any
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Like `_inputs`, for a single column of lists, images or tokens.

    Returns x [rows, ...], a mask of its last axis that is True for real numbers, and metadata. Real
    numbers get the float type `dtype`. Raises UsageError if there are other columns, and for values
    that are no numbers or tokens.
    """
    if len(columns) > 1:
        column = next(c for c, values in columns if values.ndim > 1)
        raise UsageError(
            f"{name}: column {column!r} has several values in a row and must be the only input; "
            f"set {source}.input={column}"
        )
    ((column, x),) = columns
    if x.dtype.kind in "US":
        raise UsageError(f"{name}: column {column!r} has lists of text; use numbers")
    if x.dtype.kind not in "iu":
        x = as_float(f"{name}: column {column!r}", x, dtype, _HINT)
        return x, np.ones(x.shape[-1], bool), {"input": [column]}
    if x.dtype != np.uint8:
        if x.min() < 0 or x.max() >= 2**31:
            raise UsageError(f"{name}: column {column!r} has integers outside 0..2^31-1")
        x = x.astype(np.int32)
    return x, np.zeros(x.shape[-1], bool), {"input": [column]}
