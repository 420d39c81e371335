"""FedMN's routing: from a client's whole training set to the gates between blocks.

A layout n_1 x ... x n_L has a gate for every pair of blocks in neighbouring layers and one from
every block of the last layer to the output: E = Σ_l n_l n_{l+1} + n_L. Gates are one vector [E];
`cut` makes a matrix [n_{l+1}, n_l] of each layer's, the last one [1, n_L].

References: Wang et al., Personalized Federated Learning via Heterogeneous Modular Networks (2022),
equations (5), (9), (10) and (13).
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import Batch, ClientData
from fedjax_pfl.networks import init
from fedjax_pfl.networks.own import Own

PyTree = Any
SPREAD = "router_spread"
EMBEDDINGS = ("router_encoder", "router_labels")  # φx and φy
EMBEDS = ("product", "concatenated")
# Deviation over clients of a logit at first, where they differ clearly: π is then near 0 or 1.
_DECIDED = 4.0
Layout = tuple[int, ...]


def need_blocks(model: Any, federation: Federation) -> None:
    """UsageError where encoders cannot be copies of the network, or examples have no one label."""
    own = isinstance(getattr(model, "model", model), Own)  # also with a head of zeros
    if own or federation.each:
        what = f"{model.name}, a network of your own" if own else "tokens"
        raise UsageError(
            f"fedmn routes examples with one label through blocks of our networks, not {what}; use "
            "another method"
        )


class Router(nn.Module):
    """h([φx(x), φy(y)]) for each example: one number per gate; the client's logits are their mean.

    φx is a network with `x_size` outputs, φy a linear map of the one-hot label (or the targets of a
    regression); side by side they are normalised to length 1 for each example. With a `contrast`
    what tells clients apart is then multiplied by that over its spread; see `Spread`.

    With embed="product" φx(x) ⊙ φy(y) is normalised instead, whose mean says which labels go with
    which images; φx and φy do not learn, and `Signature` brings means to one scale.
    """

    network: Any
    gates: int
    x_size: int = 128
    y_size: int = 64
    contrast: float | None = None
    embed: str = "concatenated"

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """[B, ...] and [B, C] -> [B, E]. BatchNorm goes by its running statistics."""
        seen = self.network.clone(outputs=self.x_size, parent=self, name="router_encoder")(x)
        product = self.embed == "product"
        size = self.x_size if product else self.y_size
        told = init.dense(y.shape[-1], size, "router_labels")(y)
        joint = jax.lax.stop_gradient(seen * told) if product else jnp.concatenate([seen, told], -1)
        joint /= jnp.sqrt(jnp.sum(jnp.square(joint), -1, keepdims=True) + 1e-12)
        if (product or self.contrast is not None) and not self.is_initializing():
            self.sow("seen", "joint", joint)
        if product:
            start, none = nn.initializers.normal(_DECIDED), nn.initializers.zeros
            last = nn.Dense(self.gates, kernel_init=start, bias_init=none, name="router_gates")
            return last(Signature(name=SPREAD)(joint))
        if self.contrast is not None:
            joint = self.contrast * Spread(name=SPREAD)(joint)
        return init.dense(self.x_size + self.y_size, self.gates, "router_gates")(joint)


class Spread(nn.Module):
    """Subtracts the mean over clients of their mean embeddings and divides by the deviation.

    Both are running averages, which clients move towards their own, see `spread`, and the server
    then averages with the rest of the router: of means and of their squares.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, D] -> [B, D]"""
        mean = self.variable("batch_stats", "mean", jnp.zeros, x.shape[-1]).value
        square = self.variable("batch_stats", "square", jnp.ones, x.shape[-1]).value
        variance = jnp.maximum(square - jnp.square(mean), 0.0)
        return (x - mean[None]) / jnp.sqrt(variance + 1e-8)[None]


class Signature(nn.Module):
    """ρ (x − m̄) / √T: means over clients become of mean square ρ², whatever the data.

    With m_k the mean over the examples of client k: m̄ is the mean over clients, T = mean |m_k|² −
    |m̄|² their variance, S the mean over clients of what drawing n_k examples adds to it, (1 −
    |m_k|²)/(n_k − 1) for x of length 1, and ρ = max(0, 1 − S/T): clients that differ by chance
    only get 0, and are not routed apart. All three are running averages, as in `Spread`.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, D] -> [B, D]"""
        mean = self.variable("batch_stats", "mean", jnp.zeros, x.shape[-1]).value
        square = self.variable("batch_stats", "square", jnp.ones, ()).value
        noise = self.variable("batch_stats", "noise", jnp.zeros, ()).value
        total = jnp.maximum(square - jnp.sum(jnp.square(mean)), 1e-8)
        clear = jnp.maximum(1 - noise / total, 0.0)
        return clear / jnp.sqrt(total) * (x - mean[None])


def frozen(router: Router) -> tuple[str, ...]:
    """The modules of a router that do not learn, so that means can be compared over rounds."""
    return EMBEDDINGS if router.embed == "product" else ()


def logits(
    router: Router, variables: PyTree, data: ClientData, outputs: int, size: int
) -> jax.Array:
    """logit π: the mean of h over the client's training examples, (9), `size` at a time. [E]."""

    def one(batch: Batch) -> jax.Array:
        return _share(router, variables, data, outputs, batch)

    return local_training.total(one, data, data.train, size)


def spread(
    router: Router, variables: PyTree, data: ClientData, outputs: int, size: int, share: Any
) -> PyTree:
    """The variables with that share of the averages in `Spread`, or `Signature`, from here.

    A router that has neither stays as it is.
    """
    if SPREAD not in variables.get("batch_stats", {}):
        return variables

    def one(batch: Batch) -> jax.Array:
        _, seen = router.apply(variables, batch.x, _targets(batch, outputs), mutable=["seen"])
        joint = seen["seen"]["joint"][0]
        return jnp.sum(jnp.where(batch.mask[:, None], joint, 0.0), 0)

    count = jnp.maximum(data.train.size, 1).astype(jnp.float32)
    mean = local_training.total(one, data, data.train, size) / count
    own, kept = {"mean": mean, "square": jnp.square(mean)}, variables["batch_stats"]
    if router.embed == "product":
        square = jnp.sum(own["square"])
        own |= {"square": square, "noise": (1 - square) / jnp.maximum(count - 1, 1)}
    moved = jax.tree.map(lambda a, b: a + share * (b - a), kept[SPREAD], own)
    return {**variables, "batch_stats": {**kept, SPREAD: moved}}


def pull(
    router: Router,
    variables: PyTree,
    data: ClientData,
    outputs: int,
    size: int,
    cotangent: jax.Array,
) -> PyTree:
    """The gradient of ⟨cotangent, logits⟩ in the parameters, through every training example."""
    params, rest = local_training.split_variables(variables)

    def one(batch: Batch) -> PyTree:
        def along(params: PyTree) -> jax.Array:
            share = _share(router, {"params": params, **rest}, data, outputs, batch)
            return jnp.sum(share * cotangent)

        return jax.grad(along)(params)

    return local_training.total(one, data, data.train, size)


def _share(
    router: Router, variables: PyTree, data: ClientData, outputs: int, batch: Batch
) -> jax.Array:
    """What a batch adds to the mean."""
    values = jnp.asarray(router.apply(variables, batch.x, _targets(batch, outputs)))
    total = jnp.sum(jnp.where(batch.mask[:, None], values, 0.0), 0)
    return total / jnp.maximum(data.train.size, 1).astype(jnp.float32)


def _targets(batch: Batch, outputs: int) -> jax.Array:
    """[B, C]"""
    classes = jnp.issubdtype(batch.y.dtype, jnp.integer)
    return jax.nn.one_hot(batch.y, outputs) if classes else batch.y.astype(jnp.float32)


def paths(layout: Layout) -> int:
    """E, the number of gates."""
    return sum(a * b for a, b in zip(layout, (*layout[1:], 1), strict=True))


def cut(vector: jax.Array, layout: Layout) -> list[jax.Array]:
    """[E] -> a matrix [n_{l+1}, n_l] for every layer, [1, n_L] for the last."""
    matrices, first = [], 0
    for before, after in zip(layout, (*layout[1:], 1), strict=True):
        matrices.append(vector[first : first + before * after].reshape(after, before))
        first += before * after
    return matrices


def temperature(t: Any, rounds: int, first: float, last: float) -> jax.Array:
    """τ falls exponentially from `first` in round 0 to `last` in the last of `rounds`."""
    done = jnp.asarray(t, jnp.float32) / max(rounds - 1, 1)
    return first * (last / first) ** jnp.clip(done, 0.0, 1.0)


def sample(logits: jax.Array, noise: jax.Array, tau: Any, layout: Layout, hard: bool) -> jax.Array:
    """Binary-concrete gates, (5): σ((noise + logit π) / τ), noise = log ε − log(1 − ε).

    Hard gates are exactly 0 or 1, with the gradient of the soft ones.
    """
    drawn = (logits + noise) / tau
    soft = jax.nn.sigmoid(drawn)
    if not hard:
        return soft
    # In this order: soft − soft is exactly 0, soft + (hard − soft) is not exactly hard.
    return decide(drawn, layout).astype(soft.dtype) + (soft - jax.lax.stop_gradient(soft))


def decide(logits: jax.Array, layout: Layout) -> jax.Array:
    """bool [E]: the gates above one half; where they leave no path, the likeliest one besides."""
    above = logits > 0
    reached, _ = connected(above, layout)
    return above | (~reached[-1][0, 0] & _likeliest(jax.nn.log_sigmoid(logits), layout))


def connected(gates: jax.Array, layout: Layout) -> tuple[list[jax.Array], list[jax.Array]]:
    """Which blocks have input, and which have use: bool [1, n_l] for each layer, and the output's.

    Encoders always have input, and the output always has use.
    """
    matrices = [m.astype(bool) for m in cut(gates, layout)]
    fed, used = [jnp.ones((1, layout[0]), bool)], [jnp.ones((1, 1), bool)]
    for m in matrices:
        fed.append((m & fed[-1]).any(1)[None])
    for m in reversed(matrices):
        used.insert(0, (m & used[0].T).any(0)[None])
    return fed, used


def active(gates: jax.Array, layout: Layout) -> jax.Array:
    """bool [n_2 + ... + n_L]: the blocks that lie on a path from an encoder to the output."""
    fed, used = connected(gates, layout)
    return jnp.concatenate([(f & u)[0] for f, u in zip(fed[1:-1], used[1:-1], strict=True)])


def _likeliest(score: jax.Array, layout: Layout) -> jax.Array:
    """bool [E]: the path from an encoder to the output with the largest sum of scores."""
    matrices, to_go = cut(score, layout), [jnp.zeros(1)]
    for m in reversed(matrices):
        to_go.insert(0, jnp.max(m + to_go[0][:, None], 0))
    block, chosen = jnp.argmax(to_go[0]), []
    for m, ahead in zip(matrices, to_go[1:], strict=True):
        following = jnp.argmax(m[:, block] + ahead)
        chosen.append(jnp.zeros(m.shape, bool).at[following, block].set(True).ravel())
        block = following
    return jnp.concatenate(chosen)
