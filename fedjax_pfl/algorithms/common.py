"""What several algorithms share: a first model, local training of all or part of it, weights."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Federation, PyTree, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import Batch, ClientData
from fedjax_pfl.core.task import Task


def shapes(model: Any, federation: Federation) -> PyTree:
    """Shapes and dtypes of a model's variables."""
    return jax.eval_shape(lambda: _draw(model, federation, jax.random.key(0)))


def _draw(model: Any, federation: Federation, key: jax.Array) -> PyTree:
    return dict(model.init(key, jnp.zeros((1, *federation.input_shape), jnp.float32)))


def initial(model: Any, federation: Federation, key: jax.Array, start: State | None) -> PyTree:
    """A new model's variables, or the global model that an earlier phase ended with."""
    if start is None:
        return _draw(model, federation, key)
    wanted = shapes(model, federation)
    there = start.server if isinstance(start.server, dict) else {}
    found = {name: there.get(name) for name in wanted}
    if not trees.alike(wanted, found):
        raise UsageError(
            "a phase can only start from one that ends with a global model of the same network; "
            "give the phases the same model, and put a method such as fedavg first"
        )
    return found


def examples(federation: Federation, ids: jax.Array) -> jax.Array:
    """|D_i| of each client of a cohort, float32 [K]; zero in an empty slot."""
    counts = jnp.asarray(federation.counts, jnp.float32)
    return counts.at[ids].get(mode="fill", fill_value=0.0)


def kept(training: local_training.Training, params: PyTree, federation: Federation) -> PyTree:
    """Every client's first optimiser state, stacked, where clients keep it; else empty."""
    if not training.keep:
        return ()
    return trees.repeat(training.optimizer.init(params), federation.clients)


def train_all(
    model: Any,
    task: Task,
    training: local_training.Training,
    variables: PyTree,
    optimizer_state: PyTree,
    data: ClientData,
    t: Any,
    key: jax.Array,
) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
    """Train every variable of a model on the task: (variables, optimiser's state, metrics)."""
    return train_part(model, task, training, variables, {}, optimizer_state, data, t, key)


def train_part(
    model: Any,
    task: Task,
    training: local_training.Training,
    part: PyTree,
    frozen: PyTree,
    optimizer_state: PyTree,
    data: ClientData,
    t: Any,
    key: jax.Array,
) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
    """Train some layers of a model: (their variables, optimiser's state, metrics).

    What is frozen is only read: no gradient, decay or momentum, and its BatchNorm statistics stay,
    although it normalises by the batch, as it does when it trains.
    """
    whole, layers = local_training.gradient(model, task, data), trees.layers(part)

    def gradient(params: PyTree, rest: PyTree, batch: Batch, key: jax.Array) -> Any:
        variables = trees.join({"params": params, **rest}, frozen)
        (loss, rest), grads = whole(*local_training.split_variables(variables), batch, key)
        grads, rest = local_training.split_variables(
            trees.split({"params": grads, **rest}, layers)[0]
        )
        return (loss, rest), grads

    params, rest = local_training.split_variables(part)
    params, rest, optimizer_state, metrics = local_training.fit(
        training, gradient, params, rest, optimizer_state, data, t, key
    )
    return {"params": params, **rest}, optimizer_state, metrics
