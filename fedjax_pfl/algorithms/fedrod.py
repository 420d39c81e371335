"""FedRoD: a head for all that learns balanced classes, and beside it one for a client's own.

Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification,
2022. With z = φ(x), and n_ic of client i's training examples of class c:

  (φ, ω) ← (φ, ω) − η ∇ f(ω z + log n_i; B)       the balanced softmax; averaged as in FedAvg
  ω_i ← ω_i − η ∇_{ω_i} f((ω + ω_i) z; B)         which moves neither φ nor ω; stays
Both from the values before the step. A client is served (ω + ω_i) z, and ω_i begins as ω does.

Deviations: ω_i is the paper's linear head, not the one that a hypernetwork makes of the client's
classes. Classes that a client has no example of take no part in its balanced loss (log 0). The sum
of two heads is made of their parameters, so the head must be a layer such as Dense, in which they
are linear. Clipping measures (φ, ω) and ω_i apart.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared import common
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.core import local_training, optimizers, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import Batch


class Client(NamedTuple):
    """What stays with a client."""

    own: PyTree  # the parameters of ω_i
    momentum: PyTree  # of both parts


def fedrod(model: Any, training: local_training.Training, federation: Federation) -> Algorithm:
    """Server: φ and ω, which travel. Clients: `Client`. Classes only."""
    task = federation.task
    if not task.has_classes:
        raise UsageError("fedrod balances classes; choose a dataset with classes")
    average = fedavg(model, training, federation)
    apart = training._replace(optimizer=optimizers.per_entry(training.optimizer))

    def parts(params: PyTree) -> tuple[PyTree, PyTree]:
        """The head's parameters, and the others."""
        head, body = trees.split({"params": params}, {model.head})
        return head["params"], body.get("params", {})

    def added(params: PyTree, own: PyTree) -> PyTree:
        head, body = parts(params)
        return trees.join(body, jax.tree.map(jnp.add, head, own))

    def init(key: jax.Array, start: State | None = None) -> State:
        state = average.init(key, start)
        params = state.server["params"]
        head = parts(params)[0]
        own = common.own_first(head, start, Client, federation)
        momentum = common.kept(apart, {"shared": params, "own": head}, federation)
        return state._replace(clients=Client(own, momentum))

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        counts = common.class_counts(ctx.data, federation.outputs)

        def balanced(outputs: jax.Array, y: jax.Array, classes: Any) -> jax.Array:
            return task.loss(outputs + jnp.log(jnp.maximum(counts, 1.0))[None], y, counts > 0)

        generic = local_training.gradient(model, task._replace(loss=balanced), ctx.data)
        plain = local_training.gradient(model, task, ctx.data)

        def both(params: PyTree, rest: PyTree, batch: Batch, key: jax.Array) -> Any:
            (_, after), grads = generic(params["shared"], rest, batch, key)
            summed = added(params["shared"], params["own"])
            (loss, _), of_sum = plain(summed, rest, batch, key)
            return (loss, after), {"shared": grads, "own": parts(of_sum)[0]}

        shared, rest = local_training.split_variables(payload)
        new, rest, momentum, metrics = local_training.fit(
            apart, both, {"shared": shared, "own": client.own}, rest, client.momentum, ctx
        )
        upload = {"params": new["shared"], **rest}
        served = {**upload, "params": added(new["shared"], new["own"])}
        return ClientResult(upload, served, Client(new["own"], momentum), metrics)

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        return {**state.server, "params": added(state.server["params"], client.own)}

    return average._replace(init=init, train=train, personalize=personalize)


FEDROD = Method(fedrod, title="FedRoD", paper="Chen and Chao 2022")
