"""Pictures in folders: a folder for each class, and one for each owner above them if there are."""

import csv
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data.columns import chosen
from fedjax_pfl.data.dataset import DataDir, Dataset, Keep, kept, owned
from fedjax_pfl.data.pictures import pixels
from fedjax_pfl.data.tables import existing

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
MODES = {"rgb": "RGB", "gray": "L"}


def images(
    data_dir: DataDir,
    keep: Keep,
    path: str,
    *,
    size: int = 32,
    colour: str = "rgb",
    owner: str = "",
) -> Dataset:
    """Pictures FOLDER/CLASS/*.png (jpg, ...), images:FOLDER; train and test above them if there.

    Args:
      size: height and width that pictures are brought to.
      colour: rgb, or gray.
      owner: folder, where paths are FOLDER/OWNER/CLASS/*; or a CSV file with the columns file (its
        path below FOLDER) and owner; empty: pictures have no owners.
    """
    del data_dir
    chosen("images", "colour", colour, tuple(MODES))
    if not 1 <= size <= 1024:
        raise UsageError(f"images.size is {size}; use 1 to 1024")
    root, name = existing("images", path), f"images:{path}"
    parts = {p: root / p for p in ("train", "test") if (root / p).is_dir()}
    if "train" not in parts:
        parts = {"train": root}
    levels = 3 if owner == "folder" else 2
    listed = _listed(name, owner) if owner not in ("", "folder") else {}
    files = {part: _files(name, folder, levels) for part, folder in parts.items()}
    classes = sorted({file.parent.name for each in files.values() for file in each})

    def owners(part: str) -> np.ndarray:
        if owner == "folder":
            return np.array([file.parent.parent.name for file in files[part]])
        return np.array([_owner(name, listed, file.relative_to(root)) for file in files[part]])

    def read(part: str) -> tuple[np.ndarray, np.ndarray]:
        x = np.stack([_read(name, file, size, MODES[colour]) for file in files[part]])
        y = np.array([classes.index(file.parent.name) for file in files[part]], np.int32)
        return x, y

    x, y = read("train")
    x_test, y_test = read("test") if "test" in parts else (None, None)
    whose: Any = (None, None, None)
    if owner:
        whose = owned(name, owners("train"), owners("test") if "test" in parts else None)
    whole = Dataset(
        name,
        x,
        y,
        x_test,
        y_test,
        len(classes),
        scale=np.array(1 / 255, np.float32),
        shift=np.array(0, np.float32),
        owner_train=whose[0],
        owner_test=whose[1],
        owner_names=whose[2],
        metadata={"classes": classes},
    )
    return kept(whole, keep)


def _files(name: str, folder: Path, levels: int) -> list[Path]:
    pattern = "/".join(["*"] * levels)
    files = sorted(
        p
        for p in folder.glob(pattern)
        if p.suffix.lower() in ENDINGS
        and not any(part.startswith(".") for part in p.relative_to(folder).parts)
    )
    if not files:
        wanted = "OWNER/CLASS/FILE" if levels == 3 else "CLASS/FILE"
        raise UsageError(f"{name}: {folder} has no pictures {wanted} ({', '.join(ENDINGS)})")
    return files


def _read(name: str, file: Path, size: int, mode: str) -> np.ndarray:
    try:
        return pixels(file, mode, size)
    except ValueError as error:
        raise UsageError(f"{name}: {file} cannot be read as a picture: {error}") from None


def _listed(name: str, path: str) -> dict[str, str]:
    file = existing("images.owner", path)
    try:
        with open(file, newline="", encoding="utf-8-sig") as opened:
            rows = list(csv.DictReader(opened, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{name}: {path} cannot be read as a list of owners: {error}") from None
    if not rows or not {"file", "owner"} <= set(rows[0]):
        there = ", ".join(rows[0]) if rows else "none"
        raise UsageError(f"{name}: {path} must have the columns file and owner; it has {there}")
    listed = {row["file"]: row["owner"] or "" for row in rows}
    for row in rows:
        if listed[row["file"]] != (row["owner"] or ""):
            raise UsageError(f"{name}: {path} has two owners for {row['file']!r}; leave one")
    return listed


def _owner(name: str, listed: dict[str, str], file: Path) -> str:
    if str(file) not in listed:
        raise UsageError(f"{name}: the list of owners has no file {str(file)!r}")
    return listed[str(file)]
