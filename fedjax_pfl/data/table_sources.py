"""Sources for user files: CSV, Parquet, Hugging Face datasets, and windows over time series."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedjax_pfl.core.errors import UsageError, first_line, nearest, require_one_of
from fedjax_pfl.data import tables
from fedjax_pfl.data.columns import NORMALISE, ROLES, Roles, table_dataset
from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.numbers import rows_by_id
from fedjax_pfl.data.tables import Table

Tables = tuple[Table, Table | None]  # for training and, if there is one, for testing


def _source(
    name: str, read: Callable[..., Tables], summary: str, test_meaning: str
) -> Callable[..., Dataset]:
    """Returns a source, a function of a path and settings, whose examples are rows of a table.

    The source refuses `columns` unless `name` is csv.

    `read` maps the path, the setting `test` and, if it is not empty, the setting `columns` to the
    tables. `summary` is the first line of the source's docstring, which has `test_meaning` too.
    """

    def source(
        path: str,
        *,
        owner: str = "",
        input: str = "",
        label: str = "label",
        label_kind: str = "auto",
        categories: str = "onehot",
        normalise: str = "federation",
        normalise_label: bool = True,
        tokens: str = "",
        length: int = 64,
        words: int = 10_000,
        columns: str = "",
        test: str = "",
    ) -> Dataset:
        if columns and name != "csv":
            raise UsageError(f"{name}.columns is for CSV files without a header line; leave it out")
        training, testing = ("train", test) if name == "hf" else map(_resolved, (path, test))
        if test and training == testing:
            raise UsageError(
                f"{name}.test names the training examples, which would be in both sets; name other "
                "examples, or leave it out"
            )
        roles = Roles(
            owner=owner,
            input=input,
            label=label,
            label_kind=label_kind,
            categories=categories,
            normalise=normalise,
            normalise_label=normalise_label,
            tokens=tokens,
            length=length,
            words=words,
        )
        return table_dataset(name, read(path, test, *([columns] if columns else [])), roles)

    source.__doc__ = (
        f"{summary}\n{ROLES}  columns: Names of the columns of a CSV file without a header line, "
        f"separated by commas.\n  test: {test_meaning}.\n"
    )
    return source


def _resolved(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _csv(path: str, test: str, columns: str = "") -> Tables:
    """Reads a CSV file, and another one for testing unless `test` is empty."""
    test_table = tables.read_csv(test, names=columns) if test else None
    return tables.read_csv(path, names=columns), test_table


def _json_lines(path: str, test: str) -> Tables:
    """Reads a file of JSON lines, and another one for testing unless `test` is empty."""
    return tables.read_json_lines(path), tables.read_json_lines(test) if test else None


def _parquet(path: str, test: str) -> Tables:
    """Reads Parquet files; `test` is the path of the test table, or empty."""
    train, own_test = tables.read_parquet(path)
    return train, tables.read_parquet(test, for_testing=True)[0] if test else own_test


def _hugging_face(path: str, test: str) -> Tables:
    """Reads a local folder with pyarrow, or downloads a dataset by name with `datasets`.

    `test` is the test split of a dataset by name; empty: test, if it exists. Raises UsageError if
    it is given for a folder.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if test:
            raise UsageError(f"hf.test is {test!r}, which is for names; hf:{path} is a folder")
        is_saved = any((folder / file).is_file() for file in ("state.json", "dataset_dict.json"))
        return tables.read_saved(path) if is_saved else tables.read_parquet(path, "hf")
    return _download(path, test or "test", required=bool(test))


def _download(name: str, test: str, required: bool) -> Tables:
    """Downloads the dataset `name`, which is NAME or NAME#CONFIGURATION.

    Without a split `test` there is no test table. Raises UsageError if that split is `required`,
    without a split train, without the package `datasets`, and if the download fails.
    """
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"hf:{name} is not a local folder, and to download it by name the package datasets is "
            "needed: install it (pip install '.[hf]' in the clone), or give a folder that it saved"
        ) from None
    try:
        splits = datasets.load_dataset(*name.split("#", 1))
    except Exception as error:  # any exception of the network, the hub and its scripts
        raise UsageError(f"hf:{name} cannot be loaded: {first_line(error)}") from None
    if "train" not in splits or (required and test not in splits):
        missing = "train" if "train" not in splits else test
        similar = nearest(missing, splits)
        hint = f"; did you mean {similar}?" if similar else ""
        raise UsageError(f"hf:{name} has no split {missing}; it has {', '.join(splits)}{hint}")

    def table(split: str) -> Table:
        return tables.from_arrow(f"hf:{name} ({split})", splits[split].with_format("arrow")[:])

    return table("train"), table(test) if test in splits else None


def windows(
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
      owner: Column with the owner of a row. A window has rows of one owner. Empty: one series.
      input: Columns of the input, separated by commas. Empty: all except owner and label.
      label: Column to predict. Text and integers are classes, real numbers are a target.
      label_kind: auto, class, or number to predict integers as a regression.
      length: Number of rows of a window.
      stride: Number of rows from the start of one window to the start of the next.
      horizon: Number of rows from the last row of a window to the row of its label.
      test_share: Fraction of each owner's rows, the last ones, for testing (split official). No
        training window contains them.
      normalise: Scale each input to mean 0 and deviation 1: by the training windows of all active
        clients (federation), by those of each client (client), or not at all (none).
      normalise_label: Scale the target of a regression too, always over the federation.
    """
    if min(length, stride) < 1 or horizon < 0 or not 0 < test_share < 1:
        raise UsageError(
            f"windows: length={length}, stride={stride}, horizon={horizon}, "
            f"test_share={test_share}: use 1 or more, horizon from 0, a share between 0 and 1"
        )
    require_one_of("windows.normalise", normalise, NORMALISE)
    if Path(path).suffix == ".parquet":
        table, _ = tables.read_parquet(path, "windows")
    else:
        table = tables.read_csv(path, "windows")
    roles = Roles(
        owner=owner,
        input=input,
        label=label,
        label_kind=label_kind,
        categories="onehot",
        normalise=normalise,
        normalise_label=normalise_label,
    )
    series = table_dataset("windows", (table, None), roles)
    if series.x_train.ndim > 2 or series.x_train.dtype.kind != "f":
        raise UsageError(f"{table.name}: each input must be one number in a row")
    return cut_windows(series, length, stride, horizon, test_share)


def cut_windows(
    series: Dataset, length: int, stride: int, horizon: int, test_share: float
) -> Dataset:
    """Cuts a dataset whose examples are rows in order of time into windows of `length` rows.

    Windows start `stride` rows apart. The label of a window is `horizon` rows after its last row.
    The last rows of each owner, a fraction of `test_share`, are for testing; windows that contain
    rows of both sets are left out. Returns x [windows, length, ...], y and owners as a dataset.
    Raises UsageError if training or testing has no window.
    """
    has_owners = series.owner_train is not None
    owner = np.zeros(len(series.x_train), int) if series.owner_train is None else series.owner_train
    rows_by_owner = rows_by_id(owner, int(owner.max()) + 1)
    # Rows of each window, and the row of its label: for training, and for testing.
    window_parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    label_parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for rows in rows_by_owner:
        middle = len(rows) - round(test_share * len(rows))
        for i, part in enumerate((rows[:middle], rows[middle:])):
            first = np.arange(0, len(part) - length - horizon + 1, stride)
            window_parts[i].append(part[first[:, None] + np.arange(length)])
            label_parts[i].append(part[first + length - 1 + horizon])
    (train, test), (train_labels, test_labels) = (
        map(np.concatenate, parts) for parts in (window_parts, label_parts)
    )
    if not len(train) or not len(test):
        longest = max(map(len, rows_by_owner))
        raise UsageError(
            f"{series.name}: no owner has rows for a window of {length} and a horizon of {horizon} "
            f"in both parts of its {longest} rows, for training and testing; use a smaller length"
        )
    return series._replace(
        x_train=series.x_train[train],
        y_train=series.y_train[train_labels],
        x_test=series.x_train[test],
        y_test=series.y_train[test_labels],
        owner_train=owner[train[:, 0]] if has_owners else None,
        owner_test=owner[test[:, 0]] if has_owners else None,
        overlapping=stride < length,
    )


SOURCES: dict[str, Callable[..., Dataset]] = {
    "csv": _source(
        "csv",
        _csv,
        "A text file of rows and columns, csv:FILE.",
        "File of test examples with the same columns. Empty: no test set",
    ),
    "parquet": _source(
        "parquet",
        _parquet,
        "A Parquet file, or a folder of them (test*.parquet, test/*: test examples), parquet:PATH.",
        "File or folder of test examples with the same columns. Empty: those of the folder",
    ),
    "jsonl": _source(
        "jsonl",
        _json_lines,
        "A text file with a JSON object in each line, also compressed (.gz), jsonl:FILE.",
        "File of test examples with the same keys. Empty: no test set",
    ),
    "hf": _source(
        "hf",
        _hugging_face,
        "Hugging Face: hf:FOLDER that it has saved, hf:NAME or hf:NAME#CONFIGURATION to download.",
        "Test split of a dataset by name. Empty: test, if it exists",
    ),
    "windows": windows,
}
