"""Per-FedAvg: a global model from which one gradient step leads to a good model for each client.

Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach, 2020.

With w' = w − α∇f(w; B1) and g = ∇f(w'; B2), on independent batches, the direction is
  FO:  g
  HF:  g − α [∇f(w + δg; B3) − ∇f(w − δg; B3)] / 2δ
and HF is (I − α∇²f(w)) g where f is a quadratic.

Deviations: the server's mean is weighted by examples, the paper's is plain. B2 runs through the
epochs as in every method here; B1 and B3 are drawn afresh. Clipping, decay and momentum, where they
are set, act on the step along that direction. BatchNorm statistics come from the passes at w'.
"""

from typing import Any

import jax
import optax

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.core import batches, local_training
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import require_above, require_at_least, require_one_of
from fedjax_pfl.core.examples import Batch, ClientData

VARIANTS = ("fo", "hf")


def meta_gradient(
    gradient: local_training.Gradient,
    data: ClientData,
    size: int,
    *,
    variant: str,
    alpha: float,
    delta: float,
) -> local_training.Gradient:
    """The direction above, for a given batch B2; `size` examples each make B1 and B3."""

    def direction(
        params: PyTree, rest: PyTree, batch: Batch, key: jax.Array
    ) -> tuple[tuple[jax.Array, PyTree], PyTree]:
        first, second, third, key1, key3 = jax.random.split(key, 5)
        _, inner = gradient(params, rest, batches.sample_batch(data, data.train, size, key1), first)
        there = optax.tree.add_scale(params, -alpha, inner)
        aux, outer = gradient(there, rest, batch, second)
        if variant == "fo":
            return aux, outer
        another = batches.sample_batch(data, data.train, size, key3)
        # One key for both sides: the difference of two dropout masks is no derivative.
        _, above = gradient(optax.tree.add_scale(params, delta, outer), rest, another, third)
        _, below = gradient(optax.tree.add_scale(params, -delta, outer), rest, another, third)
        curvature = optax.tree.sub(above, below)
        return aux, optax.tree.add_scale(outer, -alpha / (2 * delta), curvature)

    return direction


def per_fedavg(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    variant: str = "fo",
    alpha: float = 0.01,
    delta: float = 1e-2,
) -> Algorithm:
    """w ← w − β · direction at every client, then FedAvg; a client is served w − α∇f(w; B).

    Args:
      variant: fo leaves the curvature out, hf estimates it from a difference of gradients.
      alpha: α, rate of the step from the global model to a client's; `learning_rate` is β.
      delta: δ, half the width of hf's difference, in lengths of g; much smaller ones show float32's
        rounding.
    """
    task = federation.task
    require_one_of("per_fedavg.variant", variant, VARIANTS)
    require_at_least("per_fedavg.alpha", alpha, 0)
    require_above("per_fedavg.delta", delta, 0)

    def adapted(variables: PyTree, data: ClientData, key: jax.Array) -> PyTree:
        params, rest = local_training.split_variables(variables)
        draw_key, noise_key = jax.random.split(key)
        batch = batches.sample_batch(data, data.train, training.batch_size, draw_key)
        _, grads = local_training.gradient(model, task, data)(params, rest, batch, noise_key)
        return {"params": optax.tree.add_scale(params, -alpha, grads), **rest}

    def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
        data = ctx.data
        params, rest = local_training.split_variables(payload)
        gradient = local_training.gradient(model, task, data)
        direction = meta_gradient(
            gradient, data, training.batch_size, variant=variant, alpha=alpha, delta=delta
        )
        fit_key, adapt_key = jax.random.split(ctx.key)
        params, rest, client, metrics = local_training.fit(
            training, direction, params, rest, client, ctx._replace(key=fit_key)
        )
        upload = {"params": params, **rest}
        return ClientResult(upload, adapted(upload, data, adapt_key), client, metrics)

    def personalize(state: State, client: PyTree, ctx: ClientContext) -> PyTree:
        return adapted(state.server, ctx.data, ctx.key)

    return fedavg(model, training, federation)._replace(train=train, personalize=personalize)


PER_FEDAVG = Method(per_fedavg, title="Per-FedAvg", paper="Fallah et al. 2020")
