"""Features of an example: the input of a network's head."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax

from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.errors import UsageError


class WithFeatures(NamedTuple):
    """Network that returns (outputs [B, ...], z [B, d]), where z is the input of its head."""

    network: Any

    def apply(self, variables: Any, x: jax.Array, *, mutable: Any = False, **options: Any) -> Any:
        """Calls the network's own `apply` and returns z next to its outputs."""
        head = self.network.head  # some networks find it by tracing, which must not be intercepted
        inputs = []

        def record(call: Any, arguments: Any, keywords: Any, context: Any) -> Any:
            name = "/".join(context.module.path)
            if context.method_name == "__call__" and name == head:
                inputs.append(arguments[0])
            return call(*arguments, **keywords)

        with nn.intercept_methods(record):
            result = self.network.apply(variables, x, mutable=mutable, **options)
        z = inputs[-1] if inputs else None
        return (result, z) if mutable is False else ((result[0], z), result[1])


def width(method: str, network: Any, federation: Federation) -> int:
    """Returns d. Raises UsageError if the head is not called with one vector per example."""
    x = federation.examples(2)

    def features() -> Any:
        variables = dict(network.init(jax.random.key(0), x))
        return WithFeatures(network).apply(variables, x)[1]

    z = jax.eval_shape(features)
    if z is None or z.ndim != 2 or z.shape[0] != x.shape[0]:
        raise UsageError(
            f"{method} compares the inputs of the head, and {network.head} of this network is not "
            "a Flax linen layer that is called with a vector for each example"
        )
    return int(z.shape[1])
