"""Features of examples: the inputs of a network's head."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.errors import UsageError


class WithFeatures(NamedTuple):
    """A network that also returns the inputs of its head: (outputs [B, ...], features [B, d]).

    `transform` maps features [B, d] to the inputs of the head; None leaves them unchanged.
    """

    network: Any  # the plain network
    transform: Callable[[jax.Array], jax.Array] | None = None

    def apply(self, variables: Any, x: jax.Array, *, mutable: Any = False, **options: Any) -> Any:
        """Returns (outputs, features), or ((outputs, features), updated collections) if `mutable`.

        Features are as before `transform`, None if no head is called. `options` go to the network.
        """
        head = self.network.head  # may trace the network, which must not be intercepted
        inputs = []

        def record(call: Any, arguments: Any, keywords: Any, context: Any) -> Any:
            name = "/".join(context.module.path)
            if context.method_name == "__call__" and name == head:
                # Flax calls this argument `inputs` or, in some layers, `x`.
                keyword = "" if arguments else next(iter(keywords.keys() & {"inputs", "x"}), "")
                features = keywords[keyword] if keyword else arguments[0]
                inputs.append(features)
                if self.transform is not None and keyword:
                    keywords = {**keywords, keyword: self.transform(features)}
                elif self.transform is not None:
                    arguments = (self.transform(features), *arguments[1:])
            return call(*arguments, **keywords)

        with nn.intercept_methods(record):
            result = self.network.apply(variables, x, mutable=mutable, **options)
        features = inputs[-1] if inputs else None
        return (result, features) if mutable is False else ((result[0], features), result[1])


def width(method: str, network: Any, federation: Federation) -> int:
    """Returns the length d of the features [B, d]. Raises UsageError if they have another shape.

    `method` is the name of the method that reads the features.
    """
    x = federation.examples(2)

    def features() -> Any:
        variables = dict(network.init(jax.random.key(0), x))
        return WithFeatures(network).apply(variables, x)[1]

    shape = jax.eval_shape(features)
    if shape is None or shape.ndim != 2 or shape.shape[0] != x.shape[0]:
        raise UsageError(
            f"{method} compares the inputs of the head, and {network.head} of this network is not "
            "a Flax linen layer called with a vector per example; use such a layer as head"
        )
    return int(shape.shape[1])


def common_width(method: str, networks: Any, federation: Federation) -> int:
    """Returns the length d of the features of all networks. Raises UsageError if it differs.

    `networks` is a network or a tuple of them; other arguments as for `width`.
    """
    networks = networks if isinstance(networks, tuple) else (networks,)
    widths = [width(method, network, federation) for network in networks]
    if len(set(widths)) > 1:
        raise UsageError(
            f"{method} compares features of all clients, and the groups have features of lengths "
            f"{', '.join(map(str, widths))}; give their last hidden layers the same width"
        )
    return widths[0]
