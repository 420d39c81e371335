"""Any network with a last layer that starts at zero."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.core import trees

PyTree = Any


@dataclasses.dataclass(frozen=True)
class ZeroHead:
    """`model`, of which `init` gives a last layer of zeros; else it is the network itself.

    From there clients that differ in the order of their labels alone train the same layers below,
    as with a head that is drawn they do not: permuting its rows and the labels changes nothing.
    """

    model: Any

    def init(self, key: jax.Array, x: jax.Array) -> dict[str, PyTree]:
        """As the network's own, but for the head."""

        def start(layer: str, leaf: jax.Array) -> jax.Array:
            return jnp.zeros_like(leaf) if layer == self.model.head else leaf

        variables = dict(self.model.init(key, x))
        return {**variables, **trees.map_layers(start, {"params": variables["params"]})}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)
