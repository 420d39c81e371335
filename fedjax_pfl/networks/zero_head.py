"""A wrapper that initialises the last layer of a network with zeros."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.core import trees
from fedjax_pfl.core.errors import require

PyTree = Any


@dataclasses.dataclass(frozen=True)
class ZeroHead:
    """The network `model` with a last layer that is initialised with zeros, else unchanged.

    Clients that differ only in the order of their labels then train identical lower layers. With a
    random head they do not.
    """

    model: Any  # the plain network

    def init(self, key: jax.Array, x: jax.Array) -> dict[str, PyTree]:
        """Returns initial variables for x [B, ...], with zeros in the head's parameters."""

        def zero_head(layer: str, leaf: jax.Array) -> jax.Array:
            return jnp.zeros_like(leaf) if layer == self.model.head else leaf

        variables = dict(self.model.init(key, x))
        return {**variables, **trees.map_layers(zero_head, {"params": variables["params"]})}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask for these before `model` is there
            raise AttributeError(name)
        return getattr(self.model, name)


def require_random_head(method: str, model: Any) -> None:
    """Raises UsageError for a head of zeros, which `method` replaces or never trains."""
    random_head = not isinstance(model, ZeroHead)
    require(random_head, f"{method} needs a random last layer; set zero_head=False")


def require_random_copies(method: str, model: Any, layers: Collection[str]) -> None:
    """Raises UsageError if copies of `layers` would be equal, as those of a head of zeros are.

    `method` trains copies with different initial values. Equal ones would stay equal.
    """
    is_equal = isinstance(model, ZeroHead) and set(layers) <= {model.head}
    require(
        not is_equal,
        f"{method} starts copies of {', '.join(layers)} with random values, and zero_head makes "
        "them equal; set zero_head=False or use more layers",
    )
