"""FedPAC: clients align the features of each class, and the server mixes a head for each client.

Xu et al., Personalized Federated Learning with Feature Alignment and Classifier Collaboration,
2023. z(x) are the d features, the inputs of the head. φ is the downloaded body. Client k has n_k
examples, n_kc of class c. C_c is the prototype of class c. A client computes, in order:

  h_kc = n_kc/n_k mean_{x of c} z(x),   V_k = (mean_x ‖z(x)‖² − Σ_c ‖h_kc‖²)/n_k,   both with φ
  ω_k ← SGD on f(φ, ·), one epoch;   φ_k ← SGD on f(·, ω_k) + λ mean_x ‖z(x) − C_y‖²/d
  C_kc = mean_{x of c} z(x), with φ_k

The server computes, over the clients that returned an update, with a_k ≥ 0 and Σ_j a_kj = 1:

  φ ← Σ n_k φ_k / Σ n_k;   C_c ← Σ n_kc C_kc / Σ n_kc if any client has the class, else unchanged
  a_k = argmin_a Σ_j a_j² V_j + Σ_c ‖Σ_j a_j (h_kc − h_jc)‖²;   ω_k ← Σ_j a_kj ω_j

Deviations: head and body have the same learning rate (the authors' head has a higher one). A class
without a prototype has no penalty (the authors' code uses the client's own mean before training).
The authors' code sets weights below 0.001 to 0. While the head trains, the body's BatchNorm
statistics are frozen, as in FedRep. A client that was not sampled keeps its head.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.shared.class_features import class_features
from fedjax_pfl.algorithms.shared.initial_state import (
    initial_momentum,
    initial_variables,
    model_shapes,
)
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import model_trainer
from fedjax_pfl.algorithms.shared.prototypes import (
    average_prototypes,
    means_or_prototypes,
    no_prototypes,
    with_prototype_penalty,
)
from fedjax_pfl.algorithms.shared.split_model import require_body
from fedjax_pfl.core import local_training, simplex, trees
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
    """Optimiser states of head and body that one client keeps; each is () if it is not kept."""

    head: PyTree
    body: PyTree


def mixtures(h: jax.Array, variances: jax.Array, arrived: jax.Array) -> jax.Array:
    """Computes the weights of all heads in each client's new head.

    Args:
      h: Mean features of each class times the class's share of the client's examples, [K, C, d].
      variances: Variance of each client's features divided by its number of examples, [K].
      arrived: Bool [K], the clients that returned an update; others have the weight 0.

    Returns:
      Weights [K, K]; row k, for the new head of client k, is not negative and sums to 1.
    """
    flat = h.reshape(h.shape[0], -1)

    def client_weights(h_k: jax.Array) -> jax.Array:
        gaps = h_k[None] - flat
        matrix = jnp.matmul(gaps, gaps.T, precision="highest") + jnp.diag(variances)
        return simplex.minimize_quadratic(matrix, arrived)

    return jax.lax.map(client_weights, flat)


def fedpac(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    penalty: float = 1.0,
    head_epochs: int = 1,
) -> Algorithm:
    """Creates FedPAC, for classification: the server averages the bodies and mixes personal heads.

    The server stores the body and the prototypes, the mean features of each class. The rows are the
    heads of the clients, which store `Momentum`.

    Args:
      penalty: λ, the weight of the distance between an example's features and its prototype.
      head_epochs: Passes over a client's examples to train its head. The body has `local_epochs`.
    """
    require_at_least("fedpac.penalty", penalty, 0)
    require_at_least("fedpac.head_epochs", head_epochs, 1)
    if not federation.task.has_classes:
        raise UsageError("fedpac makes a prototype of each class; choose a dataset with classes")
    classes, d = federation.outputs, features.width("fedpac", model, federation)
    require_body("fedpac", model, federation)
    with_features = features.WithFeatures(model)
    head_training = training._replace(epochs=head_epochs, steps=None)
    train_head = model_trainer(model, federation.task, head_training)
    names = tuple(model_shapes(model, federation))

    def parts(tree: PyTree) -> tuple[PyTree, PyTree]:
        """Returns (head, body) of the model in a tree that may hold other entries."""
        return trees.split({name: tree[name] for name in names if name in tree}, {model.head})

    def init(key: jax.Array, start: State | None = None) -> State:
        if start is not None and isinstance(start.clients, Momentum):
            joined = trees.join(parts(start.server)[1], trees.row(start.rows, 0))
            head, body = parts(initial_variables(model, federation, key, State(joined, (), ())))
            server, rows = start.server, start.rows
        else:
            head, body = parts(initial_variables(model, federation, key, start))
            server = {**body, **no_prototypes(classes, d)}
            rows = trees.repeat(head, federation.clients)
        momentum = Momentum(
            *(initial_momentum(training, part["params"], federation) for part in (head, body))
        )
        return State(server, rows, momentum)

    def send(state: State, ctx: ClientContext) -> PyTree:
        return trees.join(state.server, trees.row(state.rows, ctx.i))

    def train(payload: PyTree, client: Momentum, ctx: ClientContext) -> ClientResult:
        data, (head, body) = ctx.data, parts(payload)
        before = class_features(with_features, trees.join(body, head), data, classes)
        examples = jnp.maximum(jnp.sum(before.counts), 1.0)
        h = (before.counts / examples)[:, None] * before.means
        variance = jnp.maximum(before.mean_square - jnp.sum(jnp.square(h)), 0.0) / examples

        head_ctx, body_ctx = (ctx._replace(key=key) for key in jax.random.split(ctx.key))
        head, head_momentum, head_metrics = train_head(head, client.head, head_ctx, body)
        task = with_prototype_penalty(federation.task, payload, penalty)
        train_body = model_trainer(with_features, task, training)
        body, body_momentum, metrics = train_body(body, client.body, body_ctx, head)

        variables = trees.join(body, head)
        after = class_features(with_features, variables, data, classes)
        statistics = {
            "prototypes": means_or_prototypes(after, payload),
            "counts": after.counts.astype(jnp.int32),
            "h": h,
            "variance": variance,
        }
        return ClientResult(
            upload={**variables, **statistics},
            variables=variables,
            client=Momentum(head_momentum, body_momentum),
            metrics={**metrics, "head_loss": head_metrics["loss"]},
        )

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        uploads, old = cohort.present(cohort.uploads), state.server
        heads, bodies = parts(uploads)
        has_examples = cohort.arrived & (cohort.weights > 0)  # else its variance is unknown
        a = mixtures(uploads["h"], uploads["variance"], has_examples)
        a = jnp.where(jnp.any(has_examples), a, jnp.eye(len(a)))
        mixed = trees.combine(a, heads)
        body = cohort.mean(bodies, parts(old)[1])
        return {**body, **average_prototypes(old, uploads)}, cohort.put(state.rows, mixed)

    def personalize(state: State, client: Momentum, ctx: ClientContext) -> PyTree:
        return trees.join(parts(state.server)[1], trees.row(state.rows, ctx.i))

    return Algorithm(
        init=init,
        send=send,
        train=train,
        receive=receive,
        personalize=personalize,
        predict=model.apply,
    )


FEDPAC = Method(fedpac, title="FedPAC", paper="Xu et al. 2023")
