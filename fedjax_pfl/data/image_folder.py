"""Images in folders: one folder per class, optionally below one folder per owner."""

from pathlib import Path

import numpy as np

from fedjax_pfl.core.errors import UsageError, require_one_of
from fedjax_pfl.data.dataset import Dataset, arrays
from fedjax_pfl.data.pictures import pixels
from fedjax_pfl.data.tables import find_path, read_csv

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
    owner_of = _read_owners(owner) if owner not in ("", "folder") else {}
    files = {part: _find_images(name, folder, levels) for part, folder in folders.items()}
    classes = sorted({file.parent.name for part in files.values() for file in part})

    def owner_name(file: Path) -> str:
        if owner == "folder":
            return file.parent.parent.name
        relative = str(file.relative_to(root))
        if relative not in owner_of:
            raise UsageError(f"{name}: the list of owners has no file {relative!r}")
        return owner_of[relative]

    def read(part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Returns images, class numbers and owners of the training or the test set."""
        x = np.stack([_read_image(name, file, size, MODES[colour]) for file in files[part]])
        y = np.array([classes.index(file.parent.name) for file in files[part]], np.int32)
        return x, y, np.array([owner_name(file) for file in files[part]]) if owner else None

    x, y, owners = read("train")
    x_test, y_test, owners_test = read("test") if "test" in folders else (None, None, None)
    dataset = arrays(
        x,
        y,
        x_test,
        y_test,
        outputs=len(classes),
        owners=owners,
        owners_test=owners_test,
        name=name,
    )
    return dataset._replace(metadata={"classes": classes})


def _find_images(name: str, folder: Path, levels: int) -> list[Path]:
    """Returns the images FOLDER/CLASS/FILE, or FOLDER/OWNER/CLASS/FILE if `levels` is 3.

    Hidden files are left out. `name` is that of the dataset, for messages.
    """
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
    """Returns an image resized to uint8 [size, size, channels], or raises UsageError.

    Args:
      name: Name of the dataset, for the message.
      file: Path of the image.
      size: Height and width.
      mode: Pillow's mode to convert to: RGB or L (gray).
    """
    try:
        return pixels(file, mode, size)
    except ValueError as error:
        raise UsageError(f"{name}: {file} cannot be read as an image: {error}") from None


def _read_owners(path: str) -> dict[str, str]:
    """Returns the owners that the CSV file `path` lists, by image file; UsageError if it cannot."""
    table = read_csv(path, "images.owner")
    files, owners = (
        table.column(column, "images.owner", as_text=True).tolist() for column in ("file", "owner")
    )
    owner_of = dict(zip(files, owners, strict=True))
    for file, owner in zip(files, owners, strict=True):
        if owner_of[file] != owner:
            raise UsageError(f"{table.name} has two owners for {file!r}; keep one")
    return owner_of
