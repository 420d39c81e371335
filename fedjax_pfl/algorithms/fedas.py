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
uses the batch size of training and the network's training mode, theirs batches of 16 and, after the
first round, evaluation mode. Clients that are not sampled do nothing; a client that never trained
has the initial model.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.class_features import class_features, class_mask
from fedjax_pfl.algorithms.shared.initial_state import (
    initial_client_rows,
    initial_momentum,
    initial_variables,
)
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import fit_variables, model_trainer
from fedjax_pfl.algorithms.shared.split_model import require_body
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
    """State that one client keeps between rounds. `State.clients` stacks it over clients."""

    variables: PyTree  # the client's last model, body and head
    momentum: PyTree  # optimiser state, or () if clients do not keep it


def fedas(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    align_rate: float = 0.01,
    align_epochs: int = 1,
) -> Algorithm:
    """Creates FedAS: clients align the downloaded body with their own model before training.

    The server averages bodies weighted by Fisher information. It stores the body φ, which clients
    download; clients store `Client`. With η_a = 0 clients train as in FedPer, apart from
    BatchNorm statistics.

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
    require_body("fedas", model, federation)
    with_features = features.WithFeatures(model)
    train_model = model_trainer(model, task, training)
    alignment = local_training.sgd(
        learning_rate=align_rate, batch_size=training.batch_size, epochs=align_epochs
    )

    def parts(variables: PyTree) -> tuple[PyTree, PyTree]:
        """Returns (head, body)."""
        return trees.split(variables, {model.head})

    def aligned(body: PyTree, variables: PyTree, ctx: ClientContext) -> PyTree:
        """Returns the downloaded body after its alignment with the client's last model.

        `variables` are that model, whose mean features of each class are the target.
        """
        prototypes = class_features(with_features, variables, ctx.data, classes).means
        head = parts(variables)[0]

        def gradient(params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> Any:
            """Returns ((alignment loss, new model state), gradient) for the body's `params`."""
            one_hot = class_mask(batch, classes).astype(jnp.float32)
            share = one_hot @ (1 / jnp.maximum(jnp.sum(one_hot, 0), 1.0))

            def loss(params: PyTree) -> Any:
                (_, z), new_state = with_features.apply(
                    trees.join({"params": params, **model_state}, head),
                    batch.x,
                    train=True,
                    mask=batch.mask,
                    rngs={"dropout": key},
                    mutable=list(model_state),
                )
                distances = jnp.mean(jnp.square(z - prototypes[batch.y]), -1)
                return jnp.sum(jnp.where(batch.mask, share * distances, 0.0)), new_state

            return jax.value_and_grad(loss, has_aux=True)(params)

        reseeded = ctx._replace(key=jax.random.fold_in(ctx.key, 1))
        return fit_variables(alignment, gradient, body, (), reseeded)[0]

    def fisher(variables: PyTree, data: ClientData) -> jax.Array:
        """Returns the sum over training batches of the squared norm of the gradient, []."""
        params, model_state = local_training.split_variables(variables)

        def squared_gradient(batch: Batch) -> jax.Array:
            """Returns the squared norm of the gradient of a batch's mean loss, []."""

            def loss(params: PyTree) -> jax.Array:
                outputs = model.apply({"params": params, **model_state}, batch.x)
                losses = jnp.where(batch.mask, task.loss(outputs, batch.y, data.classes), 0.0)
                examples = jnp.sum(batch.mask).astype(jnp.float32)
                return jnp.sum(losses) / jnp.maximum(examples, 1.0)

            return trees.squared_norm(jax.grad(loss)(params))

        return batches.sum_batches(squared_gradient, data, data.train, training.batch_size)

    def init(key: jax.Array, start: State | None = None) -> State:
        if start is not None and isinstance(start.clients, Client):
            head = parts(trees.row(start.clients.variables, 0))[0]
            start = start._replace(server=trees.join(start.server, head))
        variables = initial_variables(model, federation, key, start)
        rows = initial_client_rows(variables, start, Client, "variables", federation)
        momentum = initial_momentum(training, variables["params"], federation)
        return State(parts(variables)[1], (), Client(rows, momentum))

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        body = aligned(payload, client.variables, ctx)
        joined = trees.join(body, parts(client.variables)[0])
        variables, momentum, metrics = train_model(joined, client.momentum, ctx)
        return ClientResult(
            upload={**parts(variables)[1], "fisher": fisher(variables, ctx.data)},
            variables=variables,
            client=Client(variables, momentum),
            metrics=metrics,
        )

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        uploads = cohort.present(cohort.uploads)
        bodies = {name: tree for name, tree in uploads.items() if name != "fisher"}
        # Noise or an attacker can make a weight negative.
        weights = jnp.maximum(uploads["fisher"], 0.0)
        return cohort.mean(bodies, state.server, weights), state.rows

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        return client.variables

    base = fedavg(model, training, federation)
    return base._replace(init=init, train=train, receive=receive, personalize=personalize)


FEDAS = Method(fedas, title="FedAS", paper="Yang et al. 2024")
