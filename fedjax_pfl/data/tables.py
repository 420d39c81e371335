"""Rows and columns, read a column at a time: CSV, Parquet, and what Hugging Face saves."""

import csv
import difflib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data.dataset import nearest_first
from fedjax_pfl.data.prepared import decode


class Table(NamedTuple):
    """Rows, of which a column is read when it is asked for."""

    name: str  # as messages call it
    columns: tuple[str, ...]
    rows: int
    read: Callable[[str], np.ndarray]  # [rows, ...]: numbers, text, or uint8 pictures
    classes: dict[str, tuple[str, ...]]  # what the whole numbers of a column stand for, where told
    cells: Callable[[str], np.ndarray] | None = None  # a column as the file spells it

    def column(self, name: str, use: str, *, spelled: bool = False) -> np.ndarray:
        """Returns a column.

        Args:
          name: Its name.
          use: The setting that names it, for messages.
          spelled: Return cells as the file spells them, if it does.
        """
        if name not in self.columns:
            raise UsageError(
                f"{self.name} has no column {name!r}, which {use} names; there are "
                f"{nearest_first(name, self.columns)}"
            )
        return self.cells(name) if spelled and self.cells else self.read(name)

    def spelled(self, name: str) -> np.ndarray:
        """Returns the cells of a column as text; without a spelling, its distinct values."""
        return np.unique(self.read(name)).astype(str) if self.cells is None else self.cells(name)


def existing(kind: str, path: str) -> Path:
    """The path of a file or folder that is there, or UsageError with the nearest one."""
    found = Path(path).expanduser()
    if found.exists():
        return found
    beside = [p.name for p in found.parent.iterdir()] if found.parent.is_dir() else []
    near = difflib.get_close_matches(found.name, beside, 1, 0.5)
    hint = f"; did you mean {found.parent / near[0]}?" if near else ""
    raise UsageError(f"{kind}:{path}: there is no such file or folder{hint}")


def read_csv(path: str, kind: str = "csv") -> Table:
    """A text file whose first line names its columns, parted by commas, semicolons or tabs."""
    name, file = f"{kind}:{path}", existing(kind, path)
    try:
        with open(file, newline="", encoding="utf-8-sig") as opened:
            first = opened.readline()
            opened.seek(0)
            delimiter = max(",;\t", key=first.count)
            # Not strict, a quote that is never closed would take all rows below into its cell.
            head, *rows = list(csv.reader(opened, delimiter=delimiter, strict=True)) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        hint = "; save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        hint = "; close or double its quotes" if isinstance(error, csv.Error) else hint
        raise UsageError(f"{name} cannot be read as text with columns: {error}{hint}") from None
    rows = [row for row in rows if row]  # a line without anything is no row
    head = [word.strip() for word in head]
    if not rows or len(set(head)) < len(head) or "" in head:
        raise UsageError(
            f"{name} has the columns {', '.join(head) or 'none'} and {len(rows)} rows; its first "
            "line must name each column differently, and rows must follow"
        )
    for number, row in enumerate(rows):
        if len(row) != len(head):
            raise UsageError(
                f"{name}: row {number + 1} below the first line has {len(row)} cells, and there "
                f"are {len(head)} columns; mend it"
            )
    place = {word: i for i, word in enumerate(head)}

    def cells(column: str) -> np.ndarray:
        return np.array([row[place[column]].strip() for row in rows])

    def read(column: str) -> np.ndarray:
        return _typed(name, column, cells(column))

    return Table(name, tuple(head), len(rows), read, {}, cells)


def _typed(name: str, column: str, cells: np.ndarray) -> np.ndarray:
    """Whole numbers if all cells are, else real ones, else text."""
    joined = any("_" in cell for cell in cells)  # Python reads 1_2 as 12; here it is a name
    for kind in () if joined else (np.int64, np.uint64, np.float64):
        try:
            return cells.astype(kind)
        except (ValueError, OverflowError):
            continue
    wrong = [i for i, cell in enumerate(cells) if not _is_number(cell)]
    present = [i for i in wrong if cells[i].lower() not in _MISSING]
    if present and all("," in cells[i] and _is_number(cells[i].replace(",", "")) for i in present):
        raise UsageError(
            f"{name}: column {column!r} has numbers with commas, the first "
            f"{str(cells[present[0]])[:40]!r} in row {present[0] + 1}; write a decimal point and "
            "no other separators"
        )
    few = 2 * len(wrong) < len(cells) or not present
    if few and len(wrong) < len(cells):  # a column of numbers in which some are missing
        raise UsageError(
            f"{name}: column {column!r} has {len(wrong)} cells that are no numbers, the first "
            f"{str(cells[wrong[0]])[:40]!r} in row {wrong[0] + 1}; fill or remove these rows, or "
            "leave the column out"
        )
    return cells


_MISSING = ("", "-", "?", ".", "na", "n/a", "nan", "null", "none")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


def read_parquet(path: str, kind: str = "parquet") -> tuple[Table, Table | None]:
    """A Parquet file, or a folder of them.

    Files whose names begin with test, or that lie in a folder named test, are a test set. Those of
    validation are not read.
    """
    from pyarrow import ArrowException, parquet

    found = existing(kind, path)
    files = sorted(found.rglob("*.parquet")) if found.is_dir() else [found]
    if not files:
        raise UsageError(f"{kind}:{path} holds no file that ends with .parquet")
    parts: dict[str, list[Any]] = {"train": [], "validation": [], "test": []}
    try:
        for file in files:
            part = _part(file.relative_to(found)) if found.is_dir() else "train"
            parts[part].append(parquet.read_table(file, partitioning=None))
        return _splits(f"{kind}:{path}", parts["train"], parts["test"])
    except (ArrowException, OSError) as error:
        raise UsageError(f"{kind}:{path} cannot be read: {_line(error)}") from None


def _part(file: Path) -> str:
    """Returns train, validation or test, by the names of a file and of its folders."""
    for part in ("validation", "test"):
        if part in file.parts or file.name.startswith(part):
            return part
    return "train"


def read_saved(path: str) -> tuple[Table, Table | None]:
    """A folder that Hugging Face's save_to_disk wrote: of one dataset, or of train and test."""
    from pyarrow import ArrowException, ipc

    def files(folder: Path) -> list[Any]:
        listed = json.loads((folder / "state.json").read_text())["_data_files"]
        return [ipc.open_stream(str(folder / one["filename"])).read_all() for one in listed]

    root, name = existing("hf", path), f"hf:{path}"
    try:
        if not (root / "dataset_dict.json").is_file():
            return _splits(name, files(root), [])
        splits = json.loads((root / "dataset_dict.json").read_text())["splits"]
        train, test = (files(root / s) if s in splits else [] for s in ("train", "test"))
        return _splits(name, train, test)
    except (ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{name} cannot be read as a saved dataset: {_line(error)}") from None


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _splits(name: str, train: list[Any], test: list[Any]) -> tuple[Table, Table | None]:
    import pyarrow

    if not train:
        raise UsageError(f"{name} has no training examples: it needs a split or file named train")
    whole, of_test = (
        pyarrow.concat_tables(each, promote_options="default") if each else None
        for each in (train, test)
    )
    return of_arrow(name, whole), None if of_test is None else of_arrow(f"{name} (test)", of_test)


def of_arrow(name: str, table: Any) -> Table:
    """An Arrow table; what Hugging Face says in it of classes is read too."""
    told = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    features = (told.get("info") or {}).get("features") or {}
    classes = {
        column: tuple(facts["names"])
        for column, facts in features.items()
        if isinstance(facts, dict) and facts.get("_type") == "ClassLabel" and facts.get("names")
    }

    def read(column: str) -> np.ndarray:
        whole = table.column(column).combine_chunks()
        return _array(f"{name}: column {column!r}", whole)

    return Table(name, tuple(table.column_names), table.num_rows, read, classes)


def _array(what: str, column: Any) -> np.ndarray:
    """An Arrow array as a NumPy array: nested lists as further axes, pictures decoded."""
    from pyarrow import BaseExtensionType, compute, types

    kind = column.type
    if isinstance(kind, BaseExtensionType):
        return _array(what, column.storage)
    if column.null_count:
        first = compute.index(column.is_null(), True).as_py()
        raise UsageError(
            f"{what} has {column.null_count} missing values, the first in row {first + 1}; fill or "
            "remove these rows, or leave the column out"
        )
    if types.is_dictionary(kind):
        return _array(what, column.dictionary_decode())
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return _array(what, compute.struct_field(column, "bytes"))
    if types.is_binary(kind) or types.is_large_binary(kind):
        return _pictures(what, column.to_pylist())
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        lengths = compute.unique(compute.list_value_length(column)).to_pylist()
        if len(lengths) != 1:
            raise UsageError(
                f"{what} has lists of {min(lengths)} to {max(lengths)} values; make them equally "
                "long"
            )
        if column.flatten().null_count:
            raise UsageError(f"{what} has missing values in its lists; fill or remove these rows")
        inner = _array(what, column.flatten())
        inner = inner.astype(np.int32) if inner.dtype == np.uint8 else inner
        return inner.reshape(len(column), lengths[0], *inner.shape[1:])
    if types.is_string(kind) or types.is_large_string(kind):
        return np.array([text.strip() for text in column.to_pylist()], str)  # as in CSV
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return column.to_numpy(zero_copy_only=False)
    raise UsageError(f"{what} has type {kind}; use numbers, text, lists of numbers or pictures")


def _pictures(what: str, files: list[bytes]) -> np.ndarray:
    try:
        return decode(files)
    except (OSError, ValueError) as error:
        raise UsageError(f"{what}: its pictures cannot be read alike: {_line(error)}") from None
