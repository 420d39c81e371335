"""Local training of a model's variables, of all its layers or of some."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax

from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import ClientContext, PyTree
from fedjax_pfl.core.examples import Batch
from fedjax_pfl.core.local_training import Gradient, Training, split_variables
from fedjax_pfl.core.task import Task

# (variables, optimiser state, ctx, frozen={}) -> (variables, optimiser state, metrics)
Trainer = Callable[..., tuple[PyTree, PyTree, dict[str, jax.Array]]]
_NO_LAYERS: PyTree = MappingProxyType({})


def proximal(gradient: Gradient, anchor: PyTree, penalty: Any) -> Gradient:
    """Returns a gradient function for f + penalty/2 ‖params − anchor‖², with f that of `gradient`.

    Both are (params, model state, batch, key) -> ((loss, new model state), gradient). The loss is
    that of f alone. `anchor` are parameters.
    """

    def penalised(params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> Any:
        aux, grads = gradient(params, model_state, batch, key)
        return aux, jax.tree.map(lambda g, p, a: g + penalty * (p - a), grads, params, anchor)

    return penalised


def fit_variables(
    training: Training,
    gradient: Gradient,
    variables: PyTree,
    optimizer_state: PyTree,
    ctx: ClientContext,
) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
    """Trains all variables of a model on a client's examples.

    Args:
      training: Optimiser, learning rate and number of steps.
      gradient: (params, model state, batch, key) -> ((loss, new model state), gradient).
      variables: Flax variables with the collection `params`.
      optimizer_state: The client's optimiser state, or () if it does not keep it.
      ctx: The client, with its examples and random key.

    Returns:
      Variables, optimiser state (() if the client does not keep it) and metrics.
    """
    params, model_state, optimizer_state, metrics = local_training.fit(
        training, gradient, *split_variables(variables), optimizer_state, ctx
    )
    return {"params": params, **model_state}, optimizer_state, metrics


def model_trainer(model: Any, task: Task, training: Training) -> Trainer:
    """Returns a function that trains some or all layers of a model.

    It is (variables, optimizer_state, ctx, frozen={}) -> (variables, optimizer_state, metrics), as
    for `fit_variables`. `variables` belong to the layers that train, `frozen` to all other
    layers. Frozen layers have no gradient, decay or momentum. Their BatchNorm statistics do not
    change, although they normalise by the batch.
    """

    def train(
        variables: PyTree, optimizer_state: PyTree, ctx: ClientContext, frozen: PyTree = _NO_LAYERS
    ) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
        model_gradient = local_training.gradient(model, task, ctx.data)
        layers = trees.layers(variables)

        def gradient(params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> Any:
            joined = trees.join({"params": params, **model_state}, frozen)
            (loss, model_state), grads = model_gradient(*split_variables(joined), batch, key)
            trained, _ = trees.split({"params": grads, **model_state}, layers)
            grads, model_state = split_variables(trained)
            return (loss, model_state), grads

        return fit_variables(training, gradient, variables, optimizer_state, ctx)

    return train
