"""What several algorithms share: a first model, local training of all or part of it."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.core import batches, local_training, trees
from fedjax_pfl.core.algorithm import ClientContext, Federation, PyTree, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import Batch, ClientData
from fedjax_pfl.core.local_training import Gradient, Training, split_variables
from fedjax_pfl.core.task import Task

Trainer = Callable[..., tuple[PyTree, PyTree, dict[str, jax.Array]]]
_NOTHING: PyTree = MappingProxyType({})


def shapes(model: Any, federation: Federation) -> PyTree:
    """Shapes and dtypes of a model's variables."""
    return jax.eval_shape(lambda: _draw(model, federation, jax.random.key(0)))


def _draw(model: Any, federation: Federation, key: jax.Array) -> PyTree:
    return dict(model.init(key, federation.examples()))


def initial(model: Any, federation: Federation, key: jax.Array, start: State | None) -> PyTree:
    """A new model's variables, or the global model that an earlier phase ended with."""
    if start is None:
        return _draw(model, federation, key)
    wanted = shapes(model, federation)
    there = start.server if isinstance(start.server, dict) else {}
    found = {name: there.get(name) for name in wanted}
    if not trees.same_shapes(wanted, found):
        raise UsageError(
            "a phase can only start from one that ends with a global model of the same network; "
            "give the phases the same model, and put a method such as fedavg first"
        )
    return found


def kept(training: Training, params: PyTree, federation: Federation) -> PyTree:
    """Every client's first optimiser state, stacked, where clients keep it; else empty."""
    if not training.keep_optimizer:
        return ()
    return trees.repeat(training.optimizer.init(params), federation.clients)


def own_first(first: PyTree, start: State | None, kind: type, federation: Federation) -> PyTree:
    """Every client's `own`, stacked: as the method's earlier phase left it, or `first` for all.

    Args:
      kind: of the method's `State.clients`.
    """
    stacked = trees.repeat(first, federation.clients)
    if start is None or not isinstance(start.clients, kind):
        return stacked
    there = start.clients.own  # type: ignore[attr-defined]
    return there if trees.same_shapes(stacked, there) else stacked


def held(gradient: Gradient, anchor: PyTree, penalty: Any) -> Gradient:
    """The gradient of f + penalty/2 ‖params − anchor‖²."""

    def near(params: PyTree, rest: PyTree, batch: Batch, key: jax.Array) -> Any:
        loss_rest, grads = gradient(params, rest, batch, key)
        return loss_rest, jax.tree.map(lambda g, p, a: g + penalty * (p - a), grads, params, anchor)

    return near


def by_class(batch: Batch, classes: int) -> jax.Array:
    """bool [B, classes]: which class each example has; none where there is no example."""
    return (batch.y[:, None] == jnp.arange(classes)[None]) & batch.mask[:, None]


def class_counts(data: ClientData, classes: int) -> jax.Array:
    """float32 [classes]: a client's training examples of each class, as it labels them."""

    def one(batch: Batch) -> jax.Array:
        return jnp.sum(by_class(batch, classes), 0).astype(jnp.float32)

    return batches.sum_batches(one, data, data.train)


class ByClass(NamedTuple):
    """What a client's training examples are before the head, class by class."""

    counts: jax.Array  # [C]
    means: jax.Array  # [C, d], 0 where there is no example
    square: jax.Array  # mean of ‖z‖² over all of them


def features_by_class(network: Any, variables: PyTree, data: ClientData, classes: int) -> ByClass:
    """Of a model as it is evaluated; its network is one with features (`networks.features`)."""

    def sums(batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        z = network.apply(variables, batch.x)[1]
        own_class = by_class(batch, classes).astype(z.dtype)
        totals = jnp.einsum("bc,bd->cd", own_class, z, precision="highest")
        squares = jnp.sum(jnp.where(batch.mask, jnp.sum(jnp.square(z), -1), 0.0))
        return jnp.sum(own_class, 0), totals, squares

    counts, totals, squares = batches.sum_batches(sums, data, data.train)
    means = totals / jnp.maximum(counts, 1.0)[:, None]
    return ByClass(counts, means, squares / jnp.maximum(jnp.sum(counts), 1.0))


def no_prototypes(classes: int, d: int) -> PyTree:
    """A server's prototypes before there are any."""
    return {"prototypes": jnp.zeros((classes, d)), "seen": jnp.zeros(classes, bool)}


def new_prototypes(old: PyTree, uploads: PyTree) -> PyTree:
    """Of each class the mean over those that have it, by their examples; else what it was.

    Args:
      old: as of `no_prototypes`. uploads: with `prototypes` [K, C, d] and `counts` [K, C], 0 where
        a client did not arrive.
    """
    counts = jnp.sum(uploads["counts"], 0)
    sums = jnp.sum(uploads["counts"][..., None] * uploads["prototypes"], 0)
    mean = sums / jnp.maximum(counts, 1.0)[:, None]
    new = jnp.where(counts[:, None] > 0, mean, old["prototypes"])
    return {"prototypes": new, "seen": old["seen"] | (counts > 0)}


def near_prototypes(task: Task, payload: PyTree, penalty: Any) -> Task:
    """The task of a network with features, with λ ‖z(x) − C_y‖²/d added where there is C_y."""

    def pulled(outputs: Any, y: jax.Array, open_classes: Any) -> jax.Array:
        logits, z = outputs
        away = jnp.mean(jnp.square(z - payload["prototypes"][y]), -1)
        away = jnp.where(payload["seen"][y], away, 0.0)
        return task.loss(logits, y, open_classes) + penalty * away

    return task._replace(loss=pulled)


def trainer(model: Any, task: Task, training: Training) -> Trainer:
    """Local training of all or of some layers of a model.

    What it returns takes (variables, optimiser's state, visit, frozen={}) and gives the variables,
    the optimiser's state and metrics. What is `frozen` is only read: no gradient, decay or
    momentum, and its BatchNorm statistics stay, although it normalises by the batch, as it does
    when it trains.
    """

    def train(
        variables: PyTree, optimizer_state: PyTree, ctx: ClientContext, frozen: PyTree = _NOTHING
    ) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
        whole = local_training.gradient(model, task, ctx.data)
        layers = trees.layers(variables)

        def gradient(params: PyTree, rest: PyTree, batch: Batch, key: jax.Array) -> Any:
            joined = trees.join({"params": params, **rest}, frozen)
            (loss, rest), grads = whole(*split_variables(joined), batch, key)
            own, _ = trees.split({"params": grads, **rest}, layers)
            grads, rest = split_variables(own)
            return (loss, rest), grads

        params, rest, optimizer_state, metrics = local_training.fit(
            training, gradient, *split_variables(variables), optimizer_state, ctx
        )
        return {"params": params, **rest}, optimizer_state, metrics

    return train
