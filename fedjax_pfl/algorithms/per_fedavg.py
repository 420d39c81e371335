"""Per-FedAvg: a global model from which one gradient step leads to a good model for each client.

Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach, 2020.

With w' = w − α∇f(w; B1) and g = ∇f(w'; B2), on independent batches, the direction is
  FO:  g
  HF:  g − α [∇f(w + δg; B3) − ∇f(w − δg; B3)] / 2δ
and HF equals (I − α∇²f(w)) g if f is quadratic.

Deviations: the server's mean is weighted by examples, in the paper it is unweighted. B2 are the
batches of the epochs, as in all methods here; B1 and B3 are sampled independently. Clipping, decay
and momentum, if set, act on the step along the direction. BatchNorm statistics are those of the
passes at w'.
"""

from typing import Any

import jax
import optax

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import fit_variables
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
    """Returns a function that computes the meta-gradient instead of the gradient of a batch.

    It has the signature of `gradient`. It takes one step with rate α on a sampled batch and returns
    loss, model state and gradient of the given batch after that step.

    Args:
      gradient: (params, model state, batch, key) -> ((loss, new model state), gradient).
      data: The client's examples.
      size: Number of examples in each sampled batch.
      variant: "fo" ignores the curvature; "hf" estimates it on one more sampled batch.
      alpha: α, the learning rate of the step.
      delta: δ, half the width of the difference of gradients, for "hf".
    """

    def direction(
        params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array
    ) -> tuple[tuple[jax.Array, PyTree], PyTree]:
        first, second, third, key1, key3 = jax.random.split(key, 5)
        batch1 = batches.sample_batch(data, data.train, size, key1)
        _, inner = gradient(params, model_state, batch1, first)
        adapted = optax.tree.add_scale(params, -alpha, inner)
        aux, outer = gradient(adapted, model_state, batch, second)
        if variant == "fo":
            return aux, outer
        batch3 = batches.sample_batch(data, data.train, size, key3)
        # One key for both sides: the difference of two dropout masks is no derivative.
        forward = optax.tree.add_scale(params, delta, outer)
        backward = optax.tree.add_scale(params, -delta, outer)
        _, grads_forward = gradient(forward, model_state, batch3, third)
        _, grads_backward = gradient(backward, model_state, batch3, third)
        curvature = optax.tree.sub(grads_forward, grads_backward)
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
    """Creates Per-FedAvg: clients step along the meta-gradient; the server averages the models.

    The personalised model is the global model w after one gradient step on a batch of the client.

    Args:
      variant: fo ignores the curvature, hf estimates it from a difference of gradients.
      alpha: α, the learning rate of the step from the global to a client's model. `learning_rate`
        is β.
      delta: δ, half the width of the difference of hf, relative to the gradient. With much smaller
        values float32 rounding dominates.
    """
    task = federation.task
    require_one_of("per_fedavg.variant", variant, VARIANTS)
    require_at_least("per_fedavg.alpha", alpha, 0)
    require_above("per_fedavg.delta", delta, 0)

    def adapted(variables: PyTree, data: ClientData, key: jax.Array) -> PyTree:
        """Returns the variables after one step with rate α on a batch sampled from `data`."""
        params, model_state = local_training.split_variables(variables)
        draw_key, noise_key = jax.random.split(key)
        batch = batches.sample_batch(data, data.train, training.batch_size, draw_key)
        _, grads = local_training.gradient(model, task, data)(params, model_state, batch, noise_key)
        return {"params": optax.tree.add_scale(params, -alpha, grads), **model_state}

    def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
        gradient = local_training.gradient(model, task, ctx.data)
        direction = meta_gradient(
            gradient, ctx.data, training.batch_size, variant=variant, alpha=alpha, delta=delta
        )
        fit_key, adapt_key = jax.random.split(ctx.key)
        upload, momentum, metrics = fit_variables(
            training, direction, payload, client, ctx._replace(key=fit_key)
        )
        return ClientResult(
            upload=upload,
            variables=adapted(upload, ctx.data, adapt_key),
            client=momentum,
            metrics=metrics,
        )

    def personalize(state: State, client: PyTree, ctx: ClientContext) -> PyTree:
        return adapted(state.server, ctx.data, ctx.key)

    return fedavg(model, training, federation)._replace(train=train, personalize=personalize)


PER_FEDAVG = Method(per_fedavg, title="Per-FedAvg", paper="Fallah et al. 2020")
