"""FedAS: the body that comes down is aligned with the client's own; means by Fisher information.

Yang et al., FedAS: Bridging Inconsistency in Personalized Federated Learning, 2024. With z_φ(x)
what comes into the head of body φ, d numbers, and (φ_k, ω_k) the client's last model:

  P_kc = mean_{x of c} z_{φ_k}(x)
  φ ← φ − η_a ∇ Σ_c mean_{x of c in B} ‖z_φ(x) − P_kc‖²/d, from the φ that came down
  (φ_k, ω_k) ← SGD on f, both parts together, from (φ, ω_k);   F_k = Σ_B ‖∇f(φ_k, ω_k; B)‖²
  φ ← Σ_k F_k φ_k / Σ_k F_k, over those that arrived
A client is served (φ_k, ω_k), its own last model.

Deviations: F_k, the trace of the Fisher information in the paper, is as in the authors' code: of
squared gradients of batches, in order, where the trace has those of single examples. The alignment
has the batches of training (theirs: 16). Clients that are not sampled do nothing; a client that
has not trained is served the first model.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms import common
from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, Cohort, Federation, PyTree, State, Trained, Visit
from fedjax_pfl.core.errors import UsageError, at_least
from fedjax_pfl.core.examples import Batch, ClientData
from fedjax_pfl.core.task import Task
from fedjax_pfl.networks import features


class Client(NamedTuple):
    """What stays with a client."""

    own: PyTree  # the variables (φ_k, ω_k)
    momentum: PyTree


def fedas(
    model: Any,
    task: Task,
    training: local_training.Training,
    federation: Federation,
    *,
    align_rate: float = 0.01,
    align_epochs: int = 1,
) -> Algorithm:
    """Server: the body φ, which travels. Clients: `Client`. With η_a = 0 they train as FedPer's.

    Args:
      align_rate: η_a, of plain SGD.
      align_epochs: passes over a client's examples in which the body that came down is aligned.
    """
    at_least("fedas.align_rate", align_rate, 0)
    at_least("fedas.align_epochs", align_epochs, 1)
    if not task.has_classes:
        raise UsageError("fedas makes a prototype of each class; choose a dataset with classes")
    classes = federation.outputs
    features.width("fedas", model, federation)
    both = features.WithFeatures(model)
    sgd = common.trainer(model, task, training)
    by_alignment = local_training.sgd(
        learning_rate=align_rate, batch_size=training.batch_size, epochs=align_epochs
    )

    def parts(variables: PyTree) -> tuple[PyTree, PyTree]:
        """The head, and the body."""
        return trees.split(variables, {model.head})

    def aligned(body: PyTree, own: PyTree, visit: Visit) -> PyTree:
        wanted = common.features_by_class(both, own, visit.data, classes).means
        head = parts(own)[0]

        def gradient(params: PyTree, rest: PyTree, batch: Batch, key: jax.Array) -> Any:
            own_class = common.by_class(batch, classes).astype(jnp.float32)
            share = own_class @ (1 / jnp.maximum(jnp.sum(own_class, 0), 1.0))

            def loss(params: PyTree) -> Any:
                (_, z), after = both.apply(
                    trees.join({"params": params, **rest}, head),
                    batch.x,
                    train=True,
                    mask=batch.mask,
                    rngs={"dropout": key},
                    mutable=list(rest),
                )
                away = jnp.mean(jnp.square(z - wanted[batch.y]), -1)
                return jnp.sum(jnp.where(batch.mask, share * away, 0.0)), after

            return jax.value_and_grad(loss, has_aux=True)(params)

        apart = visit._replace(key=jax.random.fold_in(visit.key, 1))
        params, rest, _, _ = local_training.fit(
            by_alignment, gradient, *local_training.split_variables(body), (), apart
        )
        return {"params": params, **rest}

    def fisher(variables: PyTree, data: ClientData) -> jax.Array:
        params, rest = local_training.split_variables(variables)

        def squared(batch: Batch) -> jax.Array:
            def loss(params: PyTree) -> jax.Array:
                outputs = model.apply({"params": params, **rest}, batch.x)
                losses = jnp.where(batch.mask, task.loss(outputs, batch.y, data.classes), 0.0)
                examples = jnp.sum(batch.mask).astype(jnp.float32)
                return jnp.sum(losses) / jnp.maximum(examples, 1.0)

            return trees.squared_norm(jax.grad(loss)(params))

        return local_training.total(squared, data, data.train, training.batch_size)

    def init(key: jax.Array, start: State | None = None) -> State:
        mine = start is not None and isinstance(start.clients, Client)
        if start is not None and mine:
            head = parts(trees.row(start.clients.own, 0))[0]
            whole = State(trees.join(start.server, head), (), ())
        first = common.initial(model, federation, key, whole if mine else start)
        own = common.own_first(first, start, Client, federation)
        momentum = common.kept(training, first["params"], federation)
        return State(parts(first)[1], (), Client(own, momentum))

    def train(payload: PyTree, client: Client, visit: Visit) -> Trained:
        body = aligned(payload, client.own, visit)
        whole = trees.join(body, parts(client.own)[0])
        own, momentum, metrics = sgd(whole, client.momentum, visit)
        upload = {**parts(own)[1], "fisher": fisher(own, visit.data)}
        return Trained(upload, own, Client(own, momentum), metrics)

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        uploads = cohort.present(cohort.uploads)
        bodies = {name: tree for name, tree in uploads.items() if name != "fisher"}
        return cohort.mean(bodies, state.server, uploads["fisher"]), state.rows

    def personal(state: State, client: Client, visit: Visit) -> PyTree:
        return client.own

    average = fedavg(model, task, training, federation)
    return average._replace(init=init, train=train, receive=receive, personal=personal)
