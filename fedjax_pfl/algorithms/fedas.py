"""FedAS: clients align the downloaded body with their own; the server averages by Fisher weights.

Yang et al., FedAS: Bridging Inconsistency in Personalized Federated Learning, 2024. z_φ(x) are the
d features that body φ computes for the head, and (φ_k, ω_k) is the client's last model:

  P_kc = mean_{x of c} z_{φ_k}(x)
  φ ← φ − η_a ∇ Σ_c mean_{x of c in B} ‖z_φ(x) − P_kc‖²/d, from the downloaded φ
  (φ_k, ω_k) ← SGD on f, both parts together, from (φ, ω_k);   F_k = Σ_B ‖∇f(φ_k, ω_k; B)‖²
  φ ← Σ_k F_k φ_k / Σ_k F_k, over the clients that returned an update
The client's model is (φ_k, ω_k), its own last one.

Deviations: F_k, the trace of the Fisher information in the paper, sums squared gradients of
batches, as in the authors' code; the trace sums those of single examples. Here every client aligns
its own copy of φ; the authors' code aligns one model in place, client after client. The alignment
uses the batch size of training (theirs: 16). Clients that are not sampled do nothing; a client
that never trained has the initial model.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared import common
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.core import batches, local_training, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import UsageError, require_at_least
from fedjax_pfl.core.examples import Batch, ClientData
from fedjax_pfl.networks import features


class Client(NamedTuple):
    """State kept on the client between rounds."""

    own: PyTree  # the variables (φ_k, ω_k)
    momentum: PyTree


def fedas(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    align_rate: float = 0.01,
    align_epochs: int = 1,
) -> Algorithm:
    """Creates FedAS. With η_a = 0 clients train as in FedPer.

    The server stores the body φ, which clients download; clients store `Client`.

    Args:
      align_rate: η_a, the learning rate of the alignment, which is plain SGD.
      align_epochs: Passes over a client's examples to align the downloaded body.
    """
    task = federation.task
    require_at_least("fedas.align_rate", align_rate, 0)
    require_at_least("fedas.align_epochs", align_epochs, 1)
    if not task.has_classes:
        raise UsageError("fedas makes a prototype of each class; choose a dataset with classes")
    classes = federation.outputs
    features.width("fedas", model, federation)
    with_features = features.WithFeatures(model)
    fit = common.trainer(model, task, training)
    alignment = local_training.sgd(
        learning_rate=align_rate, batch_size=training.batch_size, epochs=align_epochs
    )

    def parts(variables: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the head and the body."""
        return trees.split(variables, {model.head})

    def aligned(body: PyTree, own: PyTree, ctx: ClientContext) -> PyTree:
        prototypes = common.features_by_class(with_features, own, ctx.data, classes).means
        head = parts(own)[0]

        def gradient(params: PyTree, rest: PyTree, batch: Batch, key: jax.Array) -> Any:
            one_hot = common.by_class(batch, classes).astype(jnp.float32)
            share = one_hot @ (1 / jnp.maximum(jnp.sum(one_hot, 0), 1.0))

            def loss(params: PyTree) -> Any:
                (_, z), new_rest = with_features.apply(
                    trees.join({"params": params, **rest}, head),
                    batch.x,
                    train=True,
                    mask=batch.mask,
                    rngs={"dropout": key},
                    mutable=list(rest),
                )
                distances = jnp.mean(jnp.square(z - prototypes[batch.y]), -1)
                return jnp.sum(jnp.where(batch.mask, share * distances, 0.0)), new_rest

            return jax.value_and_grad(loss, has_aux=True)(params)

        reseeded = ctx._replace(key=jax.random.fold_in(ctx.key, 1))
        params, rest, _, _ = local_training.fit(
            alignment, gradient, *local_training.split_variables(body), (), reseeded
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

        return batches.sum_batches(squared, data, data.train, training.batch_size)

    def init(key: jax.Array, start: State | None = None) -> State:
        if start is not None and isinstance(start.clients, Client):
            head = parts(trees.row(start.clients.own, 0))[0]
            start = start._replace(server=trees.join(start.server, head))
        first = common.initial(model, federation, key, start)
        own = common.own_first(first, start, Client, federation)
        momentum = common.kept(training, first["params"], federation)
        return State(parts(first)[1], (), Client(own, momentum))

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        body = aligned(payload, client.own, ctx)
        whole_model = trees.join(body, parts(client.own)[0])
        own, momentum, metrics = fit(whole_model, client.momentum, ctx)
        upload = {**parts(own)[1], "fisher": fisher(own, ctx.data)}
        return ClientResult(upload, own, Client(own, momentum), metrics)

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        uploads = cohort.present(cohort.uploads)
        bodies = {name: tree for name, tree in uploads.items() if name != "fisher"}
        return cohort.mean(bodies, state.server, uploads["fisher"]), state.rows

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        return client.own

    average = fedavg(model, training, federation)
    return average._replace(init=init, train=train, receive=receive, personalize=personalize)


FEDAS = Method(fedas, title="FedAS", paper="Yang et al. 2024")
