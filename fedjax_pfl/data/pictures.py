"""One picture file as uint8 pixels, scaled by the range of its type."""

import io
from pathlib import Path
from typing import Any

import numpy as np


def pixels(file: Path | bytes, mode: str = "", size: int | None = None) -> np.ndarray:
    """Returns the pixels of a picture, uint8 [height, width, channels].

    Raises ValueError, in one line, for a file that is no picture, or one without a defined range.

    Args:
      file: Its path or its content.
      mode: Pillow's mode to convert to; empty: grey stays grey, anything else becomes RGB.
      size: Height and width to resize to; None: as it is.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as opened:
            picture = _of_eight_bits(opened)
            picture = picture.convert(mode or ("L" if picture.mode == "L" else "RGB"))
            picture = picture if size is None else picture.resize((size, size))
            array = np.asarray(picture)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError((str(error).splitlines() or [type(error).__name__])[0]) from None
    return array[:, :, None] if array.ndim == 2 else array


def _of_eight_bits(picture: Any) -> Any:
    """Scales a picture of 16 bits; Pillow would cut its values off at 255."""
    from PIL import Image

    if picture.mode in ("I;16", "I;16L", "I;16B", "I;16N"):
        values = np.asarray(picture).astype(np.float64)
        return Image.fromarray(np.rint(values / 257).astype(np.uint8))  # 65,535 becomes 255
    if picture.mode in ("I", "F"):
        kind = "real numbers" if picture.mode == "F" else "whole numbers of 32 bits"
        raise ValueError(f"it has {kind}, which have no defined range; save it with 8 or 16 bits")
    return picture
