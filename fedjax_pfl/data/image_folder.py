"""Images in folders, whose names are classes, owners (such as domains), and training or test."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_pfl.core.errors import UsageError, require_one_of
from fedjax_pfl.data.dataset import Dataset, arrays
from fedjax_pfl.data.pictures import pixels
from fedjax_pfl.data.tables import find_path, read_csv

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
MODES = {"rgb": "RGB", "gray": "L"}
_TRAIN, _TEST = "train", "test"  # default names of the parts


class _Image(NamedTuple):
    """One image file."""

    file: Path
    label: str  # name of its class
    owner: str  # "" if there are no owners


def images(
    path: str,
    *,
    size: int = 32,
    colour: str = "rgb",
    folders: str = "class",
    owner: str = "",
    train: str = _TRAIN,
    test: str = _TEST,
    classes: str = "",
) -> Dataset:
    """Images FOLDER/CLASS/*.png (jpg, ...) or in other folders (`folders`), images:FOLDER.

    Args:
      size: Height and width to resize images to.
      colour: rgb, or gray.
      folders: Meaning of each level of folders below FOLDER, from the top, separated by commas:
        class, owner, part (training or test set), or other. A first level with the folder train is
        a part.
      owner: CSV file with the columns file (its path below FOLDER) and owner. Empty: the folder, if
        `folders` has owner.
      train: Parts to train on, separated by commas, if a level is a part.
      test: Parts of the test set, separated by commas. Or text files, by a pattern such as
        *_test.txt, whose lines begin with a test image and, if its folders do not tell, its class.
      classes: Classes to use, separated by commas. Empty: all.
    """
    require_one_of("images.colour", colour, tuple(MODES))
    if not 1 <= size <= 1024:
        raise UsageError(f"images.size is {size}; use 1 to 1024")
    root, name = find_path("images", path), f"images:{path}"
    if not _split(train):
        raise UsageError(f"{name}: images.train names no part; name one, such as {_TRAIN}")
    levels = _levels(folders)
    if "part" not in levels and any((root / part).is_dir() for part in _split(train)):
        levels = ["part", *levels]
    if owner and "owner" in levels:
        raise UsageError("images.owner and the level owner of images.folders exclude each other")
    images_by_part = _find_images(name, root, levels)
    parts = {"train": _split(train), "test": [] if test.endswith(".txt") else _split(test)}
    if "part" not in levels:
        parts["train"] = [""]
        if train != _TRAIN or (parts["test"] and test != _TEST):
            raise UsageError(f"{name} has no folder {_split(train)[0]!r} to train on")
    names = [*parts["train"], *parts["test"]]
    if twice := [part for part in names if names.count(part) > 1]:
        raise UsageError(
            f"{name}: images.train and images.test name {twice[0]!r} twice, and its images would "
            "be used twice: name it once"
        )
    sets = {
        use: [image for p in parts[use] for image in images_by_part.get(p, [])] for use in parts
    }
    for use, default in (("train", _TRAIN), ("test", _TEST)):
        for part in parts[use]:
            if part not in images_by_part and (use == "train" or test != default):
                raise UsageError(f"{name}: images.{use} names {part!r}, which has no images")
    if test.endswith(".txt"):
        sets["train"], sets["test"] = _split_by_lists(name, root, test, sets["train"], levels)
    if owner:
        owner_of = _read_owners(owner)
        for use, members in sets.items():
            sets[use] = [i._replace(owner=_owner(name, root, i.file, owner_of)) for i in members]
    class_names = _class_names(name, root, levels, sets, [p for ps in parts.values() for p in ps])
    if chosen_classes := _split(classes):
        if missing := sorted(set(chosen_classes) - set(class_names)):
            raise UsageError(
                f"{name}: images.classes names {missing[0]!r}, which is no class; there are "
                f"{', '.join(class_names[:12])}{', ...' if len(class_names) > 12 else ''}"
            )
        if len(set(chosen_classes)) < len(chosen_classes):
            raise UsageError(f"{name}: images.classes names a class twice; name it once")
        class_names = sorted(chosen_classes)
    number = {label: i for i, label in enumerate(class_names)}
    has_owners = bool(owner) or "owner" in levels

    def read(use: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Returns images, class numbers and owners of the training or the test set."""
        members = [image for image in sets[use] if image.label in number]
        if not members:
            raise UsageError(f"{name} has no images for the {use} set")
        x = np.empty((len(members), size, size, len(MODES[colour])), np.uint8)
        for row, image in zip(x, members, strict=True):
            row[:] = _read_image(name, image.file, size, MODES[colour])
        y = np.array([number[image.label] for image in members], np.int32)
        return x, y, np.array([image.owner for image in members]) if has_owners else None

    x, y, owners = read("train")
    x_test, y_test, owners_test = read("test") if sets["test"] else (None, None, None)
    dataset = arrays(
        x,
        y,
        x_test,
        y_test,
        outputs=len(class_names),
        owners=owners,
        owners_test=owners_test,
        name=name,
    )
    return dataset._replace(metadata={"classes": class_names})


def _split(names: str) -> list[str]:
    """Returns the names in a text that separates them by commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


def _levels(folders: str) -> list[str]:
    """Returns the meanings of the levels of folders; raises UsageError if they are not valid."""
    levels = _split(folders)
    for level in levels:
        require_one_of("images.folders", level, ("class", "owner", "part", "other"))
        if level != "other" and levels.count(level) > 1:
            raise UsageError(f"images.folders={folders} has {level} twice")
    if "class" not in levels:
        raise UsageError(f"images.folders={folders} has no level class")
    return levels


def _is_visible(path: Path, root: Path) -> bool:
    """Returns True if no name of a path below `root` begins with a dot."""
    return not any(part.startswith(".") for part in path.relative_to(root).parts)


def _find_images(name: str, root: Path, levels: list[str]) -> dict[str, list[_Image]]:
    """Returns the images of each part in the order of their paths; without parts, of part "".

    `levels` names each level of folders below `root`. Raises UsageError if there is no image.
    """
    images_by_part: dict[str, list[_Image]] = {}
    for file in sorted(root.glob("/".join(["*"] * (len(levels) + 1)))):
        if file.suffix.lower() in ENDINGS and _is_visible(file, root):
            part, image = _place(file, root, levels)
            images_by_part.setdefault(part, []).append(image)
    if not images_by_part:
        layout = "/".join([*(level.upper() for level in levels), "FILE"])
        raise UsageError(
            f"{name}: {root} has no images {layout} ({', '.join(ENDINGS)}); move them, or name the "
            "levels of folders in images.folders"
        )
    return images_by_part


def _place(file: Path, root: Path, levels: list[str]) -> tuple[str, _Image]:
    """Returns the part of an image, "" if there are none, and the image, by its folders."""
    folder = dict(zip(levels, file.relative_to(root).parts, strict=False))
    return folder.get("part", ""), _Image(file, folder["class"], folder.get("owner", ""))


def _split_by_lists(
    name: str, root: Path, pattern: str, images: list[_Image], levels: list[str]
) -> tuple[list[_Image], list[_Image]]:
    """Moves the images that text files list to the test set. Returns training and test set.

    A line begins with the path of an image below `root` or the folder of the text file, or with the
    name of a file in the folder images next to it. Its second word is the class of an image that is
    not in `images`. Raises UsageError for a list or a listed image that does not exist.
    """
    by_path = {os.path.abspath(image.file): image for image in images}
    test = dict[str, _Image]()
    lists = sorted(root.glob(pattern))
    if not lists:
        raise UsageError(f"{name}: images.test names {pattern!r}, and there is no such file")
    for text in lists:
        try:
            lines = text.read_text("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{name}: {text.name} cannot be read: {error}") from None
        for words in filter(None, map(str.split, lines)):
            places = (root / words[0], text.parent / words[0], text.parent / "images" / words[0])
            file = next((place for place in places if place.is_file()), None)
            if file is None:
                raise UsageError(
                    f"{name}: {text.name} lists {words[0]!r}, and there is no such file"
                )
            path = os.path.abspath(file)  # a list may write a path in another way, such as a/../b
            if path not in by_path and (len(words) < 2 or "owner" in levels):
                raise UsageError(
                    f"{name}: {text.name} lists {words[0]!r}, which is not in the folders "
                    f"{'/'.join(levels)}"
                )
            test[path] = by_path.get(path) or _Image(file, words[1], "")
    train = [image for path, image in by_path.items() if path not in test]
    return train, list(test.values())


def _class_names(
    name: str, root: Path, levels: list[str], sets: dict[str, list[_Image]], parts: list[str]
) -> list[str]:
    """Returns the names of all classes, sorted.

    Raises UsageError if a folder of a class, in one of the used `parts`, has no images in `sets`.
    """
    names = sorted({image.label for members in sets.values() for image in members})
    depth = levels.index("class") + 1
    for folder in sorted(root.glob("/".join(["*"] * depth))):
        place = dict(zip(levels, folder.relative_to(root).parts, strict=False))
        is_used = folder.is_dir() and _is_visible(folder, root) and place.get("part", "") in parts
        if is_used and folder.name not in names:
            raise UsageError(f"{name}: class {folder.name!r} has no images; remove its folder")
    return names


def _read_image(name: str, file: Path, size: int, mode: str) -> np.ndarray:
    """Returns an image as uint8 [size, size, channels] in Pillow's `mode`, or raises UsageError."""
    try:
        return pixels(file, mode, size)
    except ValueError as error:
        raise UsageError(f"{name}: {file} cannot be read as an image: {error}") from None


def _owner(name: str, root: Path, file: Path, owner_of: dict[str, str]) -> str:
    """Returns `owner_of` of a file's path relative to `root`; raises UsageError if it has none."""
    relative = str(file.relative_to(root))
    if relative not in owner_of:
        raise UsageError(f"{name}: the list of owners has no file {relative!r}")
    return owner_of[relative]


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
