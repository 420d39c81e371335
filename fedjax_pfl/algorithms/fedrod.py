"""FedRoD: a shared head for balanced classes plus a personal head for the client's classes.

Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification,
2022. With z = φ(x), and n_ic of client i's training examples of class c:

  (φ, ω) ← (φ, ω) − η ∇ f(ω z + log n_i; B)       the balanced softmax; averaged as in FedAvg
  ω_i ← ω_i − η ∇_{ω_i} f((ω + ω_i) z; B)         φ and ω are constants; ω_i stays on the client

Both steps use the values before the step. A client is served (ω + ω_i) z. ω_i starts equal to ω.

Deviations: ω_i is the paper's linear head, not the head that a hypernetwork generates from the
client's classes. Classes without examples on a client are not part of its balanced loss (log 0).
The two heads are added as parameters, so the head must be linear in them, such as Dense. (φ, ω)
and ω_i are clipped separately.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.class_features import class_counts
from fedjax_pfl.algorithms.shared.initial_state import initial_client_rows, initial_momentum
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
    """State that one client keeps between rounds. `State.clients` stacks it over clients."""

    head: PyTree  # parameters of the personal head ω_i
    momentum: PyTree  # optimiser state of the shared model and personal head, or () if not kept


def fedrod(model: Any, training: local_training.Training, federation: Federation) -> Algorithm:
    """Creates FedRoD, for classification: a shared head for balanced classes, and a personal one.

    Each client adds the personal head to the shared one; it trains with the plain loss. The server
    stores the body φ and the shared head ω, clients store `Client`.
    """
    task = federation.task
    if not task.has_classes:
        raise UsageError("fedrod balances classes; choose a dataset with classes")
    base = fedavg(model, training, federation)
    separate = training.with_optimizer(optimizers.per_entry(training.optimizer))

    def parts(params: PyTree) -> tuple[PyTree, PyTree]:
        """Returns (parameters of the head, parameters of the body)."""
        head, body = trees.split({"params": params}, {model.head})
        return head["params"], body.get("params", {})

    def with_personal(params: PyTree, personal_head: PyTree) -> PyTree:
        """Returns the shared model's parameters with the personal head added to its head."""
        head, body = parts(params)
        return trees.join(body, jax.tree.map(jnp.add, head, personal_head))

    def init(key: jax.Array, start: State | None = None) -> State:
        state = base.init(key, start)
        params = state.server["params"]
        head = parts(params)[0]
        rows = initial_client_rows(head, start, Client, "head", federation)
        momentum = initial_momentum(separate, {"shared": params, "personal": head}, federation)
        return state._replace(clients=Client(rows, momentum))

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        counts = class_counts(ctx.data, federation.outputs)

        def balanced_loss(outputs: jax.Array, y: jax.Array, classes: Any) -> jax.Array:
            return task.loss(outputs + jnp.log(jnp.maximum(counts, 1.0))[None], y, counts > 0)

        balanced_task = task._replace(loss=balanced_loss)
        shared_gradient = local_training.gradient(model, balanced_task, ctx.data)
        personal_gradient = local_training.gradient(model, task, ctx.data)

        def gradients(params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> Any:
            """Returns ((personal loss, new state), gradients of `shared` and `personal`)."""
            (_, new_state), grads = shared_gradient(params["shared"], model_state, batch, key)
            summed = with_personal(params["shared"], params["personal"])
            (loss, _), summed_grads = personal_gradient(summed, model_state, batch, key)
            return (loss, new_state), {"shared": grads, "personal": parts(summed_grads)[0]}

        shared, model_state = local_training.split_variables(payload)
        params = {"shared": shared, "personal": client.head}
        new, model_state, momentum, metrics = local_training.fit(
            separate, gradients, params, model_state, client.momentum, ctx
        )
        upload = {"params": new["shared"], **model_state}
        return ClientResult(
            upload=upload,
            variables={**upload, "params": with_personal(new["shared"], new["personal"])},
            client=Client(new["personal"], momentum),
            metrics=metrics,
        )

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        return {**state.server, "params": with_personal(state.server["params"], client.head)}

    return base._replace(init=init, train=train, personalize=personalize)


FEDROD = Method(fedrod, title="FedRoD", paper="Chen and Chao 2022")
