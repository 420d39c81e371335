"""Safetensors files: arrays by name, without code. They need the package safetensors."""

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core.errors import UsageError, first_line

_TYPES: dict[str, Any] = {  # by their names in a file
    "BF16": jnp.bfloat16,
    "BOOL": np.bool_,
    **{f"F{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
    **{f"{kind}{bits}": f"<{kind.lower()}{bits // 8}" for kind in "IU" for bits in (8, 16, 32, 64)},
}


def safetensors_package() -> Any:
    """Returns the package, with its module `numpy`; raises UsageError if it is not installed."""
    try:
        import safetensors.numpy
    except ImportError:
        raise UsageError(
            "safetensors is missing: run pip install '.[export]' in the clone"
        ) from None
    return safetensors


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Returns the arrays of a file by name. Raises UsageError if it cannot be read."""
    package = safetensors_package()
    try:
        return {
            name: np.frombuffer(array["data"], _TYPES[array["dtype"]]).reshape(array["shape"])
            for name, array in package.deserialize(Path(path).read_bytes())
        }
    except KeyError as error:
        raise UsageError(
            f"{path} has an array of type {error}, which NumPy lacks; save it as float32"
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or first_line(error)}") from None
    except (package.SafetensorError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}") from None
