"""Reading of prepared TensorFlow Datasets folders (array_record) without TensorFlow.

Records are read raw and their images decoded in batches, several times faster than by tfds.
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

_CHUNK = 1000  # images decoded together; bounds the memory of images before they shrink
_DOWNLOADS = {  # sizes in the catalogue of tfds
    "cifar10": "162 MiB",
    "cifar100": "161 MiB",
    "mnist": "11 MiB",
    "fashion_mnist": "29 MiB",
    "emnist": "536 MiB",
    "svhn_cropped": "1.5 GiB",
    "omniglot": "18 MiB",
}


PREPARE_AGAIN = "delete it, and the next call names the command that prepares it"


def find_folder(dataset: str, data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder of the newest prepared version of a dataset, or raises UsageError.

    `dataset` is NAME or NAME/CONFIG. The default of `data_dir` is that of `root_folder`.
    """
    root = root_folder(data_dir)
    if versions := _versions(root, dataset):
        return max(versions, key=lambda p: tuple(map(int, p.name.split("."))))
    name = dataset.split("/")[0]
    raise UsageError(
        f"dataset {dataset} is not in {root}: run `{sys.executable} -m pip install tensorflow`, "
        f'then `{sys.executable} -c "import tensorflow_datasets as tfds; '
        f"tfds.builder('{dataset}', data_dir='{root}')"
        f".download_and_prepare(file_format='array_record')\"` (downloads {_DOWNLOADS[name]}); "
        "or set data_dir or TFDS_DATA_DIR to another folder"
    )


def is_prepared(dataset: str, data_dir: str | os.PathLike[str] | None = None) -> bool:
    """Returns True if `find_folder` would return a folder."""
    return bool(_versions(root_folder(data_dir), dataset))


def root_folder(data_dir: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """Returns the folder that holds named datasets: `data_dir`, TFDS_DATA_DIR or tfds's default."""
    return data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"


def _versions(root: str | os.PathLike[str], dataset: str) -> list[Path]:
    """Returns the folders root/dataset/1.2.3 of all prepared versions, [] if none."""
    folder = Path(root).expanduser() / dataset
    paths = folder.iterdir() if folder.is_dir() else ()
    return [p for p in paths if re.fullmatch(r"\d+\.\d+\.\d+", p.name) and p.is_dir()]


def split_sizes(folder: Path) -> dict[str, int]:
    """Returns the number of examples of each split of a prepared folder."""
    return {name: info.num_examples for name, info in _builder(folder).info.splits.items()}


def class_names(folder: Path, feature: str) -> list[str] | None:
    """Returns the names of the classes of a feature such as label, or None if it has none."""
    names = getattr(_builder(folder).info.features[feature], "names", None)
    return None if names is None else list(map(str, names))


def read_split(
    folder: Path,
    split: str,
    features: tuple[str, ...],
    *,
    rows: np.ndarray | None = None,
    convert: Callable[[np.ndarray], np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Reads features of a split. Returns their values by name, each [rows, ...].

    The feature `image` is decoded to uint8 [rows, height, width, channels]. Raises UsageError if
    the folder is damaged.

    Args:
      folder: A prepared folder.
      split: Name of the split.
      features: Names of the features.
      rows: Records to read, in ascending order, or None for all.
      convert: Applied to each chunk of decoded images, uint8 [chunk, height, width, channels];
        returns the images to store. None: images stay as decoded.
    """
    builder = _builder(folder)
    try:
        from tensorflow_datasets.core.decode import DeserializeMethod
        from tensorflow_datasets.proto import tf_example_pb2

        source = builder.as_data_source(split=split, deserialize_method=DeserializeMethod.RAW_BYTES)
        rows = np.arange(len(source)) if rows is None else rows
        chunks: dict[str, list[np.ndarray]] = {name: [] for name in features}
        for start in range(0, len(rows), _CHUNK):
            records = source.__getitems__(rows[start : start + _CHUNK].tolist())
            examples = [tf_example_pb2.Example.FromString(r).features.feature for r in records]
            for name in features:
                values = [_value(example, name) for example in examples]
                chunk = decode(values) if name == "image" else np.array(values)
                chunks[name].append(convert(chunk) if convert and name == "image" else chunk)
        return {name: np.concatenate(arrays) for name, arrays in chunks.items()}
    except Exception as error:  # any exception of the C++ reader, protobuf, zlib, Pillow
        raise _damaged(folder, f"split {split} cannot be read", error) from error


def _damaged(folder: Path, problem: str, error: object) -> UsageError:
    """Returns the error that a folder is damaged, with `problem` and the text of `error`."""
    detail = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
    return UsageError(
        f"{folder}: {problem} ({' '.join(detail.split())[:200]}); the folder is damaged or half "
        f"written: {PREPARE_AGAIN}"
    )


def _builder(folder: Path) -> Any:
    """Returns the tfds builder of a prepared folder, or raises UsageError."""
    # Without this file tfds falls back on other formats and gives a misleading error.
    if not (folder / "dataset_info.json").is_file():
        raise _damaged(folder, "not a prepared dataset", "dataset_info.json is missing")
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise UsageError(f"tensorflow-datasets cannot be imported: {error}") from error
    try:
        builder = tfds.builder_from_directory(folder)
        file_format = builder.info.file_format.value
    except Exception as error:  # damaged JSON in one of two files
        raise _damaged(folder, "its description cannot be read", error) from error
    if file_format != "array_record":
        raise UsageError(
            f"{folder} is prepared as {file_format}, which cannot be read without TensorFlow: "
            "prepare it again with download_and_prepare(file_format='array_record')"
        )
    return builder


def _value(example: Any, name: str) -> Any:
    """Returns the first value, bytes or a number, of feature `name` of a record.

    Raises KeyError if it is missing.
    """
    if name not in example:
        raise KeyError(f"a record has no feature {name}")
    feature = example[name]
    return getattr(feature, feature.WhichOneof("kind")).value[0]


def decode(images: list[bytes]) -> np.ndarray:
    """Decodes image files of one size to uint8 [n, height, width, channels].

    `images` are the contents of files. For speed, 8-bit PNGs with equal headers are joined into one
    tall image and decoded in one call. A line of zeros precedes each image, because PNG predicts
    the first line from zeros. Other files are decoded separately. Raises ValueError for a damaged
    PNG.
    """
    from PIL import Image

    header = images[0][:29]
    modes = {(8, 0, 0, 0, 0): ("L", 1), (8, 2, 0, 0, 0): ("RGB", 3)}
    is_png = len(header) == 29 and header[12:16] == b"IHDR"
    mode = modes.get(struct.unpack("5B", header[24:29])) if is_png else None
    width, height = struct.unpack(">2I", header[16:24]) if is_png else (0, 0)
    too_large = width * height > (Image.MAX_IMAGE_PIXELS or math.inf)  # Pillow must refuse it
    if mode is None or too_large or any(image[:29] != header for image in images):
        return np.stack([pixels(image) for image in images])
    line = 1 + width * mode[1]
    scanlines = []
    for image in images:
        try:
            content = zlib.decompressobj().decompress(_compressed_pixels(image), height * line + 1)
        except zlib.error as error:
            raise ValueError(f"a PNG is damaged: {error}") from None
        if len(content) != height * line:
            raise ValueError("a PNG has too few or too many pixels")
        scanlines += [bytes(line), content]
    size = (width, (height + 1) * len(images))
    # Level 0 stores without compression: only Pillow's inversion of the PNG filters is needed.
    joined = zlib.compress(b"".join(scanlines), 0)
    tall = np.asarray(Image.frombytes(mode[0], size, joined, "zip", mode[0]))
    return tall.reshape(len(images), height + 1, width, mode[1])[:, 1:]


def _compressed_pixels(png: bytes) -> bytes:
    """Returns the joined contents of the IDAT chunks of a PNG file: pixels, still compressed."""
    chunks, start = [], 8
    while start < len(png):
        length = int.from_bytes(png[start : start + 4], "big")
        if png[start + 4 : start + 8] == b"IDAT":
            chunks.append(png[start + 8 : start + 8 + length])
        start += length + 12
    return b"".join(chunks)
