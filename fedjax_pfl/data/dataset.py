"""Labelled examples before they are given to anybody, and the checks on anyone's arrays."""

import difflib
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import checks
from fedjax_pfl.data.numbers import as_float, in_parts

_MOST_OUTPUTS = 10_000_000
# Beyond so many, and so many for each label that occurs, labels are taken for codes, not classes.
_FEW_OUTPUTS, _SPARSE = 1000, 10


DataDir = str | os.PathLike[str] | None
Keep = Callable[[int], np.ndarray | None]  # of so many, which are read; None: all
LATER = "later"
PADDING = -1  # the label of a position that is not there


class Normalise(NamedTuple):
    """What is brought to mean 0 and deviation 1 as soon as it is known who trains on what."""

    # federation: over all training examples; client: over each client's own; LATER: examples stay
    # as they are, in float64, for a node that has to hear of the other nodes' first
    by: str
    features: np.ndarray  # bool [last axis of x]: which; the others stay as they are
    targets: bool  # those of a regression too, always over all training examples


class Dataset(NamedTuple):
    """Labelled examples, not yet given to anybody. NumPy; images as they are stored."""

    name: str
    # [examples, ...]: uint8, float32, or int32, which stays as it is; float64 where `normalise` is
    x_train: np.ndarray
    y_train: np.ndarray  # as `arrays` takes them: int32 (PADDING: no label), float32 or bool
    x_test: np.ndarray | None  # None where the source has one pool only
    y_test: np.ndarray | None
    outputs: int  # classes, also of each position; targets of a regression; or labels
    scale: np.ndarray | None = None  # an example becomes x * scale + shift, in float32
    shift: np.ndarray | None = None  # both None: used as it is stored
    coarse: np.ndarray | None = None  # int [outputs]: the superclass of each class
    owner_train: np.ndarray | None = None  # int [examples]: its writer or alphabet, from 0
    owner_test: np.ndarray | None = None
    owner_classes: np.ndarray | None = None  # bool [owners, outputs], where owners differ in these
    owner_names: np.ndarray | None = None  # text [owners]; None: their numbers are their names
    normalise: Normalise | None = None
    overlapping: bool = False  # examples of one owner share parts, so that no split may part them
    # What its numbers stand for, as plain data: columns, classes, characters
    metadata: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        """Returns one line: the arrays themselves are not printed."""
        tested = "" if self.x_test is None else f" and {len(self.x_test):,} test"
        shape = list(self.x_train.shape[1:])
        return f"Dataset({self.name!r}: {len(self.x_train):,}{tested} examples of shape {shape})"


def arrays(
    x: np.ndarray,
    y: np.ndarray,
    x_test: np.ndarray | None = None,
    y_test: np.ndarray | None = None,
    *,
    outputs: int | None = None,
    scale: np.ndarray | float | None = None,
    shift: np.ndarray | float | None = None,
    coarse: np.ndarray | None = None,
    owners: np.ndarray | None = None,
    owners_test: np.ndarray | None = None,
    owner_classes: np.ndarray | None = None,
    name: str = "arrays",
) -> Dataset:
    """Anyone's NumPy arrays, checked.

    Args:
      x, x_test: [examples, ...], also mapped from a file; images have channels last. uint8 is
        scaled to [0, 1] unless `scale` is given; other integers stay integers, such as tokens; real
        numbers become float32.
      y, y_test: what is learned, by its type: integer classes [examples]; integer classes of each
        position [examples, positions], such as the next token, -1 where there is none; real targets
        [examples, targets], or [examples] for one; true or false [examples, labels].
      outputs: number of classes; None: the largest label, or token that is an input, plus one.
      owners, owners_test: whom each example belongs to, by name or by whole number (partition
        `natural`).
      owner_classes: bool [owners, outputs], where owners differ in the classes that they can have;
        owners are in the order of their numbers or names.
    """
    x, y = _array(name, "x", x), _targets(_array(name, "y", y))
    if y.dtype.kind in "US":
        raise UsageError(
            f"{name}: y holds text; number the classes first: "
            "classes, y = numpy.unique(y, return_inverse=True)"
        )
    classes = y.dtype.kind in "iu"
    several = y.ndim == 2 and (y.shape[1] > 1 if classes else y.dtype.kind in "fb")
    if not several and not (y.ndim == 1 and classes):
        raise UsageError(
            f"{name}: y is {y.dtype} {list(y.shape)}; use integer classes [examples], or of each "
            "of several positions [examples, positions], real targets [examples, targets], or true "
            "and false [examples, labels]"
        )
    if (x_test is None) != (y_test is None):
        raise UsageError(f"{name}: give both x_test and y_test, or neither")
    if x_test is not None and y_test is not None:
        x_test = _array(name, "x_test", x_test)
        y_test = _targets(_array(name, "y_test", y_test))
    outputs = _outputs(name, x, y, outputs)
    x_train, y_train = _checked(f"{name} (train)", x, y, x, y, outputs, owners)
    if x_test is not None and y_test is not None:
        x_test, y_test = _checked(f"{name} (test)", x_test, y_test, x, y, outputs, owners_test)
    if scale is None and shift is None and x_train.dtype == np.uint8:
        scale = 1 / 255
    if scale is not None or shift is not None:
        scale = np.asarray(1 if scale is None else scale, np.float32)
        shift = np.asarray(0 if shift is None else shift, np.float32)
    if coarse is not None and (
        len(coarse) != outputs or np.any(np.unique(coarse) != np.arange(np.max(coarse) + 1))
    ):
        raise UsageError(f"{name}: coarse must number the superclass of each class from 0")
    owners = _owners(name, "owners", owners, len(x_train))
    owners_test = _owners(name, "owners_test", owners_test, 0 if x_test is None else len(x_test))
    owners, owners_test, owner_names = _numbered(name, owners, owners_test)
    if owner_classes is not None and (
        owners is None or np.shape(owner_classes) != (int(owners.max()) + 1, outputs)
    ):
        raise UsageError(f"{name}: owner_classes must be [owners, {outputs}], and have owners")
    return Dataset(
        name,
        x_train,
        y_train,
        x_test,
        y_test,
        outputs,
        scale,
        shift,
        None if coarse is None else np.asarray(coarse),
        owners,
        owners_test,
        owner_classes,
        owner_names,
    )


def _array(name: str, what: str, values: Any) -> np.ndarray:
    if np.ma.is_masked(values):
        raise UsageError(f"{name}: {what} has masked values; remove or fill these examples")
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        line = str(error).splitlines()[0]
        raise UsageError(
            f"{name}: {what} is no array: {line}; make its rows equally long"
        ) from None


def _targets(y: np.ndarray) -> np.ndarray:
    """Real numbers [examples] as one target each, [examples, 1]; all else as it is."""
    return y[:, None] if y.ndim == 1 and np.issubdtype(y.dtype, np.floating) else y


def _outputs(name: str, x: np.ndarray, y: np.ndarray, given: int | None) -> int:
    """As many as are given, or as the labels or targets need; each is a column of the model."""
    if given is not None:
        if not isinstance(given, int | np.integer) or not 1 <= given <= _MOST_OUTPUTS:
            raise UsageError(
                f"{name}: outputs is {given!r}; use a whole number from 1 to {_MOST_OUTPUTS:,}"
            )
        return int(given)
    if y.dtype.kind not in "iu":
        return y.shape[1]
    tokens = y.ndim == 2 and x.dtype.kind in "iu"  # of one vocabulary
    outputs = int(max(y.max(initial=0), x.max(initial=0) if tokens else 0)) + 1
    if outputs > _FEW_OUTPUTS and outputs > _SPARSE * (different := len(np.unique(y))):
        raise UsageError(
            f"{name}: the largest of {different} different labels is {outputs - 1:,}, and a model "
            f"has an output for each class from 0 to it; number the labels from 0 (y = "
            f"numpy.unique(y, return_inverse=True)[1]), or say outputs={outputs} if that is meant"
        )
    return outputs


def _checked(
    what: str,
    x: np.ndarray,
    y: np.ndarray,
    like: np.ndarray,
    targets: np.ndarray,
    outputs: int,
    owners: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    if x.ndim < 2 or x.shape[1:] != like.shape[1:] or y.shape[1:] != targets.shape[1:]:
        raise UsageError(
            f"{what}: x is {list(x.shape)} and y {list(y.shape)}; use [examples, ...], with train "
            f"and test alike"
        )
    if 0 in x.shape[1:]:
        raise UsageError(f"{what}: x is {list(x.shape)}: an example needs one number at least")
    if not len(x) or len(x) != len(y):
        raise UsageError(f"{what}: x has {len(x)} examples and y {len(y)}; both need the same")
    if x.dtype.kind not in "iuf":
        raise UsageError(f"{what}: x has type {x.dtype}; use numbers")
    if x.dtype != np.uint8:
        whole = x.dtype.kind in "iu"
        x = _as_int32(what, x) if whole else as_float(f"{what}: x", x, np.float32)
    if y.dtype.kind == "f":
        y = as_float(f"{what}: y", y, np.float32)
    elif y.dtype.kind in "iu":
        y = np.where((y < -1) | (y >= _MOST_OUTPUTS), np.int32(-2), y.astype(np.int32))
    if y.dtype.kind != targets.dtype.kind and "b" in y.dtype.kind + targets.dtype.kind:
        raise UsageError(f"{what}: y is {y.dtype}, and elsewhere {targets.dtype}; use one of them")
    if found := checks.problem(x, y, outputs):
        where = found.example
        whose = "" if owners is None or len(owners) != len(x) else f" (owner {owners[where]})"
        raise UsageError(f"{what}: {found.said} in example {where}{whose}{found.place}{found.hint}")
    return x, y


def _as_int32(what: str, x: np.ndarray) -> np.ndarray:
    most = np.iinfo(np.int32)
    if x.size and not most.min <= int(x.min()) <= int(x.max()) <= most.max:
        raise UsageError(
            f"{what}: x has integers from {x.min():,} to {x.max():,}, beyond 32 bits; give real "
            "numbers, or number them from 0"
        )
    return x.astype(np.int32, copy=False)


_LONGEST = 80  # characters of an owner's name


def _owners(name: str, what: str, owners: np.ndarray | None, examples: int) -> np.ndarray | None:
    """Whole numbers from 0, or text without spaces around it."""
    if owners is None:
        return None
    owners = _array(name, what, owners)
    if owners.dtype.kind == "O" and all(isinstance(one, str) for one in owners.flat):
        owners = owners.astype(str)
    if owners.dtype.kind == "U":
        owners = np.char.strip(owners)
    numbers = owners.dtype.kind in "iu" and not np.any(owners < 0)
    if owners.shape != (examples,) or not (numbers or owners.dtype.kind == "U"):
        raise UsageError(
            f"{name}: {what} is {owners.dtype} {list(owners.shape)}; use names, or integers from 0 "
            f"[{examples}]"
        )
    for one in () if numbers else np.unique(owners).tolist():
        if not one.strip() or not one.isprintable() or len(one) > _LONGEST:
            raise UsageError(
                f"{name}: {what} has the name {one[:40]!r}; use 1 to {_LONGEST} characters that "
                "can be printed"
            )
    return owners


def _numbered(
    name: str, owners: np.ndarray | None, owners_test: np.ndarray | None
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Owners numbered from 0 without gaps, and their names where these are no such numbers."""
    if owners is None:
        if owners_test is not None:
            raise UsageError(f"{name}: owners_test is given without owners; give both")
        return None, None, None
    if owners_test is not None and (owners.dtype.kind == "U") != (owners_test.dtype.kind == "U"):
        raise UsageError(f"{name}: owners and owners_test must both be names, or both be integers")
    whole = owners if owners_test is None else np.concatenate([owners, owners_test])
    names, numbers = np.unique(whole, return_inverse=True)
    train, test = np.split(numbers.astype(np.int32), [len(owners)])
    known = names.dtype.kind != "U" and np.array_equal(names, np.arange(len(names)))
    return train, None if owners_test is None else test, None if known else names.astype(str)


def standardise(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Scale and shift that standardise uint8 pixels, from constants for pixels in [0, 1]."""
    m, s = np.array(mean), np.array(std)
    return (1 / (255 * s)).astype(np.float32), (-m / s).astype(np.float32)


def owned(
    name: str, train: np.ndarray, test: np.ndarray | None
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Owners as they are called, numbered from 0, with their names where these are no numbers."""
    length = 0 if test is None else len(test)
    checked = _owners(name, "owner", train, len(train)), _owners(name, "owner", test, length)
    return _numbered(name, *checked)


def kept(dataset: Dataset, keep: Keep) -> Dataset:
    """A part of the examples; where they have owners, of the owners, with all of theirs."""
    whole, changes = dataset._asdict(), dict[str, Any]()
    if dataset.owner_train is not None:
        ids = np.unique(dataset.owner_train)
        if (rows := keep(len(ids))) is None:
            return dataset
        ours = ids[rows]
        for part in ("train", "test"):
            if (owner := whole[f"owner_{part}"]) is not None:
                mine = np.isin(owner, ours)
                changes |= {f"{key}_{part}": whole[f"{key}_{part}"][mine] for key in "xy"}
                changes[f"owner_{part}"] = np.searchsorted(ours, owner[mine]).astype(np.int32)
        if dataset.owner_names is not None:
            changes["owner_names"] = dataset.owner_names[ours]
        return dataset._replace(**changes)
    for part in ("train", "test"):
        x = whole[f"x_{part}"]
        if x is not None and (rows := keep(len(x))) is not None:
            changes |= {f"{key}_{part}": whole[f"{key}_{part}"][rows] for key in "xy"}
    return dataset._replace(**changes)


def digest(arrays: Iterable[np.ndarray]) -> str:
    """Of arrays, in their order."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype}{array.shape or (1,)}".encode())
        for part in in_parts(array):
            found.update(part.tobytes())
    return found.hexdigest()[:16]


def nearest_first(word: str, words: Iterable[str], most: int = 12) -> str:
    """All words that there are, those that look most like this one before the others."""

    def alike(one: str) -> float:
        return difflib.SequenceMatcher(None, word.lower(), one.lower()).ratio()

    near = sorted(words, key=alike, reverse=True)
    more = f" and {len(near) - most} more" if len(near) > most else ""
    return ", ".join(near[:most]) + more
