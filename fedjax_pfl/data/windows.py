"""Time series: windows over a table's rows, which stand in the order of time."""

import itertools
from pathlib import Path

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import tables
from fedjax_pfl.data.columns import NORMALISE, Roles, chosen, examples
from fedjax_pfl.data.dataset import DataDir, Dataset, Keep, kept


def windows(
    data_dir: DataDir,
    keep: Keep,
    path: str,
    *,
    owner: str = "",
    input: str = "",
    label: str = "label",
    label_kind: str = "auto",
    length: int = 32,
    stride: int = 8,
    horizon: int = 0,
    test_share: float = 0.3,
    normalise: str = "federation",
    normalise_label: bool = True,
) -> Dataset:
    """Windows over the rows of a CSV or Parquet file, which are in order of time, windows:FILE.

    Args:
      owner: the column that says whose a row is; no window holds rows of two. Empty: one series.
      input: the columns that go in, joined by commas; empty: all but the owner's and the label.
      label: the column to predict: text and whole numbers are classes, real numbers are one target.
      label_kind: auto; class, or number (a regression) where whole numbers are meant so.
      length: rows of a window.
      stride: rows from the beginning of one window to that of the next.
      horizon: how many rows after a window's last one its label stands; 0: the last one's.
      test_share: of each owner's rows, the last so many are for testing (split official); no window
        of training reaches into them.
      normalise: mean 0 and deviation 1 of each input: by the training windows of all clients that
        train (federation), by each client's own (client), or none.
      normalise_label: of a regression's target too, always by those of the federation.
    """
    del data_dir
    if min(length, stride) < 1 or horizon < 0 or not 0 < test_share < 1:
        raise UsageError(
            f"windows: length={length}, stride={stride}, horizon={horizon}, "
            f"test_share={test_share}: use 1 or more, horizon from 0, a share between 0 and 1"
        )
    chosen("windows", "normalise", normalise, NORMALISE)
    parquet = Path(path).suffix == ".parquet"
    table = tables.read_parquet(path, "windows")[0] if parquet else tables.read_csv(path, "windows")
    roles = Roles(owner, input, label, label_kind, "onehot", normalise, normalise_label)
    rows = examples("windows", (table, None), roles, lambda number: None)
    if rows.x_train.ndim > 2 or rows.x_train.dtype.kind != "f":
        raise UsageError(f"{table.name}: each input must be one number in a row")
    return cut(rows, length, stride, horizon, test_share, keep)


def cut(
    rows: Dataset, length: int, stride: int, horizon: int, test_share: float, keep: Keep
) -> Dataset:
    """Windows over rows in the order of time, [windows, length, inputs].

    The last `test_share` of each owner's rows is its test series, the rows before its training
    series; a window lies in one of them, with its label.
    """
    owner = rows.owner_train if rows.owner_train is not None else np.zeros(len(rows.x_train), int)
    order = np.argsort(owner, kind="stable")
    begins = np.searchsorted(owner[order], np.arange(int(owner.max()) + 2))
    starts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for a, b in itertools.pairwise(begins):
        middle = b - round(test_share * (b - a))
        for part, (first, end) in zip(starts, ((a, middle), (middle, b)), strict=True):
            part.append(np.arange(first, end - length - horizon + 1, stride))
    train, test = map(np.concatenate, starts)
    if not len(train) or not len(test):
        longest = int(np.diff(begins).max())
        raise UsageError(
            f"{rows.name}: no owner has rows for a window of {length} and a horizon of {horizon} "
            f"in both parts of its {longest} rows, to train and to test on; use a smaller length"
        )

    def taken(first: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        inside = order[first[:, None] + np.arange(length)]
        return rows.x_train[inside], rows.y_train[order[first + length - 1 + horizon]], inside[:, 0]

    (x, y, at), (x_test, y_test, at_test) = taken(train), taken(test)
    known = rows.owner_train is not None
    made = rows._replace(
        x_train=x,
        y_train=y,
        x_test=x_test,
        y_test=y_test,
        owner_train=owner[at] if known else None,
        owner_test=owner[at_test] if known else None,
        overlapping=stride < length,
    )
    return kept(made, keep)
