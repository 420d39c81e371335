"""Recordings of human activities by subject: UCI smartphones (HAR) and PAMAP2."""

from pathlib import Path

import numpy as np

from fedjax_pfl.core.errors import UsageError, first_line
from fedjax_pfl.data.dataset import Dataset, Normalisation, number_owners
from fedjax_pfl.data.labels import class_numbers
from fedjax_pfl.data.tables import find_path

_SIGNALS = [f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]
# PAMAP2: acceleration (16 g), gyroscope and magnetometer on hand, chest and ankle.
_FIRST_COLUMNS = {"hand": 3, "chest": 20, "ankle": 37}
_OFFSETS = {"acc": (1, 2, 3), "gyro": (7, 8, 9), "mag": (10, 11, 12)}
_PAMAP2_COLUMNS = 54
_PAMAP2_CLASSES = {
    **{1: "lying", 2: "sitting", 3: "standing", 4: "walking", 5: "running", 6: "cycling"},
    **{7: "nordic walking", 9: "watching TV", 10: "computer work", 11: "car driving"},
    **{12: "ascending stairs", 13: "descending stairs", 16: "vacuum cleaning", 17: "ironing"},
    **{18: "folding laundry", 19: "house cleaning", 20: "playing soccer", 24: "rope jumping"},
}


def _read_numbers(name: str, file: Path) -> np.ndarray:
    """Returns the numbers of a text file, separated by spaces, float32 [rows, columns]."""
    if not file.is_file():
        raise UsageError(f"{name} has no file {file.name} in {file.parent}")
    try:
        numbers = np.loadtxt(file, np.float32, ndmin=2)
    except (ValueError, OSError) as error:
        raise UsageError(f"{name}: {file.name} cannot be read: {first_line(error)}") from None
    if not numbers.size:
        raise UsageError(f"{name}: {file.name} is empty")
    return numbers


def har(path: str, *, signals: bool = True, overlap: bool = False) -> Dataset:
    """Six activities of 30 subjects with a smartphone, the folder "UCI HAR Dataset", har:FOLDER.

    The subjects are the owners. The test set has other subjects than the training set.

    Args:
      signals: Read the recordings, 128 steps of 9 signals. False: the 561 features.
      overlap: Read all windows, each of which shares half of its steps with the next one, for the
        split official. False: every second window of a subject.
    """
    root, name = find_path("har", path), f"har:{path}"

    def read(part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        folder = root / part
        label, subject = (
            class_numbers(file.name, _read_numbers(name, file)[:, 0])
            for file in (folder / f"y_{part}.txt", folder / f"subject_{part}.txt")
        )
        if signals:
            files = [folder / "Inertial Signals" / f"{signal}_{part}.txt" for signal in _SIGNALS]
            columns = [_read_numbers(name, file) for file in files]
            if len({column.shape for column in columns}) > 1:
                raise UsageError(f"{name}: the signals of {part} have different sizes")
            x = np.stack(columns, -1)
        else:
            x = _read_numbers(name, folder / f"X_{part}.txt")
        if not len(x) == len(label) == len(subject):
            raise UsageError(f"{name}: the files of {part} have different numbers of rows")
        if overlap:
            return x, label, subject
        windows = (np.flatnonzero(subject == owner)[::2] for owner in np.unique(subject))
        rows = np.sort(np.concatenate(list(windows)))
        return x[rows], label[rows], subject[rows]

    (x, y, subject), (x_test, y_test, subject_test) = read("train"), read("test")
    if x.shape[1:] != x_test.shape[1:]:
        raise UsageError(f"{name}: examples of train and test have different shapes")
    try:
        lines = (root / "activity_labels.txt").read_text().split("\n")
        classes = {int(line.split()[0]): line.split()[1] for line in lines if line.strip()}
    except (OSError, ValueError, IndexError) as error:
        raise UsageError(f"{name}: activity_labels.txt: {first_line(error)}") from None
    ids = np.array(sorted(classes))
    for label in (y, y_test):
        if not np.isin(label, ids).all():
            raise UsageError(f"{name}: a label is not in activity_labels.txt")
    owners, owners_test, names = number_owners(name, subject.astype(str), subject_test.astype(str))
    return Dataset(
        name=name,
        x_train=x,
        y_train=np.searchsorted(ids, y).astype(np.int32),
        x_test=x_test,
        y_test=np.searchsorted(ids, y_test).astype(np.int32),
        outputs=len(ids),
        owner_train=owners,
        owner_test=owners_test,
        owner_names=names,
        normalise=Normalisation("federation", np.ones(x.shape[-1], bool), targets=False),
        metadata={"classes": [classes[i] for i in ids]},
        overlapping=overlap,
    )


def pamap2(path: str, *, length: int = 128) -> Dataset:
    """Activities of nine subjects with three sensors, the folder Protocol, pamap2:FOLDER.

    The files, *.dat, are the owners. An example is a window of 27 numbers at each step:
    acceleration, gyroscope and magnetometer of hand, chest and ankle. Windows do not overlap, and
    have one activity; rows without an activity (0) are left out. A missing number is replaced by
    the one before it.

    Args:
      length: Number of rows of a window, 100 per second.
    """
    root, name = find_path("pamap2", path), f"pamap2:{path}"
    if length < 1:
        raise UsageError(f"pamap2.length is {length}; use 1 or more")
    files = sorted(root.glob("*.dat"))
    if not files:
        raise UsageError(f"{name} has no file that ends with .dat; give the folder Protocol")
    columns = [
        first + offset
        for first in _FIRST_COLUMNS.values()
        for offsets in _OFFSETS.values()
        for offset in offsets
    ]
    features = [f"{p} {kind} {axis}" for p in _FIRST_COLUMNS for kind in _OFFSETS for axis in "xyz"]
    windows, labels, owners = list[np.ndarray](), list[int](), list[str]()
    for file in files:
        rows = _read_numbers(name, file)
        if rows.shape[1] != _PAMAP2_COLUMNS:
            raise UsageError(f"{name}: {file.name} has {rows.shape[1]} columns instead of 54")
        activity, x = class_numbers(file.name, rows[:, 1]), _fill(rows[:, columns])
        bounds = np.flatnonzero(np.diff(activity)) + 1
        for start, end in zip([0, *bounds], [*bounds, len(rows)], strict=True):
            label = int(activity[start])
            for first in range(start, end - length + 1, length) if label else ():
                windows.append(x[first : first + length])
                labels.append(label)
                owners.append(file.stem)
    if not windows:
        raise UsageError(f"{name} has no activity of {length} rows; use a smaller length")
    ids, y = np.unique(labels, return_inverse=True)
    owner_train, _, owner_names = number_owners(name, np.array(owners), None)
    return Dataset(
        name=name,
        x_train=np.stack(windows),
        y_train=y.astype(np.int32),
        x_test=None,
        y_test=None,
        outputs=len(ids),
        owner_train=owner_train,
        owner_names=owner_names,
        normalise=Normalisation("federation", np.ones(len(columns), bool), targets=False),
        metadata={"input": features, "classes": [_PAMAP2_CLASSES.get(int(i), str(i)) for i in ids]},
    )


def _fill(x: np.ndarray) -> np.ndarray:
    """Replaces missing numbers, NaN, of x [rows, columns] by those before them; first ones by 0."""
    place = np.where(np.isnan(x), 0, np.arange(len(x))[:, None])
    filled = np.take_along_axis(x, np.maximum.accumulate(place, 0), 0)
    return np.nan_to_num(filled)
