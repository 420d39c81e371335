"""Images in folders: one folder per class, optionally below one folder per owner."""

import csv
from pathlib import Path

import numpy as np

from fedjax_pfl.core.errors import UsageError, require_one_of
from fedjax_pfl.data.dataset import Dataset, number_owners
from fedjax_pfl.data.pictures import pixels
from fedjax_pfl.data.tables import find_path

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
MODES = {"rgb": "RGB", "gray": "L"}


def images(path: str, *, size: int = 32, colour: str = "rgb", owner: str = "") -> Dataset:
    """Images FOLDER/CLASS/*.png (jpg, ...), images:FOLDER; folders train and test are optional.

    Args:
      size: Height and width to resize images to.
      colour: rgb, or gray.
      owner: folder, for paths FOLDER/OWNER/CLASS/*, or a CSV file with the columns file (its path
        below FOLDER) and owner. Empty: no owners.
    """
    require_one_of("images.colour", colour, tuple(MODES))
    if not 1 <= size <= 1024:
        raise UsageError(f"images.size is {size}; use 1 to 1024")
    root, name = find_path("images", path), f"images:{path}"
    folders = {p: root / p for p in ("train", "test") if (root / p).is_dir()}
    if "train" not in folders:
        folders = {"train": root}
    levels = 3 if owner == "folder" else 2
    owner_of = _read_owners(name, owner) if owner not in ("", "folder") else {}
    files = {part: _find_images(name, folder, levels) for part, folder in folders.items()}
    classes = sorted({file.parent.name for part in files.values() for file in part})

    def owners(part: str) -> np.ndarray:
        if owner == "folder":
            return np.array([file.parent.parent.name for file in files[part]])
        relative = [str(file.relative_to(root)) for file in files[part]]
        for file in relative:
            if file not in owner_of:
                raise UsageError(f"{name}: the list of owners has no file {file!r}")
        return np.array([owner_of[file] for file in relative])

    def read(part: str) -> tuple[np.ndarray, np.ndarray]:
        x = np.stack([_read_image(name, file, size, MODES[colour]) for file in files[part]])
        y = np.array([classes.index(file.parent.name) for file in files[part]], np.int32)
        return x, y

    x, y = read("train")
    x_test, y_test = read("test") if "test" in folders else (None, None)
    train_owners = owners("train") if owner else None
    test_owners = owners("test") if owner and "test" in folders else None
    owner_train, owner_test, owner_names = number_owners(name, train_owners, test_owners)
    return Dataset(
        name=name,
        x_train=x,
        y_train=y,
        x_test=x_test,
        y_test=y_test,
        outputs=len(classes),
        scale=np.array(1 / 255, np.float32),
        shift=np.array(0, np.float32),
        owner_train=owner_train,
        owner_test=owner_test,
        owner_names=owner_names,
        metadata={"classes": classes},
    )


def _find_images(name: str, folder: Path, levels: int) -> list[Path]:
    """Returns the image files `levels` below a folder, except hidden ones."""
    pattern = "/".join(["*"] * levels)
    files = sorted(
        p
        for p in folder.glob(pattern)
        if p.suffix.lower() in ENDINGS
        and not any(part.startswith(".") for part in p.relative_to(folder).parts)
    )
    if not files:
        layout = "OWNER/CLASS/FILE" if levels == 3 else "CLASS/FILE"
        raise UsageError(f"{name}: {folder} has no images {layout} ({', '.join(ENDINGS)})")
    return files


def _read_image(name: str, file: Path, size: int, mode: str) -> np.ndarray:
    try:
        return pixels(file, mode, size)
    except ValueError as error:
        raise UsageError(f"{name}: {file} cannot be read as an image: {error}") from None


def _read_owners(name: str, path: str) -> dict[str, str]:
    """Returns the owner of each file that a CSV file lists, or raises UsageError."""
    file = find_path("images.owner", path)
    try:
        with open(file, newline="", encoding="utf-8-sig") as stream:
            rows = list(csv.DictReader(stream, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{name}: {path} cannot be read as a list of owners: {error}") from None
    if not rows or not {"file", "owner"} <= set(rows[0]):
        columns = ", ".join(rows[0]) if rows else "none"
        raise UsageError(f"{name}: {path} must have the columns file and owner; it has {columns}")
    owner_of = {row["file"]: row["owner"] or "" for row in rows}
    for row in rows:
        if owner_of[row["file"]] != (row["owner"] or ""):
            raise UsageError(f"{name}: {path} has two owners for {row['file']!r}; keep one")
    return owner_of
