"""Reading prepared TensorFlow Datasets folders (array_record) without TensorFlow.

Records are read raw and their images decoded together: image features of tfds decode one by one,
at several times the cost.
"""

import math
import os
import re
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data.pictures import pixels

_CHUNK = 1000  # images decoded at a time: bounds the memory of decoded, not yet shrunk images
_DOWNLOADS = {  # as the catalogue of tfds gives them
    "cifar10": "162 MiB",
    "cifar100": "161 MiB",
    "mnist": "11 MiB",
    "fashion_mnist": "29 MiB",
    "emnist": "536 MiB",
    "svhn_cropped": "1.5 GiB",
    "omniglot": "18 MiB",
}


def find(dataset: str, data_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder of the newest prepared version of `dataset`, `name` or `name/config`.

    Looks in `data_dir`, else in TFDS_DATA_DIR, else where tfds keeps its data by default.
    """
    root = root_of(data_dir)
    if versions := _versions(root, dataset):
        return max(versions, key=lambda p: tuple(map(int, p.name.split("."))))
    point = "point to another folder with the setting data_dir or TFDS_DATA_DIR"
    name = dataset.split("/")[0]
    raise UsageError(
        f"dataset {dataset} is not in {root}: run `{sys.executable} -m pip install tensorflow`, "
        f'then `{sys.executable} -c "import tensorflow_datasets as tfds; '
        f"tfds.builder('{dataset}', data_dir='{root}')"
        f".download_and_prepare(file_format='array_record')\"` (downloads {_DOWNLOADS[name]}); "
        f"or {point}"
    )


def is_there(dataset: str, data_dir: str | os.PathLike[str] | None = None) -> bool:
    """Whether `find` finds it."""
    return bool(_versions(root_of(data_dir), dataset))


def root_of(data_dir: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """Returns the folder that holds named datasets."""
    return data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"


def _versions(root: str | os.PathLike[str], dataset: str) -> list[Path]:
    home = Path(root).expanduser() / dataset
    found = home.iterdir() if home.is_dir() else ()
    return [p for p in found if re.fullmatch(r"\d+\.\d+\.\d+", p.name) and p.is_dir()]


def splits(folder: Path) -> dict[str, int]:
    """The splits of a prepared folder and how many examples each has."""
    return {name: info.num_examples for name, info in _builder(folder).info.splits.items()}


def names(folder: Path, feature: str) -> list[str] | None:
    """What the numbers of a feature stand for; None where they are only numbers."""
    found = getattr(_builder(folder).info.features[feature], "names", None)
    return None if found is None else list(map(str, found))


def unchanged(images: np.ndarray) -> np.ndarray:
    """Images as they are stored."""
    return images


def read(
    folder: Path,
    split: str,
    features: tuple[str, ...],
    *,
    rows: np.ndarray | None = None,
    convert: Callable[[np.ndarray], np.ndarray] = unchanged,
) -> dict[str, np.ndarray]:
    """Some features of a split, each as one array; `image` is decoded.

    Args:
      rows: which records, in ascending order; all of them where None.
      convert: applied to each chunk of decoded images, uint8 [chunk, height, width, channels].
    """
    builder = _builder(folder)
    try:
        return _read(builder, split, features, rows, convert)
    except Exception as error:  # the C++ reader, protobuf, zlib and Pillow raise what they like
        raise _damaged(folder, f"split {split} cannot be read", error) from error


def _damaged(folder: Path, what: str, error: object) -> UsageError:
    detail = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
    return UsageError(
        f"{folder}: {what} ({' '.join(detail.split())[:200]}); the folder is damaged or half "
        "written: delete it and prepare it again"
    )


def _builder(folder: Path) -> Any:
    # Without this file tfds falls back on other formats and gives a misleading error.
    if not (folder / "dataset_info.json").is_file():
        raise _damaged(folder, "not a prepared dataset", "dataset_info.json is missing")
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise UsageError(f"tensorflow-datasets cannot be imported: {error}") from error
    try:
        builder = tfds.builder_from_directory(folder)
        kind = builder.info.file_format.value
    except Exception as error:  # damaged JSON, of either file
        raise _damaged(folder, "its description cannot be read", error) from error
    if kind != "array_record":
        raise UsageError(
            f"{folder} is prepared as {kind}, which cannot be read without TensorFlow: prepare it "
            "again with download_and_prepare(file_format='array_record')"
        )
    return builder


def _read(
    builder: Any,
    split: str,
    features: tuple[str, ...],
    rows: np.ndarray | None,
    convert: Callable[[np.ndarray], np.ndarray],
) -> dict[str, np.ndarray]:
    from tensorflow_datasets.core.decode import DeserializeMethod
    from tensorflow_datasets.proto import tf_example_pb2

    source = builder.as_data_source(split=split, deserialize_method=DeserializeMethod.RAW_BYTES)
    rows = np.arange(len(source)) if rows is None else rows
    parts: dict[str, list[np.ndarray]] = {name: [] for name in features}
    for start in range(0, len(rows), _CHUNK):
        records = source.__getitems__(rows[start : start + _CHUNK].tolist())
        examples = [tf_example_pb2.Example.FromString(r).features.feature for r in records]
        for name in features:
            values = [_value(example, name) for example in examples]
            chunk = convert(decode(values)) if name == "image" else np.array(values)
            parts[name].append(chunk)
    return {name: np.concatenate(chunks) for name, chunks in parts.items()}


def _value(example: Any, name: str) -> Any:
    if name not in example:
        raise KeyError(f"a record has no feature {name}")
    feature = example[name]
    return getattr(feature, feature.WhichOneof("kind")).value[0]


def decode(images: list[bytes]) -> np.ndarray:
    """Decode image files of one size, uint8 [n, height, width, channels].

    Plain 8-bit PNGs with one header are joined into one tall picture: their scanlines, each image
    preceded by a line of zeros, which is what the first line of a PNG is predicted from. It is then
    decoded in one call; anything else goes through Pillow one by one.
    """
    from PIL import Image

    header = images[0][:29]
    modes = {(8, 0, 0, 0, 0): ("L", 1), (8, 2, 0, 0, 0): ("RGB", 3)}
    plain = len(header) == 29 and header[12:16] == b"IHDR"
    mode = modes.get(struct.unpack("5B", header[24:29])) if plain else None
    width, height = struct.unpack(">2I", header[16:24]) if plain else (0, 0)
    large = width * height > (Image.MAX_IMAGE_PIXELS or math.inf)  # which Pillow refuses
    if mode is None or large or any(image[:29] != header for image in images):
        return np.stack([pixels(image) for image in images])
    line = 1 + width * mode[1]
    scanlines = []
    for image in images:
        try:
            content = zlib.decompressobj().decompress(_idat(image), height * line + 1)
        except zlib.error as error:
            raise ValueError(f"a PNG is damaged: {error}") from None
        if len(content) != height * line:
            raise ValueError("a PNG has too few or too many pixels")
        scanlines += [bytes(line), content]
    tall = (width, (height + 1) * len(images))
    # Level 0 stores without compressing: all that is wanted is Pillow's undoing of the filters.
    joined = zlib.compress(b"".join(scanlines), 0)
    whole = np.asarray(Image.frombytes(mode[0], tall, joined, "zip", mode[0]))
    return whole.reshape(len(images), height + 1, width, mode[1])[:, 1:]


def _idat(png: bytes) -> bytes:
    """The compressed pixels of a PNG: the contents of its IDAT chunks."""
    found, at = [], 8
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] == b"IDAT":
            found.append(png[at + 8 : at + 8 + length])
        at += length + 12
    return b"".join(found)
