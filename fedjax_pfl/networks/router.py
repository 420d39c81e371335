"""FedMN's routing: from a client's whole training set to the gates between blocks.

A layout n_1 x ... x n_L has a gate for every pair of blocks in neighbouring layers and one from
every block of the last layer to the output: E = Σ_l n_l n_{l+1} + n_L. Gates are one vector [E];
`cut` makes a matrix [n_{l+1}, n_l] of each layer's, the last one [1, n_L].

References: Wang et al., Personalized Federated Learning via Heterogeneous Modular Networks (2022),
equations (5), (9), (10) and (13).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

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
EMBEDDINGS = ("router_encoder", "router_labels")  # φx and φy
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


class Routes(NamedTuple):
    """How a client comes to its gates; ψ are the variables of a router."""

    init: Callable[..., PyTree]  # (key, x [B, ...], y [B, C]) -> ψ
    look: Callable[[PyTree, ClientData], Any]  # what of its examples all logits of a visit take
    averaged: Callable[[PyTree, Any, Any], PyTree]  # (ψ, seen, share): with that share from here
    logits: Callable[[PyTree, ClientData, Any], jax.Array]  # (ψ, data, seen) -> [E]
    pull: Callable[..., PyTree]  # (ψ, data, seen, cotangent [E]) -> the gradient in ψ's parameters
    frozen: tuple[str, ...] = ()  # modules that do not learn


class Router(nn.Module):
    """h([φx(x), φy(y)]) for each example: one number per gate; the client's logits are their mean.

    φx is a network with `x_size` outputs, φy a linear map of the one-hot label (or the targets of a
    regression); side by side they are normalised to length 1 for each example.
    """

    network: Any
    gates: int
    x_size: int = 128
    y_size: int = 64

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """[B, ...] and [B, C] -> [B, E]. BatchNorm goes by its running statistics."""
        seen = self.network.clone(outputs=self.x_size, parent=self, name="router_encoder")(x)
        told = init.dense(y.shape[-1], self.y_size, "router_labels")(y)
        joint = jnp.concatenate([seen, told], -1)
        joint /= jnp.sqrt(jnp.sum(jnp.square(joint), -1, keepdims=True) + 1e-12)
        return init.dense(self.x_size + self.y_size, self.gates, "router_gates")(joint)


def published(router: Router, outputs: int, size: int) -> Routes:
    """The paper's: examples are read for every epoch, `size` at a time, since φx and φy learn."""

    def averaged(psi: PyTree, seen: Any, share: Any) -> PyTree:
        return psi

    def look(psi: PyTree, data: ClientData) -> None:
        return None

    def of_client(psi: PyTree, data: ClientData, seen: Any) -> jax.Array:
        return logits(router, psi, data, outputs, size)

    def pulled(psi: PyTree, data: ClientData, seen: Any, cotangent: jax.Array) -> PyTree:
        return pull(router, psi, data, outputs, size, cotangent)

    return Routes(router.init, look, averaged, of_client, pulled)


def logits(
    router: Router, variables: PyTree, data: ClientData, outputs: int, size: int
) -> jax.Array:
    """logit π: the mean of h over the client's training examples, (9), `size` at a time. [E]."""

    def one(batch: Batch) -> jax.Array:
        return _share(router, variables, data, outputs, batch)

    return local_training.total(one, data, data.train, size)


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
    values = jnp.asarray(router.apply(variables, batch.x, targets(batch, outputs)))
    total = jnp.sum(jnp.where(batch.mask[:, None], values, 0.0), 0)
    return total / jnp.maximum(data.train.size, 1).astype(jnp.float32)


def targets(batch: Batch, outputs: int) -> jax.Array:
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


def active(gates: jax.Array, layout: Layout, first: int = 1) -> jax.Array:
    """Bool: the blocks on a path from an encoder to the output; encoders, too, where first = 0."""
    fed, used = connected(gates, layout)
    here = zip(fed[first:-1], used[first:-1], strict=True)
    return jnp.concatenate([(f & u)[0] for f, u in here])


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
