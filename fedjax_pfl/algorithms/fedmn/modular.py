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

from fedjax_pfl.algorithms.fedmn import router
from fedjax_pfl.core import trees
from fedjax_pfl.networks import init


class Modular(nn.Module):
    """Encoders in the first layer, Linear + ReLU + dropout between, Linear in the last.

    Each block has its own parameters: encoder1, ..., then block2_1, block2_2, ... in layer 2. An
    encoder is `network` with `width` outputs, and ReLU. A block's input is the mean of its active
    predecessors, weighted by their gates; so is the network's output over the last layer. Blocks
    that the client does not hold (`router.present`) count nowhere and give their gates no gradient.
    """

    network: Any  # encoders are copies of it
    outputs: int = 10  # number of classes or targets
    layout: tuple[int, ...] = (2, 2, 2)  # number of blocks in each layer
    width: int = 512  # outputs of an encoder
    hidden: int = 256  # outputs of a block between the first and the last layer
    dropout: float = 0.5  # rate, on the outputs of those blocks
    trimmed: bool = False  # clients hold no block, or encoder, without a way to the output

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        gates: jax.Array | None = None,
        train: bool = False,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Maps x [B, ...] and gates [E] in 0..1 (None: all open) to [B, outputs].

        `mask` is bool [B], False for padding.
        """
        gates = jnp.ones(router.paths(self.layout)) if gates is None else gates
        encoders = [
            self.network.clone(outputs=self.width, parent=self, name=f"encoder{j}")
            for j in range(1, self.layout[0] + 1)
        ]
        values = [nn.relu(encoder(x, train=train, mask=mask)) for encoder in encoders]
        layers = self._between_held(gates)
        for number, layer in enumerate(layers[:-1], 2):
            last = number == len(self.layout)
            values = [
                self._block(mean(row, values), f"block{number}_{j}", train, last)
                for j, row in enumerate(layer, 1)
            ]
        return mean(layers[-1][0], values)

    def _between_held(self, gates: jax.Array) -> list[jax.Array]:
        """Returns the gates [E] as a matrix [n_{l+1}, n_l] for each layer of n_l blocks.

        A gate is 0 unless the client holds both of its blocks. Other gates keep their values and
        gradients, whether open or closed. The last matrix, to the output, is [1, n_L].
        """
        present = [*router.present(gates, self.layout, self.trimmed), jnp.ones((1, 1), bool)]
        sides = zip(router.cut(gates, self.layout), present[:-1], present[1:], strict=True)
        return [jnp.where(before & after.T, m, 0.0) for m, before, after in sides]

    def _block(self, x: jax.Array, name: str, train: bool, last: bool) -> jax.Array:
        """Applies Linear to x [B, inputs], and ReLU and dropout if the layer is not the last."""
        if last:
            return init.dense(x.shape[-1], self.outputs, name)(x)
        x = nn.relu(init.dense(x.shape[-1], self.hidden, name)(x))
        return nn.Dropout(self.dropout, deterministic=not train, name=f"dropout_{name}")(x)


class WithLogits(NamedTuple):
    """The network for training, with the logits of its gates, [E], as the parameter `logits`.

    A gate weights the connection between two blocks, from 0 (closed) to 1 (open).
    """

    network: Modular
    sample: Callable[[jax.Array], jax.Array]  # logits [E] -> gates [E]; its noise is fixed

    def apply(self, variables: Any, x: jax.Array, **options: Any) -> Any:
        """Applies the network with gates sampled from the logits, and passes on `options`.

        Returns the outputs, and also the updated collections if `mutable` is among the options.
        """
        params = dict(variables["params"])
        gates = self.sample(params.pop("logits"))
        return self.network.apply({**variables, "params": params}, x, gates, **options)


@dataclasses.dataclass(frozen=True)
class Routed:
    """The network for evaluation, with its gates, [E], in the variables under `gates`."""

    network: Modular

    def apply(self, variables: Any, x: jax.Array) -> jax.Array:
        """Maps x [B, ...] to outputs [B, outputs], in evaluation mode."""
        theta = {name: tree for name, tree in variables.items() if name != "gates"}
        return jnp.asarray(self.network.apply(theta, x, variables["gates"].astype(jnp.float32)))


def mean(gates: jax.Array, values: list[jax.Array]) -> jax.Array:
    """Returns the mean of `values`, [B, D] each, weighted by gates [K]; 0 if all gates are 0.

    This is (13). If all are 0, the gradient in a gate is that of sum_k gates[k] values[k].
    """
    total = jnp.sum(gates)
    # No product of matrices: its precision may be low, and one open gate must change no bit.
    weighted = sum(gate * value for gate, value in zip(gates, values, strict=True))
    return jnp.asarray(weighted) / jnp.where(total > 0, total, 1.0)


def blocks(layout: tuple[int, ...], trimmed: bool = False) -> list[str]:
    """Returns the names of the blocks of a network, in the order of `router.active`.

    `layout` has the number of blocks of each layer. With `trimmed`, encoders come first; else they
    are left out.
    """
    encoders = [f"encoder{j}" for j in range(1, layout[0] + 1)] if trimmed else []
    return encoders + [
        f"block{i}_{j}" for i, n in enumerate(layout[1:], 2) for j in range(1, n + 1)
    ]


def block_of(layer: str, names: list[str]) -> str | None:
    """Returns which of `names` a layer, such as "encoder1/conv1", belongs to; None if to none."""
    return next((word for word in layer.split("/") if word in names), None)


def pretrained(variables: Any, body: Any, encoders: int) -> Any:
    """Returns the variables with the layers of `body` in every encoder, and in the router's φx.

    `body` are variables of a global model without its head; `encoders` is their number.
    """
    slots = [*(f"encoder{j}" for j in range(1, encoders + 1)), "router_encoder"]
    return {
        name: {
            **tree,
            **{slot: {**tree[slot], **body.get(name, {})} for slot in slots if slot in tree},
        }
        for name, tree in variables.items()
    }


def keep_inactive(active: jax.Array, names: list[str], new: Any, old: Any) -> Any:
    """Returns the tree `new` with the leaves of `old` in the blocks that are not active.

    `active` is bool [blocks], in the order of `names`. Leaves outside these blocks are new.
    """

    def choose(layer: str, new: jax.Array, old: jax.Array) -> jax.Array:
        block = block_of(layer, names)
        return new if block is None else jnp.where(active[names.index(block)], new, old)

    return trees.map_layers(choose, new, old)
