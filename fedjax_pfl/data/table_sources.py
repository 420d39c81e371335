"""Sources for user files: CSV, Parquet, Hugging Face datasets, and windows over time series."""

import difflib
from collections.abc import Callable
from pathlib import Path

from fedjax_pfl.core.errors import UsageError, first_line
from fedjax_pfl.data import tables, windows
from fedjax_pfl.data.columns import ROLES, Roles, table_dataset
from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.tables import Table

Tables = tuple[Table, Table | None]  # for training and, if there is one, for testing


def _source(
    name: str, read: Callable[[str, str], Tables], summary: str, test_meaning: str
) -> Callable[..., Dataset]:
    """Returns a source whose examples are rows.

    Args:
      name: Name of the source.
      read: Reads the tables, given a path and the setting `test`.
      summary: First line of the source's docstring.
      test_meaning: Meaning of the setting `test`.
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
        test: str = "",
    ) -> Dataset:
        roles = Roles(
            owner=owner,
            input=input,
            label=label,
            label_kind=label_kind,
            categories=categories,
            normalise=normalise,
            normalise_label=normalise_label,
        )
        return table_dataset(name, read(path, test), roles)

    source.__doc__ = f"{summary}\n{ROLES}  test: {test_meaning}.\n"
    return source


def _csv(path: str, test: str) -> Tables:
    return tables.read_csv(path), tables.read_csv(test) if test else None


def _parquet(path: str, test: str) -> Tables:
    train, own_test = tables.read_parquet(path)
    return train, tables.read_parquet(test)[0] if test else own_test


def _hugging_face(path: str, test: str) -> Tables:
    """Reads a local folder with pyarrow, or downloads a dataset by name with `datasets`."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if test:
            raise UsageError(f"hf.test is {test!r}, which is for names; hf:{path} is a folder")
        is_saved = any((folder / file).is_file() for file in ("state.json", "dataset_dict.json"))
        return tables.read_saved(path) if is_saved else tables.read_parquet(path, "hf")
    return _download(path, test or "test", required=bool(test))


def _download(name: str, test: str, required: bool) -> Tables:
    """Downloads a dataset by name.

    Args:
      name: NAME or NAME#CONFIGURATION.
      test: Name of the test split.
      required: Raise UsageError if there is no such split.
    """
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"hf:{name} is not a local folder, and to download it by name the package datasets is "
            "needed: install it (pip install 'fedjax_pfl[hf]'), or give a folder that it has saved"
        ) from None
    try:
        splits = datasets.load_dataset(*name.split("#", 1))
    except Exception as error:  # any exception of the network, the hub and its scripts
        raise UsageError(f"hf:{name} cannot be loaded: {first_line(error)}") from None
    if "train" not in splits or (required and test not in splits):
        missing = "train" if "train" not in splits else test
        similar = difflib.get_close_matches(missing, list(splits), 1)
        hint = f"; did you mean {similar[0]}?" if similar else ""
        raise UsageError(f"hf:{name} has no split {missing}; it has {', '.join(splits)}{hint}")

    def table(split: str) -> Table:
        return tables.from_arrow(f"hf:{name} ({split})", splits[split].with_format("arrow")[:])

    return table("train"), table(test) if test in splits else None


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
    "hf": _source(
        "hf",
        _hugging_face,
        "Hugging Face: hf:FOLDER that it has saved, hf:NAME or hf:NAME#CONFIGURATION to download.",
        "Test split of a dataset by name. Empty: test, if it exists",
    ),
    "windows": windows.windows,
}
