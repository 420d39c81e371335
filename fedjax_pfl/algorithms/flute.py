"""FLUTE: a shared body and personal heads, which clients and server pull towards equal angles.

Liu et al., Federated Representation Learning in the Under-Parameterized Regime, 2024; the form for
classification. Client i's head has the matrix W_i [C, d] and maybe a bias; u_i [C] is 1 for the
classes of its training examples, else 0. z(x) are the d features, ⊙ is element-wise, and

  R(W, u) = ‖W Wᵀ/‖W Wᵀ‖ − (I − 11ᵀ/C) ⊙ u uᵀ/√(C − 1)‖
  F_i = f + λ₁ R(W_i, u_i) + λ₂ ‖W_i‖² + λ₃ mean_x ‖z(x)‖²      f: the loss of a batch

with Frobenius norms. For a client with all classes, R is 0 if the rows of W have equal lengths and
the largest possible equal angles. Each round:

  ω_i ← ω_i − η ∇_ω F_i, `head_epochs` epochs;   then (φ_i, ω_i) ← (φ_i, ω_i) − η ∇F_i
  φ ← Σ_k n_k φ_k / Σ_k n_k;   W_k ← W_k − η_s ∇_{W_k} (1/K) Σ_j R(W_j, u_j)

over the K clients that returned an update. The server keeps the heads ω_i and sends each client its
own. Without head epochs and with all of λ and η_s 0 it is FedPer.

Deviations: the authors' code adds the squared features of a batch of 10 with the weight 0.0005,
which is 0.005 for the mean here, and tests clients before the server's step on their heads. The two
parts of local training have separate optimiser states. While the head trains, the body's BatchNorm
statistics are frozen, as in FedRep. All heads start equal, as in the authors' code; the paper's
theory starts linear heads at random.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.shared.class_features import class_counts
from fedjax_pfl.algorithms.shared.initial_state import (
    initial_momentum,
    initial_variables,
)
from fedjax_pfl.algorithms.shared.linear_head import head_layer, linear_head_width
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import model_trainer
from fedjax_pfl.core import local_training, optimizers, trees
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
from fedjax_pfl.networks import features


class Momentum(NamedTuple):
    """Optimiser states that one client keeps; () each if not kept."""

    head: PyTree  # of the epochs that train the head alone
    model: PyTree  # of the epochs that train head and body


def _norm(x: jax.Array) -> jax.Array:
    """Returns the Frobenius norm of x, at least 1e-12, with the gradient 0 at x = 0."""
    return jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(x)), 1e-24))


def collapse_gap(kernel: jax.Array, has_class: jax.Array) -> jax.Array:
    """Returns R, [], the distance of a head from equal lengths and angles of its classes.

    Args:
      kernel: Kernel [d, C] of the head, Wᵀ.
      has_class: Bool [C], True for the classes u of the client.
    """
    products = jnp.matmul(kernel.T, kernel, precision="highest")
    c = kernel.shape[1]
    u = has_class.astype(kernel.dtype)
    simplex_products = (jnp.eye(c) - 1 / c) * u[:, None] * u[None] / jnp.sqrt(c - 1.0)
    return _norm(products / _norm(products) - simplex_products)


class Penalised(NamedTuple):
    """The network for training. It returns (outputs, penalty of each example [B])."""

    network: Any  # the plain network
    has_class: jax.Array  # bool [C], the client's classes
    collapse: Any  # λ₁, weight of `collapse_gap` of the head
    head_decay: Any  # λ₂, weight of the squared norm of the head's kernel
    feature_decay: Any  # λ₃, weight of the squared norm of an example's features

    def apply(self, variables: PyTree, x: jax.Array, **options: Any) -> Any:
        """Returns ((outputs [B, C], penalties [B]), collections that training updates)."""
        (outputs, z), updated = features.WithFeatures(self.network).apply(variables, x, **options)
        kernel = head_layer(self.network, variables)["kernel"]
        penalty = self.collapse * collapse_gap(kernel, self.has_class)
        penalty += self.head_decay * jnp.sum(jnp.square(kernel))
        return (outputs, penalty + self.feature_decay * jnp.sum(jnp.square(z), -1)), updated


def flute(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    collapse: float = 0.25,
    head_decay: float = 0.0025,
    feature_decay: float = 0.005,
    server_rate: float = 0.5,
    head_epochs: int = 9,
) -> Algorithm:
    """Creates FLUTE, for classification: a shared body, and heads that the server also updates.

    The head of the network must be a Dense layer. The server stores the body, BatchNorm included.
    The rows are the heads of the clients, which store `Momentum`.

    Args:
      collapse: λ₁, the weight of the distance of a client's head from equal lengths and angles of
        its classes.
      head_decay: λ₂, the weight of the squared kernel of the head.
      feature_decay: λ₃, the weight of the squared features.
      server_rate: η_s, the learning rate of the server's step on the heads.
      head_epochs: Passes over a client's examples to train its head alone, before `local_epochs`
        of head and body.
    """
    weights = {"collapse": collapse, "head_decay": head_decay, "feature_decay": feature_decay}
    for name, value in {**weights, "server_rate": server_rate, "head_epochs": head_epochs}.items():
        require_at_least(f"flute.{name}", value, 0)
    if not federation.task.has_classes or federation.outputs < 2:
        raise UsageError("flute compares classes; choose a dataset with classes, at least 2")
    linear_head_width("flute", model, federation)

    def loss(outputs: Any, y: jax.Array, classes: Any) -> jax.Array:
        logits, penalties = outputs
        return federation.task.loss(logits, y, classes) + penalties

    task = federation.task._replace(loss=loss)
    head_training = training._replace(epochs=head_epochs, steps=None)

    def init(key: jax.Array, start: State | None = None) -> State:
        if start is not None and isinstance(start.clients, Momentum):
            start = State(trees.join(start.server, trees.row(start.rows, 0)), start.rows, ())
            rows: PyTree | None = start.rows
        else:
            rows = None
        variables = initial_variables(model, federation, key, start)
        head, body = trees.split(variables, {model.head})
        momentum = Momentum(
            head=initial_momentum(head_training, head["params"], federation) if head_epochs else (),
            model=initial_momentum(training, variables["params"], federation),
        )
        rows = trees.repeat(head, federation.clients) if rows is None else rows
        return State(server=body, rows=rows, clients=momentum)

    def send(state: State, ctx: ClientContext) -> PyTree:
        return trees.join(state.server, trees.row(state.rows, ctx.i))

    def train(payload: PyTree, client: Momentum, ctx: ClientContext) -> ClientResult:
        has_class = class_counts(ctx.data, federation.outputs) > 0
        network = Penalised(model, has_class, **weights)
        variables, head_momentum, head_metrics = payload, client.head, {}
        if head_epochs:
            head, body = trees.split(payload, {model.head})
            head_ctx = ctx._replace(key=jax.random.fold_in(ctx.key, 2))
            train_head = model_trainer(network, task, head_training)
            head, head_momentum, metrics = train_head(head, client.head, head_ctx, body)
            variables, head_metrics = trees.join(body, head), {"head_loss": metrics["loss"]}
        train_model = model_trainer(network, task, training)
        variables, momentum, metrics = train_model(variables, client.model, ctx)
        return ClientResult(
            upload={**variables, "has_class": has_class},
            variables=variables,
            client=Momentum(head_momentum, momentum),
            metrics={**metrics, **head_metrics},
        )

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        variables, has_class = dict(cohort.uploads), cohort.uploads["has_class"]
        del variables["has_class"]
        heads, bodies = trees.split(variables, {model.head})
        rate = server_rate / jnp.sum(cohort.arrived.astype(jnp.float32))

        def step(head: PyTree, has_class: jax.Array) -> PyTree:
            """Returns one client's head after the server's step on its kernel."""

            def gap(head: PyTree) -> jax.Array:
                return collapse_gap(head_layer(model, head)["kernel"], has_class)

            return optimizers.descend(head, jax.grad(gap)(head), rate)

        heads = jax.vmap(step)(heads, has_class)
        return cohort.mean(bodies, state.server), cohort.put(state.rows, heads)

    def personalize(state: State, client: Momentum, ctx: ClientContext) -> PyTree:
        return send(state, ctx)

    return Algorithm(
        init=init,
        send=send,
        train=train,
        receive=receive,
        personalize=personalize,
        predict=model.apply,
    )


FLUTE = Method(flute, title="FLUTE", paper="Liu et al. 2024")
