"""What several algorithms share: a first model, local training of all of it, kept momentum."""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from fedjax_pfl import local, trees
from fedjax_pfl.algorithm import Federation, PyTree, State
from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.errors import UsageError
from fedjax_pfl.task import Task


def initial(model: Any, federation: Federation, key: jax.Array, start: State | None) -> PyTree:
    """A new model's variables, or the global model that an earlier phase ended with."""
    example = jnp.zeros((1, *federation.input_shape), jnp.float32)
    if start is None:
        return dict(model.init(key, example))
    wanted = jax.eval_shape(lambda: dict(model.init(key, example)))
    there = start.server if isinstance(start.server, dict) else {}
    found = {name: there.get(name) for name in wanted}
    try:
        chex.assert_trees_all_equal_shapes_and_dtypes(wanted, found)
    except (AssertionError, ValueError):
        raise UsageError(
            "a phase can only start from one that ends with a global model of the same network; "
            "give the phases the same model, and put a method such as fedavg first"
        ) from None
    return found


def kept(training: local.Training, params: PyTree, federation: Federation) -> PyTree:
    """Every client's first optimiser state, stacked, where clients keep it; else empty."""
    if not training.keep:
        return ()
    return trees.repeat(training.optimizer.init(params), federation.clients)


def train_all(
    model: Any,
    task: Task,
    training: local.Training,
    variables: PyTree,
    optimizer_state: PyTree,
    data: ClientData,
    t: Any,
    key: jax.Array,
) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
    """Train every variable of a model on the task: (variables, optimiser's state, metrics)."""
    params, rest = local.split_variables(variables)
    gradient = local.gradient(model, task, data)
    params, rest, optimizer_state, metrics = local.fit(
        training, gradient, params, rest, optimizer_state, data, t, key
    )
    return {"params": params, **rest}, optimizer_state, metrics
