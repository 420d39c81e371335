"""Labelled examples before they are divided among clients, and checks of user-defined arrays."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.core.errors import UsageError, first_line
from fedjax_pfl.data import checks
from fedjax_pfl.data.numbers import as_float, row_chunks

_MOST_OUTPUTS = 10_000_000
# Labels with more outputs than this, and more than _SPARSE per distinct label, are probably codes.
_FEW_OUTPUTS, _SPARSE = 1000, 10
_LONGEST_NAME = 80  # characters

DataDir = str | os.PathLike[str] | None
SampleRows = Callable[[int], np.ndarray | None]  # the rows to use out of n; None for all
LATER = "later"
PADDING = -1  # label of a position without a label


class Normalisation(NamedTuple):
    """Choice of the numbers to scale to mean 0 and deviation 1 after the partition.

    `scope` says whose training examples give mean and deviation: those of all clients (federation)
    or of each client (client). With LATER, examples stay float64, because a node of a deployment
    must first receive the moments of the other nodes.
    """

    scope: str  # federation, client or LATER
    features: np.ndarray  # bool [last axis of x]: True to scale; the others stay unchanged
    targets: bool  # also the targets of a regression, always over all training examples


class Dataset(NamedTuple):
    """Labelled examples before they are divided among clients, as NumPy arrays.

    `owner_classes`, bool [owners, outputs], are the classes that an owner can have, or None.
    """

    name: str
    x_train: np.ndarray  # [examples, ...]: uint8, float32 or int32; float64 until `normalise` ran
    y_train: np.ndarray  # int32 (PADDING: no label), float32 or bool; shapes as for `arrays`
    x_test: np.ndarray | None  # like x_train; None if the source has no test set
    y_test: np.ndarray | None  # like y_train
    outputs: int  # number of classes, of regression targets or of labels
    scale: np.ndarray | None = None  # x * scale + shift in float32 is used instead of x
    shift: np.ndarray | None = None  # None, like scale: x is used as stored
    coarse: np.ndarray | None = None  # int [outputs]: the superclass of each class; None: unknown
    owner_train: np.ndarray | None = None  # int [examples]: number of the person or group of each
    owner_test: np.ndarray | None = None  # the same for the test set
    owner_classes: np.ndarray | None = None
    owner_names: np.ndarray | None = None  # text [owners]; None if owners are named by number
    normalise: Normalisation | None = None  # None: no number is normalised after the partition
    overlapping: bool = False  # examples of an owner share values, so none may be split off
    metadata: Mapping[str, Any] | None = None  # "input", "label", "classes", "tokens": names

    def __repr__(self) -> str:
        """Returns one line without the arrays."""
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
    """Makes a dataset from NumPy arrays and checks their values.

    Args:
      x: Inputs [examples, ...], also mapped from a file. Images have channels last. uint8 is scaled
        to [0, 1] unless `scale` is given. Other integers, and inputs of labels [examples,
        positions], are tokens and stay integers. Real numbers become float32.
      y: Labels, whose type decides the task. Integer classes have shape [examples], or [examples,
        positions] with -1 for no label, such as next tokens. Real targets have shape [examples,
        targets], or [examples] for one target. Booleans have shape [examples, labels].
      x_test: Inputs of a separate test set.
      y_test: Labels of that test set.
      outputs: Number of classes. Default: the largest label, or input token, plus 1.
      scale: Examples become x * scale + shift.
      shift: See `scale`.
      coarse: int [outputs], the superclass of each class.
      owners: Owner of each example, by name or by integer, for the partition `natural`.
      owners_test: Owner of each test example.
      owner_classes: bool [owners, outputs], the classes that each owner can have. Owners are in the
        order of their numbers or names.
      name: Name of the dataset.
    """
    x, y = _to_array(name, "x", x), _targets(_to_array(name, "y", y))
    if y.dtype.kind in "US":
        raise UsageError(
            f"{name}: y holds text; number the classes first: "
            "classes, y = numpy.unique(y, return_inverse=True)"
        )
    is_integer = y.dtype.kind in "iu"
    is_multiple = y.ndim == 2 and (y.shape[1] > 1 if is_integer else y.dtype.kind in "fb")
    if not is_multiple and not (y.ndim == 1 and is_integer):
        raise UsageError(
            f"{name}: y is {y.dtype} {list(y.shape)}; use integer classes [examples] or [examples, "
            "positions], real targets [examples, targets], or booleans [examples, labels]"
        )
    if (x_test is None) != (y_test is None):
        raise UsageError(f"{name}: give both x_test and y_test, or neither")
    if x_test is not None and y_test is not None:
        x_test = _to_array(name, "x_test", x_test)
        y_test = _targets(_to_array(name, "y_test", y_test))
        checks.require_one_kind(name, x, x_test)
    outputs = _outputs(name, (x,) if x_test is None else (x, x_test), y, outputs)
    x_train, y_train = _check_examples(f"{name} (train)", (x, y), (x, y), outputs, owners)
    if x_test is not None and y_test is not None:
        test = (x_test, y_test)
        x_test, y_test = _check_examples(f"{name} (test)", test, (x, y), outputs, owners_test)
    if x.ndim == y.ndim == 2 and is_integer and x.dtype == np.uint8:  # tokens
        x_train = x_train.astype(np.int32)
        x_test = None if x_test is None else x_test.astype(np.int32)
    if scale is None and shift is None and x_train.dtype == np.uint8:
        scale = 1 / 255
    if scale is not None or shift is not None:
        scale = checks.constant(name, "scale", 1 if scale is None else scale, x.shape[1:])
        shift = checks.constant(name, "shift", 0 if shift is None else shift, x.shape[1:])
    if coarse is not None:
        groups = np.unique(coarse := _to_array(name, "coarse", coarse))
        is_range = coarse.dtype.kind in "iu" and np.array_equal(groups, np.arange(len(groups)))
        if coarse.shape != (outputs,) or not is_range:
            raise UsageError(f"{name}: coarse must number the superclass of each class from 0")
    examples = len(x_train), 0 if x_test is None else len(x_test)
    owners, owners_test, owner_names = number_owners(name, owners, owners_test, examples)
    if owner_classes is not None:
        labelled = [(owners, y_train), (owners_test, y_test)]
        owner_classes = _check_owner_classes(name, owner_classes, labelled, outputs)
    return Dataset(
        name=name,
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        outputs=outputs,
        scale=scale,
        shift=shift,
        coarse=coarse,
        owner_train=owners,
        owner_test=owners_test,
        owner_classes=owner_classes,
        owner_names=owner_names,
    )


def _to_array(name: str, argument: str, values: Any) -> np.ndarray:
    """Returns `values` as an array; `name` (of the dataset) and `argument` are for messages.

    Raises UsageError for masked values and for rows of unequal length.
    """
    if np.ma.is_masked(values):
        raise UsageError(f"{name}: {argument} has masked values; remove or fill these examples")
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(
            f"{name}: {argument} is not an array: {first_line(error)}; make its rows equally long"
        ) from None


def _targets(y: np.ndarray) -> np.ndarray:
    """Reshapes real targets [examples] to [examples, 1]; returns other labels unchanged."""
    return y[:, None] if y.ndim == 1 and np.issubdtype(y.dtype, np.floating) else y


def _outputs(name: str, inputs: tuple[np.ndarray, ...], y: np.ndarray, requested: Any) -> int:
    """Returns the requested number of outputs, or the number that the labels need if None.

    That is the largest class, or token of `inputs`, plus 1, or the number of columns of y.
    Raises UsageError if `requested` is invalid, or if classes are so sparse that they look wrong.
    """
    if requested is not None:
        if not isinstance(requested, int | np.integer) or not 1 <= requested <= _MOST_OUTPUTS:
            raise UsageError(
                f"{name}: outputs is {requested!r}; use an integer from 1 to {_MOST_OUTPUTS:,}"
            )
        if y.dtype.kind in "fb" and requested != y.shape[1]:
            raise UsageError(
                f"{name}: outputs is {requested} and y has {y.shape[1]} columns; leave outputs out"
            )
        return int(requested)
    if y.dtype.kind not in "iu":
        return y.shape[1]
    has_tokens = y.ndim == 2 and inputs[0].dtype.kind in "iu"  # labels are tokens too
    outputs = int(max(part.max(initial=0) for part in (y, *(inputs if has_tokens else ())))) + 1
    if outputs > _FEW_OUTPUTS and outputs > _SPARSE * (different := len(np.unique(y))):
        raise UsageError(
            f"{name}: the largest of {different} different labels is {outputs - 1:,}, and a model "
            f"has an output for each class from 0 to it; number the labels from 0 (y = "
            f"numpy.unique(y, return_inverse=True)[1]), or set outputs={outputs} if intended"
        )
    return outputs


def _check_examples(
    label: str,
    examples: tuple[np.ndarray, np.ndarray],
    train: tuple[np.ndarray, np.ndarray],
    outputs: int,
    owners: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the `examples` (x, y) of one set with the types for training, or raises UsageError.

    The shapes and the kind of labels of `train`, (x, y) of the training set, are required. `label`,
    the name of the set, and `owners`, of each example, are for messages.
    """
    (x, y), (x_train, y_train) = examples, train
    if x.ndim < 2 or x.shape[1:] != x_train.shape[1:] or y.shape[1:] != y_train.shape[1:]:
        raise UsageError(
            f"{label}: x is {list(x.shape)} and y {list(y.shape)}; use [examples, ...], with equal "
            "shapes in train and test"
        )
    if 0 in x.shape[1:]:
        raise UsageError(f"{label}: x is {list(x.shape)}; an example needs at least one number")
    if not len(x) or len(x) != len(y):
        raise UsageError(f"{label}: x has {len(x)} examples and y {len(y)}; use equally many")
    if x.dtype.kind not in "iuf":
        raise UsageError(f"{label}: x has type {x.dtype}; use numbers")
    if x.dtype != np.uint8:
        is_integer = x.dtype.kind in "iu"
        x = _as_int32(label, x) if is_integer else as_float(f"{label}: x", x, np.float32)
    if y.dtype.kind == "f":
        y = as_float(f"{label}: y", y, np.float32)
    elif y.dtype.kind in "iu":
        y = np.where((y < -1) | (y >= _MOST_OUTPUTS), np.int32(-2), y.astype(np.int32))
    if y.dtype.kind != y_train.dtype.kind and "b" in y.dtype.kind + y_train.dtype.kind:
        raise UsageError(f"{label}: y is {y.dtype}, but {y_train.dtype} in train; use one type")
    if problem := checks.find_problem(x, y, outputs):
        i = problem.example
        owner = "" if owners is None or len(owners) != len(x) else f" (owner {owners[i]})"
        raise UsageError(
            f"{label}: {problem.message} in example {i}{owner}{problem.place}{problem.hint}"
        )
    return x, y


def _as_int32(label: str, x: np.ndarray) -> np.ndarray:
    """Returns integers as int32; raises UsageError, beginning with `label`, if one is too large."""
    limits = np.iinfo(np.int32)
    if x.size and not limits.min <= int(x.min()) <= int(x.max()) <= limits.max:
        raise UsageError(
            f"{label}: x has integers from {x.min():,} to {x.max():,}, beyond 32 bits; give real "
            "numbers, or number them from 0"
        )
    return x.astype(np.int32, copy=False)


def _check_owners(
    name: str, argument: str, owners: np.ndarray | None, examples: int | None
) -> np.ndarray | None:
    """Returns owners [examples] as nonnegative integers or as stripped text, or raises UsageError.

    None, no owners, is returned unchanged. `examples` is the required number; None: any number.
    """
    if owners is None:
        return None
    owners = _to_array(name, argument, owners)
    examples = len(owners) if examples is None else examples
    if owners.dtype.kind == "O" and all(isinstance(owner, str) for owner in owners.flat):
        owners = owners.astype(str)
    if owners.dtype.kind == "U":
        owners = np.char.strip(owners)
    are_numbers = owners.dtype.kind in "iu" and not np.any(owners < 0)
    if owners.shape != (examples,) or not (are_numbers or owners.dtype.kind == "U"):
        raise UsageError(
            f"{name}: {argument} is {owners.dtype} {list(owners.shape)}; use names, or integers "
            f"from 0 [{examples}]"
        )
    for owner in () if are_numbers else np.unique(owners).tolist():
        if not owner.strip() or not owner.isprintable() or len(owner) > _LONGEST_NAME:
            raise UsageError(
                f"{name}: {argument} has a name of {len(owner)} characters that starts with "
                f"{owner[:40]!r}; use 1 to {_LONGEST_NAME} printable characters"
            )
    return owners.astype(np.uint64) if are_numbers else owners  # uint64 and int64 join to float64


def _check_owner_classes(
    name: str, owner_classes: Any, labelled: list[tuple[Any, Any]], outputs: int
) -> np.ndarray:
    """Returns the classes of owners, bool [owners, outputs], or raises UsageError.

    `labelled` has the numbers of owners and the labels of the training set and of the test set, or
    None. A label with one class per example must be one of its owner's.
    """
    sets = [(owner, y) for owner, y in labelled if owner is not None]
    owner_classes = np.asarray(owner_classes, bool)
    if not sets or owner_classes.shape != (1 + max(owner.max() for owner, _ in sets), outputs):
        raise UsageError(f"{name}: owner_classes must be [owners, {outputs}] and needs owners")
    for owner, y in sets:
        if y.ndim == 1 and not (allowed := owner_classes[owner, y]).all():
            i = int(np.argmin(allowed))
            raise UsageError(
                f"{name}: example {i} has class {y[i]}, which owner_classes denies its owner"
            )
    return owner_classes


def number_owners(
    name: str,
    owners: np.ndarray | None,
    owners_test: np.ndarray | None,
    examples: tuple[int | None, int | None] = (None, None),
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Numbers the owners of examples from 0, or raises UsageError for invalid owners.

    Args:
      name: Name of the dataset, for messages.
      owners: Name or number of the owner of each training example, or None.
      owners_test: The same for test examples.
      examples: Numbers of training and of test examples, to check lengths. None: no check.

    Returns:
      The number of the owner of each training example, that of each test example, both int32, and
      the name of each number. Each is None if not given, names also if they equal the numbers.
    """
    owners = _check_owners(name, "owners", owners, examples[0])
    owners_test = _check_owners(name, "owners_test", owners_test, examples[1])
    if owners is None:
        if owners_test is not None:
            raise UsageError(f"{name}: owners_test is given without owners; give both")
        return None, None, None
    if owners_test is not None and (owners.dtype.kind == "U") != (owners_test.dtype.kind == "U"):
        raise UsageError(f"{name}: owners and owners_test must both be names, or both be integers")
    all_owners = owners if owners_test is None else np.concatenate([owners, owners_test])
    names, numbers = np.unique(all_owners, return_inverse=True)
    train, test = np.split(numbers.astype(np.int32), [len(owners)])
    is_range = names.dtype.kind != "U" and np.array_equal(names, np.arange(len(names)))
    return train, None if owners_test is None else test, None if is_range else names.astype(str)


def scale_and_shift(
    mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns float32 arrays (scale, shift), [channels], that standardise uint8 pixels.

    A pixel becomes x * scale + shift. `mean` and `std` are the channels', in [0, 1].
    """
    m, s = np.array(mean), np.array(std)
    return (1 / (255 * s)).astype(np.float32), (-m / s).astype(np.float32)


def subset(dataset: Dataset, sample_rows: SampleRows) -> Dataset:
    """Returns a sample of the examples, or of the owners with all their examples if there are any.

    Args:
      dataset: The dataset.
      sample_rows: Maps a number n to the indices below n to use, ascending; None for all. n is the
        number of owners if there are any, else of examples, of the training or of the test set.
    """
    fields, changes = dataset._asdict(), dict[str, Any]()
    if dataset.owner_train is not None:
        owners = (dataset.owner_train, dataset.owner_test)
        ids = np.unique(np.concatenate([owner for owner in owners if owner is not None]))
        if (rows := sample_rows(len(ids))) is None:
            return dataset
        sampled = ids[rows]
        for part in ("train", "test"):
            if (owner := fields[f"owner_{part}"]) is not None:
                mask = np.isin(owner, sampled)
                changes |= {f"{key}_{part}": fields[f"{key}_{part}"][mask] for key in "xy"}
                changes[f"owner_{part}"] = np.searchsorted(sampled, owner[mask]).astype(np.int32)
        names = dataset.owner_names
        changes["owner_names"] = sampled.astype(str) if names is None else names[sampled]
        if dataset.owner_classes is not None:
            changes["owner_classes"] = np.asarray(dataset.owner_classes)[sampled]
        return dataset._replace(**changes)
    for part in ("train", "test"):
        x = fields[f"x_{part}"]
        if x is not None and (rows := sample_rows(len(x))) is not None:
            changes |= {f"{key}_{part}": fields[f"{key}_{part}"][rows] for key in "xy"}
    return dataset._replace(**changes)


def digest(arrays: Iterable[np.ndarray]) -> str:
    """Returns 16 hexadecimal digits that identify arrays by type, shape, values and order."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(f"{array.dtype}{array.shape or (1,)}".encode())
        for chunk in row_chunks(array):
            sha.update(chunk.tobytes())
    return sha.hexdigest()[:16]
