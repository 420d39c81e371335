"""Mixing by similarity, without a hypernetwork: the toy example of pFedLA's Figure 1."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.pfedla.layer_mixing import LayerRows, layer_rows, mix
from fedjax_pfl.algorithms.shared.initial_state import (
    initial_momentum,
    initial_variables,
    model_shapes,
)
from fedjax_pfl.algorithms.shared.model_training import model_trainer
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
)


def layer_cosines(theta: PyTree, i: Any, layers: LayerRows) -> jax.Array:
    """Computes the cosine [L, N] between each layer of client `i` and that layer of every client.

    Leaves of `theta` are [N, ...]; all leaves of a row in `layers` are compared as one vector.
    """
    products = [jnp.zeros(())] * layers.number
    squares = [jnp.zeros(())] * layers.number
    leaves = zip(*map(jax.tree.leaves, (theta, layers.of_leaf)), strict=True)
    for leaf, row in leaves:
        flat = leaf.reshape(leaf.shape[0], -1)
        products[row] = products[row] + jnp.matmul(flat, flat[i], precision="highest")
        squares[row] = squares[row] + jnp.sum(flat**2, 1)
    lengths = jnp.sqrt(jnp.stack(squares))
    return jnp.stack(products) / jnp.maximum(lengths * lengths[:, i, None], 1e-12)


def similarity(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    granularity: str = "layer",
    sharpness: float = 10.0,
) -> Algorithm:
    """Mixes models by the similarity of their layers, or of the whole models ("model").

    The softmax is of `sharpness` times the cosines. The paper names no measure.
    """
    n = federation.clients
    shapes = model_shapes(model, federation)["params"]
    layers = layer_rows(shapes, (), granularity == "model")
    local_sgd = model_trainer(model, federation.task, training)

    def alpha(theta: PyTree, i: Any) -> jax.Array:
        return jax.nn.softmax(sharpness * layer_cosines(theta, i, layers), axis=-1)

    def init(key: jax.Array, start: State | None = None) -> State:
        params, statistics = local_training.split_variables(
            initial_variables(model, federation, key, start)
        )
        momentum = initial_momentum(training, params, federation)
        clients = {"statistics": trees.repeat(statistics, n), "momentum": momentum}
        return State((), trees.repeat(params, n), clients)

    def send(state: State, ctx: ClientContext) -> PyTree:
        return mix(state.rows, alpha(state.rows, ctx.i), layers)

    def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
        variables = {"params": payload, **client["statistics"]}
        trained, momentum, metrics = local_sgd(variables, client["momentum"], ctx)
        params, statistics = local_training.split_variables(trained)
        return ClientResult(
            params, trained, {"statistics": statistics, "momentum": momentum}, metrics
        )

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        return state.server, cohort.put(state.rows, cohort.uploads)

    def personalize(state: State, client: PyTree, ctx: ClientContext) -> PyTree:
        return {"params": send(state, ctx), **client["statistics"]}

    def observe(state: State) -> dict[str, jax.Array]:
        return {"alpha": jax.vmap(alpha, (None, 0))(state.rows, jnp.arange(n))}

    return Algorithm(
        init=init,
        send=send,
        train=train,
        receive=receive,
        personalize=personalize,
        predict=model.apply,
        observe=observe,
    )
