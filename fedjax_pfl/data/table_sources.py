"""Your own tables by name: CSV, Parquet, Hugging Face datasets, and windows over time series."""

import difflib
from collections.abc import Callable
from pathlib import Path

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import tables, windows
from fedjax_pfl.data.columns import ROLES, Roles, examples
from fedjax_pfl.data.dataset import DataDir, Dataset, Keep
from fedjax_pfl.data.tables import Table

Tables = tuple[Table, Table | None]


def _source(
    name: str, read: Callable[[str, str], Tables], summary: str, test_is: str
) -> Callable[..., Dataset]:
    """A source of rows; `read` takes the path and the setting `test`, which is what `test_is`."""

    def source(
        data_dir: DataDir,
        keep: Keep,
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
        del data_dir
        roles = Roles(owner, input, label, label_kind, categories, normalise, normalise_label)
        return examples(name, read(path, test), roles, keep)

    source.__doc__ = f"{summary}\n{ROLES}  test: {test_is}.\n"
    return source


def _csv(path: str, test: str) -> Tables:
    return tables.read_csv(path), tables.read_csv(test) if test else None


def _parquet(path: str, test: str) -> Tables:
    train, beside = tables.read_parquet(path)
    return train, tables.read_parquet(test)[0] if test else beside


def _hugging_face(path: str, test: str) -> Tables:
    """A folder on this machine, read by pyarrow alone, or a name, which `datasets` downloads."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if test:
            raise UsageError(f"hf.test is {test!r}, which is for names; hf:{path} is a folder")
        saved = any((folder / file).is_file() for file in ("state.json", "dataset_dict.json"))
        return tables.read_saved(path) if saved else tables.read_parquet(path, "hf")
    return _downloaded(path, test or "test", wanted=bool(test))


def _downloaded(name: str, test: str, wanted: bool) -> Tables:
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"hf:{name} is no folder here, and a name is downloaded by the package datasets: "
            "install it (pip install 'fedjax_pfl[hf]'), or name a folder that it has saved"
        ) from None
    try:
        splits = datasets.load_dataset(*name.split("#", 1))
    except Exception as error:  # it raises whatever the network, the hub and its scripts raise
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"hf:{name} cannot be loaded: {line}") from None
    if "train" not in splits or (wanted and test not in splits):
        missing = "train" if "train" not in splits else test
        near = difflib.get_close_matches(missing, list(splits), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"hf:{name} has no split {missing}; it has {', '.join(splits)}{hint}")

    def table(split: str) -> Table:
        return tables.of_arrow(f"hf:{name} ({split})", splits[split].with_format("arrow")[:])

    return table("train"), table(test) if test in splits else None


SOURCES: dict[str, Callable[..., Dataset]] = {
    "csv": _source(
        "csv",
        _csv,
        "A text file of rows and columns, csv:FILE.",
        "a file of test examples with the same columns; empty: there is none",
    ),
    "parquet": _source(
        "parquet",
        _parquet,
        "A Parquet file, or a folder of them (test*.parquet, test/*: test examples), parquet:PATH.",
        "a file or folder of test examples with the same columns; empty: as the folder has them",
    ),
    "hf": _source(
        "hf",
        _hugging_face,
        "Hugging Face: hf:FOLDER that it has saved, hf:NAME or hf:NAME#CONFIGURATION to download.",
        "the split of a name that is tested on; empty: test, where there is one",
    ),
    "windows": windows.windows,
}
