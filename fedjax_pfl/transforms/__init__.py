"""Transforms around algorithms: chain(algorithm, compression(...), private_layers(...)).

Each transform has a file with its settings, and an entry in `REGISTRY`.
"""

from collections.abc import Callable
from typing import Any

from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.local_training import Training
from fedjax_pfl.core.setting import Setting
from fedjax_pfl.transforms.attacks import (
    ATTACK,
    DataAttack,
    attack_data,
    attack_uploads,
    attackers,
    require_attackers,
    select_attackers,
)
from fedjax_pfl.transforms.compression import COMPRESSION, compression
from fedjax_pfl.transforms.poisoning import poison, triggered
from fedjax_pfl.transforms.privacy import (
    PRIVACY,
    client_privacy,
    example_privacy,
    fixed_noise,
    local_privacy,
)
from fedjax_pfl.transforms.private_layers import KEEP_HEAD, private_layers
from fedjax_pfl.transforms.robust import ROBUST, robust
from fedjax_pfl.transforms.server_optimizer import (
    SERVER_OPTIMIZER,
    SERVER_OPTIMIZERS,
    server_optimizer,
)
from fedjax_pfl.transforms.wrapping import (
    Selectable,
    Statement,
    Transform,
    TransformContext,
    chain,
)

# In the order in which they wrap a method, innermost first.
REGISTRY: tuple[Selectable, ...] = (
    KEEP_HEAD,
    PRIVACY,
    COMPRESSION,
    SERVER_OPTIMIZER,
    ROBUST,
    ATTACK,
)
SETTINGS: dict[str, Setting] = {
    name: setting for selectable in REGISTRY for name, setting in selectable.settings.items()
}

# Values of settings with which uploads have neither noise nor compression.
PLAIN_UPLOADS: dict[str, Any] = {
    name: setting.default_value
    for selectable in (PRIVACY, COMPRESSION)
    for name, setting in selectable.settings.items()
}

__all__ = [
    "PLAIN_UPLOADS",
    "REGISTRY",
    "SERVER_OPTIMIZERS",
    "SETTINGS",
    "DataAttack",
    "Selectable",
    "Statement",
    "Transform",
    "TransformContext",
    "attack_data",
    "attack_uploads",
    "attackers",
    "chain",
    "client_privacy",
    "compression",
    "example_privacy",
    "fixed_noise",
    "local_privacy",
    "poison",
    "private_layers",
    "require_attackers",
    "robust",
    "select_attackers",
    "selected_training",
    "selected_transforms",
    "server_optimizer",
    "statements",
    "triggered",
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


def statements(value_of: Callable[[str], Any], federation: Federation) -> list[Statement]:
    """Returns the statements of a run about the transforms that its settings select.

    `value_of` returns the value of a setting by its name.
    """
    stated = (selectable.state(value_of, federation) for selectable in REGISTRY)
    return [statement for statement in stated if statement is not None]


def selected_training(
    value_of: Callable[[str], Any], federation: Federation, training: Training
) -> Training:
    """Returns local training as the selected transforms change it, before a method is made.

    `value_of` returns the value of a setting by its name.
    """
    for selectable in REGISTRY:
        training = selectable.train(value_of, federation, training)
    return training
