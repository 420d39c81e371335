"""What comes into a network's head, beside what comes out of it."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax

from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.errors import UsageError


class WithFeatures(NamedTuple):
    """A network whose outputs are (outputs [B, ...], z [B, d]), z what its head is called with."""

    network: Any

    def apply(self, variables: Any, x: jax.Array, *, mutable: Any = False, **how: Any) -> Any:
        """As the network's own, with z beside its outputs."""
        seen = []

        def watch(call: Any, arguments: Any, more: Any, context: Any) -> Any:
            name = "/".join(context.module.path)
            if context.method_name == "__call__" and name == self.network.head:
                seen.append(arguments[0])
            return call(*arguments, **more)

        with nn.intercept_methods(watch):
            made = self.network.apply(variables, x, mutable=mutable, **how)
        z = seen[-1] if seen else None
        return (made, z) if mutable is False else ((made[0], z), made[1])


def width(method: str, network: Any, federation: Federation) -> int:
    """d, or UsageError where the network's head is not called with one vector for an example."""
    x = federation.examples(2)

    def features() -> Any:
        variables = dict(network.init(jax.random.key(0), x))
        return WithFeatures(network).apply(variables, x)[1]

    z = jax.eval_shape(features)
    if z is None or z.ndim != 2 or z.shape[0] != x.shape[0]:
        raise UsageError(
            f"{method} compares what comes into the head, and {network.head} of this network is no "
            "Flax linen layer that is called with a vector for each example"
        )
    return int(z.shape[1])
