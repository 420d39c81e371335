"""Transforms around algorithms: chain(algorithm, compression(...), private_layers(...)).

Each transform has a file with its settings, and an entry in `REGISTRY`.
"""

from collections.abc import Callable
from typing import Any

from fedjax_pfl.core.setting import Setting
from fedjax_pfl.transforms.compression import COMPRESSION, compression
from fedjax_pfl.transforms.private_layers import KEEP_HEAD, private_layers
from fedjax_pfl.transforms.robust import ROBUST, robust
from fedjax_pfl.transforms.server_optimizer import (
    SERVER_OPTIMIZER,
    SERVER_OPTIMIZERS,
    server_optimizer,
)
from fedjax_pfl.transforms.upload_noise import NOISE, upload_noise
from fedjax_pfl.transforms.wrapping import Selectable, Transform, TransformContext, chain

# In the order in which they wrap a method, innermost first.
REGISTRY: tuple[Selectable, ...] = (KEEP_HEAD, NOISE, COMPRESSION, SERVER_OPTIMIZER, ROBUST)
SETTINGS: dict[str, Setting] = {
    name: setting for selectable in REGISTRY for name, setting in selectable.settings.items()
}

__all__ = [
    "REGISTRY",
    "SERVER_OPTIMIZERS",
    "SETTINGS",
    "Selectable",
    "Transform",
    "TransformContext",
    "chain",
    "compression",
    "private_layers",
    "robust",
    "selected_transforms",
    "server_optimizer",
    "upload_noise",
]


def selected_transforms(
    value_of: Callable[[str], Any], context: TransformContext
) -> list[Transform]:
    """Returns the transforms that the settings select, in the order of `chain`.

    Args:
      value_of: Name of a setting -> its value.
      context: Network, federation and data of the phase.
    """
    transforms = (selectable.make(value_of, context) for selectable in REGISTRY)
    return [transform for transform in transforms if transform is not None]
