"""FedMN's router: from a client's whole training set to the gates between blocks.

A layout n_1 x ... x n_L has one gate for every pair of blocks in neighbouring layers and one from
every block of the last layer to the output: E = sum_l n_l n_{l+1} + n_L. Gates are one vector [E];
`cut` splits it into a matrix [n_{l+1}, n_l] for each layer, the last one [1, n_L].

References: Wang et al., Personalized Federated Learning via Heterogeneous Modular Networks (2022),
equations (5), (9), (10) and (13).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.core import batches, local_training
from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.core.examples import Batch, ClientData
from fedjax_pfl.networks import init

PyTree = Any
EMBEDDINGS = ("router_encoder", "router_labels")  # φx and φy
Layout = tuple[int, ...]
Pullback = Callable[[jax.Array], PyTree]  # cotangent [E] -> gradient in ψ's parameters


class Routing(NamedTuple):
    """Functions that compute the logits of a client's gates from its data and ψ, the router.

    route  (ψ, ctx) -> (ψ with statistics updated by the client, logits [E], their pullback).
    """

    init: Callable[..., PyTree]  # (key, x [B, ...], one-hot y [B, C]) -> variables ψ
    logits: Callable[[PyTree, ClientData], jax.Array]  # (ψ, one client's data) -> [E]
    route: Callable[[PyTree, ClientContext], tuple[PyTree, jax.Array, Pullback]]
    frozen: tuple[str, ...] = ()  # modules that do not learn; sent in a client's first round


class Router(nn.Module):
    """Computes h([φx(x), φy(y)]) for each example: one number per gate.

    φx is a network with `x_size` outputs, φy a linear map of the one-hot label (or of the targets
    of a regression), h a linear layer. The concatenation is normalised to length 1 for each
    example. The logits of a client are the mean over its examples.
    """

    network: Any  # φx is a copy of it
    gates: int  # number of gates E
    x_size: int = 128  # outputs of φx
    y_size: int = 64  # outputs of φy

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Maps x [B, ...] and y [B, C] to [B, E]. BatchNorm uses its running statistics."""
        image = self.network.clone(outputs=self.x_size, parent=self, name="router_encoder")(x)
        label = init.dense(y.shape[-1], self.y_size, "router_labels")(y)
        joint = jnp.concatenate([image, label], -1)
        joint /= jnp.sqrt(jnp.sum(jnp.square(joint), -1, keepdims=True) + 1e-12)
        return init.dense(self.x_size + self.y_size, self.gates, "router_gates")(joint)


def concatenated(router: Router, outputs: int, size: int) -> Routing:
    """Returns the paper's routing, Eq. (10), by a `router` of concatenated embeddings.

    The data has `outputs` classes and is read in batches of `size` examples.
    """

    def logits_of(psi: PyTree, data: ClientData) -> jax.Array:
        return logits(router, psi, data, outputs, size)

    def route(psi: PyTree, ctx: ClientContext) -> tuple[PyTree, jax.Array, Pullback]:
        def pullback(cotangent: jax.Array) -> PyTree:
            return pull(router, psi, ctx.data, outputs, size, cotangent)

        return psi, logits_of(psi, ctx.data), pullback

    return Routing(init=router.init, logits=logits_of, route=route)


def logits(
    router: Router, variables: PyTree, data: ClientData, outputs: int, size: int
) -> jax.Array:
    """Returns one client's logits of gates, [E], (9): the mean of `router` over its examples.

    Args:
      router: The router.
      variables: Its variables.
      data: Data of the client, of which training examples count.
      outputs: Number of classes.
      size: Number of examples read at a time.
    """

    def share_of(batch: Batch) -> jax.Array:
        return _share(router, variables, data, outputs, batch)

    return batches.sum_batches(share_of, data, data.train, size)


def pull(
    router: Router,
    variables: PyTree,
    data: ClientData,
    outputs: int,
    size: int,
    cotangent: jax.Array,
) -> PyTree:
    """Returns the gradient of ⟨cotangent [E], logits⟩ in the router's parameters.

    The logits, and the arguments, are those of `logits`.
    """
    params, model_state = local_training.split_variables(variables)

    def gradient(batch: Batch) -> PyTree:
        def product(params: PyTree) -> jax.Array:
            share = _share(router, {"params": params, **model_state}, data, outputs, batch)
            return jnp.sum(share * cotangent)

        return jax.grad(product)(params)

    return batches.sum_batches(gradient, data, data.train, size)


def _share(
    router: Router, variables: PyTree, data: ClientData, outputs: int, batch: Batch
) -> jax.Array:
    """Returns the sum of `router` over a batch, divided by the client's training examples, [E]."""
    values = jnp.asarray(router.apply(variables, batch.x, targets(batch, outputs)))
    total = jnp.sum(jnp.where(batch.mask[:, None], values, 0.0), 0)
    return total / jnp.maximum(data.train.size, 1).astype(jnp.float32)


def targets(batch: Batch, outputs: int) -> jax.Array:
    """Returns one-hot labels, or the targets of a regression, as floats [B, outputs]."""
    classes = jnp.issubdtype(batch.y.dtype, jnp.integer)
    return jax.nn.one_hot(batch.y, outputs) if classes else batch.y.astype(jnp.float32)


def paths(layout: Layout) -> int:
    """Returns E, the number of gates of a network with `layout` blocks in each layer."""
    return sum(a * b for a, b in zip(layout, (*layout[1:], 1), strict=True))


def cut(vector: jax.Array, layout: Layout) -> list[jax.Array]:
    """Splits one number per gate, [E], into a matrix [n_{l+1}, n_l] for every layer of n_l blocks.

    The matrix of the last layer is [1, n_L].
    """
    matrices, first = [], 0
    for before, after in zip(layout, (*layout[1:], 1), strict=True):
        matrices.append(vector[first : first + before * after].reshape(after, before))
        first += before * after
    return matrices


def schedule(
    temperatures: tuple[float, float], rounds: int, first_round: int
) -> Callable[[jax.Array], jax.Array]:
    """Returns τ as a function of the round; it falls exponentially between two temperatures.

    Args:
      temperatures: τ in the first and in the last round of the phase.
      rounds: Number of rounds of the phase.
      first_round: First round of the phase.
    """
    first, last = temperatures

    def temperature(t: jax.Array) -> jax.Array:
        progress = jnp.asarray(t - first_round, jnp.float32) / max(rounds - 1, 1)
        return first * (last / first) ** jnp.clip(progress, 0.0, 1.0)

    return temperature


def sample(logits: jax.Array, noise: jax.Array, tau: Any, layout: Layout, hard: bool) -> jax.Array:
    """Returns binary-concrete gates V, (5): σ((noise + logit π) / τ).

    A gate is open if V > ½. Soft gates are the values V, except that if no path is open the
    likeliest one is opened with V = 1. Hard gates are exactly 0 or 1. The gradient of both is that
    of σ.

    Args:
      logits: logit π, [E].
      noise: log ε − log(1 − ε) with ε uniform, [E].
      tau: Temperature τ.
      layout: Number of blocks in each layer.
      hard: Return hard gates.
    """
    scaled = (logits + noise) / tau
    soft, opened = jax.nn.sigmoid(scaled), decide(scaled, layout)
    # In this order: soft − soft is exactly 0, soft + (opened − soft) is not exactly `opened`.
    straight = opened.astype(soft.dtype) + (soft - jax.lax.stop_gradient(soft))
    return straight if hard else jnp.where(opened & (soft <= 0.5), straight, soft)


def decide(logits: jax.Array, layout: Layout) -> jax.Array:
    """Returns which gates are open, bool [E]: those with a logit above 0.

    If no path leads to the output, those of the likeliest path are open too.
    """
    above = logits > 0
    reached, _ = connected(above, layout)
    return above | (~reached[-1][0, 0] & _likeliest(jax.nn.log_sigmoid(logits), layout))


def connected(opened: jax.Array, layout: Layout) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns which blocks have an input, and which reach the output.

    Args:
      opened: Open gates, bool [E].
      layout: Number of blocks n_l in each layer.

    Returns:
      (have an input, reach the output): two lists of bool [1, n_l], one entry for each layer and
      one for the output. Encoders always have an input.
    """
    matrices = cut(opened, layout)
    fed, used = [jnp.ones((1, layout[0]), bool)], [jnp.ones((1, 1), bool)]
    for m in matrices:
        fed.append((m & fed[-1]).any(1)[None])
    for m in reversed(matrices):
        used.insert(0, (m & used[0].T).any(0)[None])
    return fed, used


def present(gates: jax.Array, layout: Layout, trimmed: bool = False) -> list[jax.Array]:
    """Returns which blocks a client holds: bool [1, n_l] for each layer.

    A gate is open above ½. As in the paper a client holds all encoders, and the blocks that have
    an input. If `trimmed`, it holds only what also reaches the output, encoders included.
    """
    fed, used = connected(gates > 0.5, layout)
    pairs = zip(fed[:-1], used[:-1], strict=True)
    return [f & u for f, u in pairs] if trimmed else fed[:-1]


def active(gates: jax.Array, layout: Layout, trimmed: bool = False) -> jax.Array:
    """Returns which blocks after the encoders a client holds, bool [blocks]: a_m of section II-E.

    If `trimmed`, the encoders come first in the result: see `present`.
    """
    layers = present(gates, layout, trimmed)
    return jnp.concatenate([layer[0] for layer in layers[0 if trimmed else 1 :]])


def _likeliest(score: jax.Array, layout: Layout) -> jax.Array:
    """Returns bool [E], True for the gates of the path with the largest sum of `score` [E]."""
    matrices, best_ahead = cut(score, layout), [jnp.zeros(1)]
    for m in reversed(matrices):
        best_ahead.insert(0, jnp.max(m + best_ahead[0][:, None], 0))
    block, path = jnp.argmax(best_ahead[0]), []
    for m, best in zip(matrices, best_ahead[1:], strict=True):
        following = jnp.argmax(m[:, block] + best)
        path.append(jnp.zeros(m.shape, bool).at[following, block].set(True).ravel())
        block = following
    return jnp.concatenate(path)
