"""FedMN's modular network: layers of independent blocks, connected by gates.

References: Wang et al., Personalized Federated Learning via Heterogeneous Modular Networks (2022),
section II-A and equation (13).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.core import trees
from fedjax_pfl.networks import init, router


class Modular(nn.Module):
    """Encoders in the first layer, Linear + ReLU + dropout between, Linear in the last.

    Each block has its own parameters: encoder1, ..., then block2_1, block2_2, ... in layer 2. An
    encoder is `network` with `width` outputs, and ReLU. A block's input is the mean of what its
    open gates bring, 0 where none is open; so is the network's output over the last layer. A block
    without input gives no output, or its bias would count. A block whose output is not used gives
    its gates no gradient, because a client does not fetch it. Nor do encoders without use, where
    `fetched`.
    """

    network: Any
    outputs: int = 10
    layout: tuple[int, ...] = (2, 2, 2)
    width: int = 512
    hidden: int = 256
    dropout: float = 0.5
    fetched: bool = False  # encoders are fetched where they are used, as blocks are

    @property
    def first(self) -> int:
        """The first layer whose blocks are fetched where they are used."""
        return 0 if self.fetched else 1

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        gates: jax.Array | None = None,
        train: bool = False,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """[B, ...], gates [E] in 0..1 (None: all open) and a mask bool [B] -> [B, outputs]."""
        gates = jnp.ones(router.paths(self.layout)) if gates is None else gates
        encoders = [
            self.network.clone(outputs=self.width, parent=self, name=f"encoder{j}")
            for j in range(1, self.layout[0] + 1)
        ]
        values = [nn.relu(encoder(x, train=train, mask=mask)) for encoder in encoders]
        layers = self._on_paths(gates)
        for number, layer in enumerate(layers[:-1], 2):
            last = number == len(self.layout)
            values = [
                self._block(mean(row, values), f"block{number}_{j}", train, last)
                for j, row in enumerate(layer, 1)
            ]
        return mean(layers[-1][0], values)

    def _on_paths(self, gates: jax.Array) -> list[jax.Array]:
        """The gates' matrices, closed where a block on one side is not on a path (nor fetched).

        A gate between two blocks that are on paths keeps its gradient, closed or open.
        """
        fed, used = router.connected(gates, self.layout)
        here = [f & u for f, u in zip(fed[:-1], used[:-1], strict=True)] + [used[-1]]
        here[0] = here[0] if self.fetched else fed[0]
        matrices = router.cut(gates, self.layout)
        sides = zip(matrices, here[:-1], here[1:], strict=True)
        return [jnp.where(before & after.T, m, 0.0) for m, before, after in sides]

    def _block(self, x: jax.Array, name: str, train: bool, last: bool) -> jax.Array:
        if last:
            return init.dense(x.shape[-1], self.outputs, name)(x)
        x = nn.relu(init.dense(x.shape[-1], self.hidden, name)(x))
        return nn.Dropout(self.dropout, deterministic=not train, name=f"dropout_{name}")(x)


class WithLogits(NamedTuple):
    """The network as one with its gates' logits among the parameters."""

    network: Modular
    sample: Callable[[jax.Array], jax.Array]  # gates from logits

    def apply(self, variables: Any, x: jax.Array, **how: Any) -> Any:
        """As a module's own."""
        params = dict(variables["params"])
        gates = self.sample(params.pop("logits"))
        return self.network.apply({**variables, "params": params}, x, gates, **how)


@dataclasses.dataclass(frozen=True)
class Routed:
    """The network as one with its gates among the variables."""

    network: Modular

    def apply(self, variables: Any, x: jax.Array) -> jax.Array:
        """In evaluation mode."""
        own = {name: tree for name, tree in variables.items() if name != "gates"}
        return jnp.asarray(self.network.apply(own, x, variables["gates"].astype(jnp.float32)))


def mean(gates: jax.Array, values: list[jax.Array]) -> jax.Array:
    """(13): Σ_k c_k u_k / Σ_k c_k, and 0 where all gates are closed.

    Where they are, the gradient in a gate is what opening it alone would bring.
    """
    total = jnp.sum(gates)
    # No product of matrices: its precision may be low, and one open gate must change no bit.
    brought = sum(gate * value for gate, value in zip(gates, values, strict=True))
    return jnp.asarray(brought) / jnp.where(total > 0, total, 1.0)


def blocks(layout: tuple[int, ...], first: int = 1) -> list[str]:
    """Names in the order of `router.active`: blocks, and before them encoders, where first = 0."""
    encoders = [] if first else [f"encoder{j}" for j in range(1, layout[0] + 1)]
    return encoders + [
        f"block{i}_{j}" for i, n in enumerate(layout[1:], 2) for j in range(1, n + 1)
    ]


def block_of(layer: str, names: list[str]) -> str | None:
    """Which of the blocks a layer, named by its path, is in."""
    return next((word for word in layer.split("/") if word in names), None)


def pretrained(variables: Any, body: Any, encoders: int) -> Any:
    """The variables with the layers of `body` in every encoder, and in the router's."""
    slots = [*(f"encoder{j}" for j in range(1, encoders + 1)), "router_encoder"]
    return {
        name: {
            **tree,
            **{slot: {**tree[slot], **body.get(name, {})} for slot in slots if slot in tree},
        }
        for name, tree in variables.items()
    }


def keep_inactive(active: jax.Array, names: list[str], new: Any, old: Any) -> Any:
    """The new tree, but the old leaves in blocks that are not active; of momentum, too."""

    def choose(layer: str, new: jax.Array, old: jax.Array) -> jax.Array:
        block = block_of(layer, names)
        return new if block is None else jnp.where(active[names.index(block)], new, old)

    return trees.map_layers(choose, new, old)
