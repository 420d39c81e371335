"""A wrapper that initialises a network with given variables."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.core import trees
from fedjax_pfl.core.errors import UsageError

PyTree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Pretrained:
    """The network `model` with initial variables `variables`, else unchanged.

    Every method that starts from a network's initial variables starts from these.
    """

    model: Any
    variables: PyTree

    def init(self, key: jax.Array, x: jax.Array) -> dict[str, PyTree]:
        """Returns the given variables; UsageError if they do not fit the network and x [B, ...]."""
        variables = jax.tree.map(jnp.asarray, dict(self.variables))
        if not trees.same_shapes(dict(jax.eval_shape(self.model.init, key, x)), variables):
            raise UsageError(
                "the variables of Pretrained do not have the names, shapes and dtypes of the "
                "network's own"
            )
        return variables

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask for these before `model` is there
            raise AttributeError(name)
        return getattr(self.model, name)


def require_random_start(method: str, model: Any) -> None:
    """Raises UsageError if a network has given initial variables, which `method` cannot use."""
    if isinstance(model, Pretrained) or isinstance(getattr(model, "model", None), Pretrained):
        raise UsageError(
            f"{method} needs random initial parameters and cannot start from given weights; leave "
            "initial_weights out"
        )
