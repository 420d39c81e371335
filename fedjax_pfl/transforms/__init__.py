"""Algorithms around algorithms: chain(algorithm, compression(...), private_layers(...)).

A transform is a file here, with the settings that ask for it, and an entry of `REGISTRY`.
"""

from collections.abc import Callable
from typing import Any

from fedjax_pfl.core.setting import Setting
from fedjax_pfl.transforms.compression import COMPRESSION, compression
from fedjax_pfl.transforms.private_layers import KEEP_HEAD, private_layers
from fedjax_pfl.transforms.server_optimizer import (
    SERVER_OPTIMIZER,
    SERVER_OPTIMIZERS,
    server_optimizer,
)
from fedjax_pfl.transforms.upload_noise import NOISE, upload_noise
from fedjax_pfl.transforms.wrapping import Around, Selectable, Transform, chain

# In their order around a method, the first one innermost.
REGISTRY: tuple[Selectable, ...] = (KEEP_HEAD, NOISE, COMPRESSION, SERVER_OPTIMIZER)
SETTINGS: dict[str, Setting] = {k: row for one in REGISTRY for k, row in one.settings.items()}

__all__ = [
    "REGISTRY",
    "SERVER_OPTIMIZERS",
    "SETTINGS",
    "Around",
    "Selectable",
    "Transform",
    "asked_for",
    "chain",
    "compression",
    "private_layers",
    "server_optimizer",
    "upload_noise",
]


def asked_for(value_of: Callable[[str], Any], around: Around) -> list[Transform]:
    """The transforms that settings ask for, in the order of `chain`."""
    made = (one.make(value_of, around) for one in REGISTRY)
    return [transform for transform in made if transform is not None]
