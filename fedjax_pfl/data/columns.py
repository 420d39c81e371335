"""From a table to examples: what goes in, what is predicted, and whose a row is."""

from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import labels
from fedjax_pfl.data.dataset import PADDING, Dataset, Keep, Normalise, kept, owned
from fedjax_pfl.data.numbers import as_float
from fedjax_pfl.data.tables import Table

LABEL_KINDS, CATEGORIES = ("auto", "class", "number"), ("onehot", "index")
NORMALISE = ("federation", "client", "none")
_MOST_CATEGORIES = 1000
_HINT = ", normalise them (normalise, normalise_label), or leave the column out"


class Roles(NamedTuple):
    """The settings that say what the columns are for."""

    owner: str
    input: str
    label: str
    label_kind: str
    categories: str
    normalise: str
    normalise_label: bool


ROLES = """
Args:
  owner: the column that says whose a row is, for partition natural; empty: rows have no owners.
  input: the columns that go in, joined by commas; empty: all but the owner's and the label.
  label: the column to predict: text and whole numbers are classes, real numbers are one target.
  label_kind: auto; class, or number (a regression) where whole numbers are meant so.
  categories: how columns of text go in: onehot, or index, their place among all, sorted.
  normalise: mean 0 and deviation 1 of each input that is a number: by the training examples of all
    clients that train (federation), by each client's own (client), or none.
  normalise_label: of a regression's target too, always by those of the federation.
"""


def chosen(source: str, setting: str, value: str, among: tuple[str, ...]) -> None:
    """Check a setting that is one of some words."""
    if value not in among:
        raise UsageError(f"{source}.{setting} is {value!r}; it must be {' or '.join(among)}")


def examples(source: str, tables: tuple[Table, Table | None], roles: Roles, keep: Keep) -> Dataset:
    """A dataset of a table's rows.

    Args:
      source: the word that settings lie under.
      tables: for training and, where there is one, for testing.
    """
    chosen(source, "label_kind", roles.label_kind, LABEL_KINDS)
    chosen(source, "categories", roles.categories, CATEGORIES)
    chosen(source, "normalise", roles.normalise, NORMALISE)
    train, test = tables
    name, sizes = train.name, [train.rows, test.rows if test else 0]
    files = [table for table in tables if table]

    for table in files:
        if not table.rows:
            raise UsageError(f"{table.name} has no rows")

    def read(column: str, setting: str, *, spelled: bool = False) -> np.ndarray:
        parts = [table.column(column, f"{source}.{setting}", spelled=spelled) for table in files]
        return joined(
            column, [_named(t, column, part) for t, part in zip(files, parts, strict=True)]
        )

    def joined(column: str, parts: list[np.ndarray]) -> np.ndarray:
        if len({(p.shape[1:], p.dtype.kind in "US") for p in parts}) > 1:
            raise UsageError(f"{name}: column {column!r} differs between training and test")
        if any(p.dtype == np.uint64 for p in parts) and all(_counts(p) for p in parts):
            parts = [p.astype(np.uint64) for p in parts]  # where NumPy would join them as float64
        whole = np.concatenate(parts)
        with np.errstate(over="ignore"):  # beyond 32 bits it is not finite either
            bounded = whole.dtype.kind != "f" or np.isfinite(whole.astype(np.float32))
        if not np.all(bounded):
            rows = np.flatnonzero(~np.reshape(bounded, (len(whole), -1)).all(1))
            raise UsageError(
                f"{name}: column {column!r} is not finite in {len(rows)} rows, the first is row "
                f"{rows[0] + 1}; fill or remove these rows, or leave the column out"
            )
        return whole

    parts = [table.column(roles.label, f"{source}.label") for table in files]
    y, outputs, metadata = _labels(source, roles, files, parts, joined(roles.label, parts))
    inputs = [word.strip() for word in roles.input.split(",") if word.strip()]
    inputs = inputs or [c for c in train.columns if c not in (roles.owner, roles.label)]
    if not inputs:
        raise UsageError(f"{name} has no column but the label and the owner; something must go in")
    if roles.label in inputs:
        raise UsageError(f"{name}: column {roles.label!r} is to go in and to be predicted; choose")
    x, numbers, more = _inputs(name, source, roles, [(c, read(c, "input")) for c in inputs])
    if y.ndim == 2 and y.dtype == x.dtype == np.int32:  # of one vocabulary
        outputs = max(outputs, int(x.max()) + 1)

    def cut(array: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        return array[: sizes[0]], array[sizes[0] :] if test else None

    (x_train, x_test), (y_train, y_test) = cut(x), cut(y)
    owners: Any = (None, None, None)
    if roles.owner:
        owners = owned(name, *cut(_owner_names(read(roles.owner, "owner", spelled=True))))
    whole = Dataset(
        name,
        x_train,
        y_train,
        x_test,
        y_test,
        outputs,
        scale=np.array(1 / 255, np.float32) if x.dtype == np.uint8 else None,
        shift=np.array(0, np.float32) if x.dtype == np.uint8 else None,
        owner_train=owners[0],
        owner_test=owners[1],
        owner_names=owners[2],
        normalise=_normalise(roles, numbers, y),
        metadata={**metadata, **more},
    )
    return kept(whole, keep)


def _counts(values: np.ndarray) -> bool:
    """Returns True for whole numbers from 0."""
    return values.dtype.kind in "iu" and bool(np.all(values >= 0))


def _named(table: Table, column: str, values: np.ndarray) -> np.ndarray:
    """Returns a column as text if the file says what its whole numbers stand for."""
    names = table.classes.get(column)
    if not names or values.ndim > 1:
        return values
    what = f"{table.name}: column {column!r}"
    return np.array(names)[labels.class_numbers(what, values, end=len(names))]


def _owner_names(owner: np.ndarray) -> np.ndarray:
    """Returns whole numbers from 0 as numbers, anything else as text, so that 01 is not 1."""
    if owner.dtype.kind == "U":
        try:
            numbers = owner.astype(np.int64)
        except (ValueError, OverflowError):
            return owner
        return numbers if np.array_equal(numbers.astype(str), owner) and _counts(numbers) else owner
    return owner if _counts(owner) else owner.astype(str)


def _normalise(roles: Roles, numbers: np.ndarray, y: np.ndarray) -> Normalise | None:
    targets = y.dtype.kind == "f" and roles.normalise_label
    which = numbers if roles.normalise != "none" else np.zeros_like(numbers)
    if not which.any() and not targets:
        return None
    return Normalise("client" if roles.normalise == "client" else "federation", which, targets)


def _labels(
    source: str, roles: Roles, files: list[Table], parts: list[np.ndarray], y: np.ndarray
) -> tuple[np.ndarray, int, dict[str, Any]]:
    """y, the number of outputs, and what they stand for."""
    name, label, kind, setting = (
        files[0].name,
        roles.label,
        roles.label_kind,
        f"{source}.label_kind",
    )
    if y.dtype.kind in "US" and (kind == "number" or (y == "").any()):
        what = "is text" if kind == "number" else "has empty cells"
        raise UsageError(f"{name}: column {label!r} {what} and cannot be a label so; mend it")
    if y.ndim > 2 or (y.ndim == 2 and y.dtype.kind not in "iuf"):
        raise UsageError(
            f"{name}: column {label!r} is {y.dtype} {list(y.shape)}; a label is one value, or one "
            "for each position"
        )
    if labels.are_measurements(files, parts, label, setting, kind):
        apart = np.float64 if roles.normalise_label else np.float32  # until they are normalised
        targets = as_float(f"{name}: column {label!r}", y, apart, _HINT).reshape(len(y), -1)
        return targets, targets.shape[1], {"label": label}
    told = files[0].classes.get(label, ())
    if any(file.classes.get(label, told) != told for file in files):
        raise UsageError(f"{name}: column {label!r} has other classes in {files[-1].name}")
    if y.ndim == 1 and not told:
        numbers, classes = labels.numbered(name, label, setting, kind, y)
        return numbers, len(classes), {"label": label, "classes": classes}
    least, end = (0, len(told)) if y.ndim == 1 else (PADDING, labels.MOST_CLASSES)
    checked = [
        labels.class_numbers(file.name, part, least=least, end=end)
        for file, part in zip(files, parts, strict=True)
    ]
    y = np.concatenate(checked)
    if y.ndim == 2:  # a class for each position, numbered already
        return y, int(y.max(initial=0)) + 1, {"label": label}
    return y, len(told), {"label": label, "classes": list(told)}


def _inputs(
    name: str, source: str, roles: Roles, columns: list[tuple[str, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """x, which of its features are numbers, and what they are."""
    apart = np.float32 if roles.normalise == "none" else np.float64  # until they are normalised

    def number(column: str, values: np.ndarray) -> np.ndarray:
        return as_float(f"{name}: column {column!r}", values, apart, _HINT)

    if any(values.ndim > 1 for _, values in columns):
        if len(columns) > 1:
            wide = next(c for c, values in columns if values.ndim > 1)
            raise UsageError(
                f"{name}: column {wide!r} has several values in a row and can only go in alone; "
                f"say {source}.input={wide}"
            )
        ((column, x),) = columns
        if x.dtype.kind in "US":
            raise UsageError(f"{name}: column {column!r} has lists of text; use numbers")
        if x.dtype == np.uint8:
            return x, np.zeros(x.shape[-1], bool), {"input": [column]}
        if x.dtype.kind in "iu":
            if x.min() < 0 or x.max() >= 2**31:
                raise UsageError(f"{name}: column {column!r} has whole numbers outside 0..2^31-1")
            return x.astype(np.int32), np.zeros(x.shape[-1], bool), {"input": [column]}
        return number(column, x), np.ones(x.shape[-1], bool), {"input": [column]}
    parts, named, numbers = list[np.ndarray](), list[str](), list[bool]()
    categories = dict[str, list[str]]()
    for column, values in columns:
        if values.dtype.kind not in "US":
            parts.append(number(column, values)[:, None])
            named, numbers = [*named, column], [*numbers, True]
            continue
        words, place = np.unique(values, return_inverse=True)
        if len(words) > _MOST_CATEGORIES:
            raise UsageError(
                f"{name}: column {column!r} has {len(words):,} different texts, more than "
                f"{_MOST_CATEGORIES:,}; leave it out of {source}.input"
            )
        categories[column] = words.tolist()
        if roles.categories == "index":
            parts.append(place[:, None])
            named, numbers = [*named, column], [*numbers, False]
        else:
            parts.append(np.eye(len(words), dtype=np.float32)[place])
            named += [f"{column}={word}" for word in categories[column]]
            numbers += [False] * len(words)
    x, metadata = np.concatenate(parts, 1), {"input": named, "categories": categories}
    if roles.categories == "index" and not any(numbers):  # nothing but categories
        return x.astype(np.int32), np.array(numbers), metadata
    return x.astype(apart if any(numbers) else np.float32), np.array(numbers), metadata
