"""Decoding of one image file to uint8 pixels, scaled by the range of its type."""

import io
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import first_line


def pixels(file: Path | bytes, mode: str = "", size: int | None = None) -> np.ndarray:
    """Returns the pixels of an image, uint8 [height, width, channels].

    Raises ValueError, in one line, if the file is not an image or has no defined range.

    Args:
      file: Its path or its content.
      mode: Pillow's mode to convert to. Empty: grey stays grey, anything else becomes RGB.
      size: Height and width to resize to, or None.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as source:
            image = _to_eight_bits(source)
            image = image.convert(mode or ("L" if image.mode == "L" else "RGB"))
            image = image if size is None else image.resize((size, size))
            array = np.asarray(image)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(first_line(error)) from None
    return array[:, :, None] if array.ndim == 2 else array


def _to_eight_bits(image: Any) -> Any:
    """Returns a Pillow image with 16-bit pixels scaled to 8 bits, other images unchanged.

    Pillow would clip values at 255. Raises ValueError for types without a defined range.
    """
    from PIL import Image

    if image.mode in ("I;16", "I;16L", "I;16B", "I;16N"):
        values = np.asarray(image).astype(np.float64)
        return Image.fromarray(np.rint(values / 257).astype(np.uint8))  # 65,535 becomes 255
    if image.mode in ("I", "F"):
        kind = "real numbers" if image.mode == "F" else "integers of 32 bits"
        raise ValueError(f"it has {kind}, which have no defined range; save it with 8 or 16 bits")
    return image
