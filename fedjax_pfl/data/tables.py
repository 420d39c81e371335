"""Tables from files: CSV, Parquet, and datasets saved by Hugging Face."""

import csv
import difflib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.core.errors import UsageError, first_line, nearest
from fedjax_pfl.data.prepared import decode

# First words of the names of files and folders with such examples, as Hugging Face knows them.
_SPLIT_WORDS = {
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_MISSING = ("", "-", "?", ".", "na", "n/a", "nan", "null", "none")


class Table(NamedTuple):
    """Rows and columns of a file; `read` converts a column, given its name, when it is used."""

    name: str  # for messages
    columns: tuple[str, ...]  # names
    rows: int  # number of rows
    read: Callable[[str], np.ndarray]  # [rows, ...]: numbers, text, or uint8 images
    classes: dict[str, tuple[str, ...]]  # by column of integers: class names, if the file has them
    texts: Callable[[str], list[str]]  # a column of text, as Python strings, which need less memory
    cells: Callable[[str], np.ndarray] | None = None  # a column as written; None for binary files

    def column(self, name: str, setting: str, *, as_text: bool = False) -> np.ndarray:
        """Returns the values of a column, [rows, ...]; raises UsageError if there is none.

        Args:
          name: Its name.
          setting: The setting that names it, for messages.
          as_text: Return cells as they are written in the file, if it is a text file.
        """
        self.require_column(name, setting)
        return self.cells(name) if as_text and self.cells else self.read(name)

    def require_column(self, name: str, setting: str) -> None:
        """Raises UsageError, which says that `setting` names it, if there is no column `name`."""
        if name not in self.columns:
            raise UsageError(
                f"{self.name} has no column {name!r}, which {setting} names; there are "
                f"{_most_similar_first(name, self.columns)}"
            )

    def spellings(self, name: str) -> np.ndarray:
        """Returns the cells of a column as text [rows]; for binary files, only distinct values."""
        return np.unique(self.read(name)).astype(str) if self.cells is None else self.cells(name)


def _most_similar_first(name: str, names: Iterable[str]) -> str:
    """Returns at most 12 names joined by commas, the most similar ones to `name` first."""

    def similarity(candidate: str) -> float:
        return difflib.SequenceMatcher(None, name.lower(), candidate.lower()).ratio()

    ordered = sorted(names, key=similarity, reverse=True)
    omitted = f" and {len(ordered) - 12} more" if len(ordered) > 12 else ""
    return ", ".join(ordered[:12]) + omitted


def find_path(source: str, path: str) -> Path:
    """Returns `path`, with ~ expanded; raises UsageError, with a similar one, if it does not exist.

    `source`, such as csv, precedes the path in the message.
    """
    result = Path(path).expanduser()
    if result.exists():
        return result
    folder = result.parent
    siblings = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    similar = nearest(result.name, siblings)
    hint = f"; did you mean {folder / similar}?" if similar else ""
    raise UsageError(f"{source}:{path}: there is no such file or folder{hint}")


def read_csv(path: str, source: str = "csv", names: str = "") -> Table:
    """Reads a text file separated by commas, semicolons or tabs.

    `names` are those of its columns, separated by commas; empty: they are in the first line that is
    not blank. `source`, such as csv, precedes the path in messages.
    """
    name, file = f"{source}:{path}", find_path(source, path)
    limit = csv.field_size_limit(2**31 - 1)  # of a cell, 128 KiB by default
    try:
        with open(file, newline="", encoding="utf-8-sig") as stream:
            line = next(filter(str.strip, stream), "")
            delimiter = _delimiter(line, names.count(",") + 1 if names else None)
            stream.seek(0)
            lines = stream if names else itertools.dropwhile(str.isspace, stream)
            # strict: otherwise an unclosed quote would join all rows below into its cell
            rows = list(csv.reader(lines, delimiter=delimiter, strict=True))
            columns, *rows = [names.split(","), *rows] if names else (rows or [[]])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        hint = "; save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        hint = "; close or double its quotes" if isinstance(error, csv.Error) else hint
        raise UsageError(f"{name} cannot be read as text with columns: {error}{hint}") from None
    finally:
        csv.field_size_limit(limit)
    rows = [row for row in rows if row]
    columns = [column.strip() for column in columns]
    if not rows or len(set(columns)) < len(columns) or "" in columns:
        raise UsageError(
            f"{name} has the columns {', '.join(columns) or 'none'} and {len(rows)} rows; its "
            "first line must name each column differently, and rows must follow"
        )
    for i, row in enumerate(rows):
        if len(row) != len(columns):
            raise UsageError(
                f"{name}: row {i + 1} below the first line has {len(row)} cells, but there are "
                f"{len(columns)} columns; correct it"
            )
    place = {column: i for i, column in enumerate(columns)}

    def cells(column: str) -> np.ndarray:
        return np.array([row[place[column]].strip() for row in rows])

    def read(column: str) -> np.ndarray:
        return _convert(name, column, cells(column))

    return Table(
        name=name,
        columns=tuple(columns),
        rows=len(rows),
        read=read,
        classes={},
        texts=lambda column: [row[place[column]].strip() for row in rows],
        cells=cells,
    )


def _delimiter(line: str, columns: int | None) -> str:
    """Returns the separator of a table with this first line: tab, comma or semicolon.

    `columns` is the number of columns if the line is no header. Text in it may have separators too,
    but seldom tabs.
    """

    def fits(delimiter: str) -> bool:
        return columns in (None, len(next(csv.reader([line], delimiter=delimiter))))

    unquoted = re.sub('"[^"]*"', "", line)
    return max("\t,;", key=lambda delimiter: (fits(delimiter), unquoted.count(delimiter)))


def read_json_lines(path: str) -> Table:
    """Reads a text file, also compressed, with a JSON object with the same keys in each line.

    Dates stay text, as they are written.
    """
    import pyarrow
    from pyarrow import json as arrow_json

    name, file = f"jsonl:{path}", find_path("jsonl", path)

    def read(texts: Sequence[Any] = ()) -> Any:
        """Returns the Arrow table. The fields `texts` are text; other types are inferred."""
        options = arrow_json.ParseOptions(explicit_schema=pyarrow.schema(texts))
        with pyarrow.input_stream(str(file), compression="detect") as stream:
            return arrow_json.read_json(stream, parse_options=options)

    try:
        table, is_date = read(), pyarrow.types.is_timestamp
        dates = [f.with_type(pyarrow.string()) for f in table.schema if is_date(f.type)]
        return from_arrow(name, read(dates) if dates else table)
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{name} cannot be read as lines of JSON: {first_line(error)}") from None


def _convert(name: str, column: str, cells: np.ndarray) -> np.ndarray:
    """Returns text cells [rows] as integers or real numbers if all cells are such, else as text.

    Raises UsageError if they look like numbers with missing cells or with commas. `name` (of the
    table) and `column` are for messages.
    """
    has_codes = any("_" in cell for cell in cells)  # Python would read the code 1_2 as 12
    for dtype in () if has_codes else (np.int64, np.uint64, np.float64):
        try:
            return cells.astype(dtype)
        except (ValueError, OverflowError):
            continue
    texts = [i for i, cell in enumerate(cells) if not is_number(cell)]
    present = [i for i in texts if cells[i].lower() not in _MISSING]
    if present and all("," in cells[i] and is_number(cells[i].replace(",", "")) for i in present):
        raise UsageError(
            f"{name}: column {column!r} has numbers with commas, the first "
            f"{str(cells[present[0]])[:40]!r} in row {present[0] + 1}; write a decimal point and "
            "no other separators"
        )
    few = 2 * len(texts) < len(cells) or not present
    if few and len(texts) < len(cells):  # probably numbers with missing or mistyped cells
        raise UsageError(
            f"{name}: column {column!r} has {len(texts)} cells that are not numbers, the first "
            f"{str(cells[texts[0]])[:40]!r} in row {texts[0] + 1}; fill or remove these rows, or "
            "leave the column out (label_kind=class reads a label as text)"
        )
    return cells


def is_number(cell: str) -> bool:
    """Returns True if a cell can be read as a real number; codes such as 1_2 cannot."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


def read_parquet(
    path: str, source: str = "parquet", *, for_testing: bool = False
) -> tuple[Table, Table | None]:
    """Reads a Parquet file, or a folder of them. Returns the training table and the test table.

    Files whose names begin with test, or in a folder named test, are the test set. Files of
    validation are ignored. Other common words, such as eval and dev, have the same effect. With
    `for_testing` the first table has the test set, or all files if there is none, and the second is
    None.
    """
    from pyarrow import ArrowException, parquet

    root = find_path(source, path)
    files = sorted(root.rglob("*.parquet")) if root.is_dir() else [root]
    if not files:
        raise UsageError(f"{source}:{path} holds no file that ends with .parquet")
    splits: dict[str, list[Any]] = {"train": [], "validation": [], "test": []}
    try:
        for file in files:
            split = _split_of(file.relative_to(root)) if root.is_dir() else "train"
            splits[split].append(parquet.read_table(file, partitioning=None))
        train, test = splits["train"], splits["test"]
        if for_testing:
            train, test = test or train, []
        return _from_splits(f"{source}:{path}", train, test)
    except (ArrowException, OSError) as error:
        raise UsageError(f"{source}:{path} cannot be read: {first_line(error)}") from None


def _split_of(file: Path) -> str:
    """Returns train, validation or test, by the first words of the names of a file and its folders.

    Capital letters do not matter.
    """
    first_words = [re.split("[^a-z]", part.lower())[0] for part in file.parts]
    for split, words in _SPLIT_WORDS.items():
        if first_words[-1].startswith(split) or not set(first_words).isdisjoint(words):
            return split
    return "train"


def read_saved(path: str) -> tuple[Table, Table | None]:
    """Reads a folder written by Hugging Face's save_to_disk: one dataset, or train and test.

    Returns the training table and the test table, or None if there is no test split.
    """
    from pyarrow import ArrowException, ipc

    def files(folder: Path) -> list[Any]:
        state = json.loads((folder / "state.json").read_text())
        names = [entry["filename"] for entry in state["_data_files"]]
        return [ipc.open_stream(str(folder / name)).read_all() for name in names]

    root, name = find_path("hf", path), f"hf:{path}"
    try:
        if not (root / "dataset_dict.json").is_file():
            return _from_splits(name, files(root), [])
        splits = json.loads((root / "dataset_dict.json").read_text())["splits"]
        train, test = (files(root / s) if s in splits else [] for s in ("train", "test"))
        return _from_splits(name, train, test)
    except (ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{name} cannot be read as a saved dataset: {first_line(error)}") from None


def _from_splits(name: str, train: list[Any], test: list[Any]) -> tuple[Table, Table | None]:
    """Joins the Arrow tables of each split. Returns the training table and the test table.

    The test table is None if `test` is empty; UsageError if `train` is. `name` is for messages.
    """
    import pyarrow

    if not train:
        raise UsageError(f"{name} has no training examples: it needs a split or file named train")
    train_table, test_table = (
        pyarrow.concat_tables(parts, promote_options="default") if parts else None
        for parts in (train, test)
    )
    if test_table is None:
        return from_arrow(name, train_table), None
    return from_arrow(name, train_table), from_arrow(f"{name} (test)", test_table)


def from_arrow(name: str, table: Any) -> Table:
    """Returns an Arrow table as a `Table`, with the class names that Hugging Face stores in it."""
    metadata = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    features = (metadata.get("info") or {}).get("features") or {}
    classes = {
        column: tuple(feature["names"])
        for column, feature in features.items()
        if isinstance(feature, dict)
        and feature.get("_type") == "ClassLabel"
        and feature.get("names")
    }

    def read(column: str) -> np.ndarray:
        return _to_array(f"{name}: column {column!r}", table.column(column).combine_chunks())

    def texts(column: str) -> list[str]:
        return _texts(f"{name}: column {column!r}", table.column(column))

    return Table(
        name=name,
        columns=tuple(table.column_names),
        rows=table.num_rows,
        read=read,
        classes=classes,
        texts=texts,
    )


def _texts(label: str, column: Any) -> list[str]:
    """Converts an Arrow column to text: empty if it is missing, lists of words joined by spaces.

    `label` names the column in messages. Raises UsageError for bytes and for nested types other
    than lists of text or numbers.
    """
    from pyarrow import types

    def is_text(kind: Any) -> bool:
        return not (types.is_nested(kind) or "binary" in str(kind))

    kind, cells = column.type, column.to_pylist()
    if is_text(kind):
        return ["" if text is None else str(text) for text in cells]
    if (types.is_list(kind) or types.is_large_list(kind)) and is_text(kind.value_type):
        return [" ".join(str(word) for word in words or () if word is not None) for words in cells]
    raise UsageError(
        f"{label} has values of type {kind}, which cannot be read as text; choose other columns "
        "as input"
    )


def _to_array(label: str, column: Any) -> np.ndarray:
    """Converts an Arrow array to NumPy: nested lists become axes, image files are decoded.

    `label` names the column in messages. Raises UsageError for missing values, unequal lists, and
    other types.
    """
    from pyarrow import BaseExtensionType, compute, types

    kind = column.type
    if isinstance(kind, BaseExtensionType):
        return _to_array(label, column.storage)
    if column.null_count:
        first = compute.index(column.is_null(), True).as_py()
        raise UsageError(
            f"{label} has {column.null_count} missing values, the first in row {first + 1}; fill "
            "or remove these rows, or leave the column out"
        )
    if types.is_dictionary(kind):
        return _to_array(label, column.dictionary_decode())
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return _to_array(label, compute.struct_field(column, "bytes"))
    if types.is_binary(kind) or types.is_large_binary(kind):
        try:
            return decode(column.to_pylist())
        except (OSError, ValueError) as error:
            line = first_line(error)
            raise UsageError(f"{label}: its images cannot be decoded: {line}") from None
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        lengths = compute.unique(compute.list_value_length(column)).to_pylist()
        if len(lengths) != 1:
            raise UsageError(
                f"{label} has lists of {min(lengths)} to {max(lengths)} values; make them equally "
                "long"
            )
        if lengths == [0]:
            raise UsageError(f"{label} has only empty lists; leave the column out")
        if column.flatten().null_count:
            raise UsageError(f"{label} has missing values in its lists; fill or remove these rows")
        inner = _to_array(label, column.flatten())
        inner = inner.astype(np.int32) if inner.dtype == np.uint8 else inner
        return inner.reshape(len(column), lengths[0], *inner.shape[1:])
    if types.is_string(kind) or types.is_large_string(kind):
        return np.array([text.strip() for text in column.to_pylist()], str)  # as in CSV
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return column.to_numpy(zero_copy_only=False)
    raise UsageError(f"{label} has type {kind}; use numbers, text, lists of numbers or images")
