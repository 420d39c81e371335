"""FedPAC: features of a class are held together, and each client gets a mixture of heads for it.

Xu et al., Personalized Federated Learning with Feature Alignment and Classifier Collaboration,
2023. With z(x) what comes into the head, d numbers; φ the body that came down; n_kc of the n_k
examples of client k of class c; C_c the class's prototype. At a client, in this order:

  h_kc = n_kc/n_k mean_{x of c} z(x),   V_k = (mean_x ‖z(x)‖² − Σ_c ‖h_kc‖²)/n_k,   both under φ
  ω_k ← SGD on f(φ, ·), one epoch;   φ_k ← SGD on f(·, ω_k) + λ mean_x ‖z(x) − C_y‖²/d
  C_kc = mean_{x of c} z(x), under φ_k
and at the server, over those that arrived, with a_k weights, not negative and with sum 1:

  φ ← Σ n_k φ_k / Σ n_k;   C_c ← Σ n_kc C_kc / Σ n_kc, where anybody has the class; else it stays
  a_k = argmin_a Σ_j a_j² V_j + Σ_c ‖Σ_j a_j (h_kc − h_jc)‖²;   ω_k ← Σ_j a_kj ω_j

Deviations: one rate for head and body (the authors' is higher for the head). A class that has no
prototype has no third term (the authors' code takes the client's own of before its training). The
authors' code sets weights under .001 to 0. While the head trains the body's BatchNorm statistics
stay, as in FedRep. A client that was not sampled keeps the head that it has.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.shared import common
from fedjax_pfl.algorithms.shared.method import Method
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
    """A client's kept momentum; each part's moves only while that part trains."""

    head: PyTree
    body: PyTree


def mixtures(h: jax.Array, variances: jax.Array, here: jax.Array) -> jax.Array:
    """a [K, K], a row for each client.

    Args:
      h: [K, C, d]. variances: V, [K]. here: bool [K], those that arrived.
    """
    flat = h.reshape(h.shape[0], -1)

    def one(own: jax.Array) -> jax.Array:
        gaps = own[None] - flat
        form = jnp.matmul(gaps, gaps.T, precision="highest") + jnp.diag(variances)
        return simplex.minimize_quadratic(form, here)

    return jax.lax.map(one, flat)


def fedpac(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    penalty: float = 1.0,
    head_epochs: int = 1,
) -> Algorithm:
    """Server: φ, and C with which classes it has. Rows: each client's ω_k, the mixture for it.

    Clients: momentum, where it is kept. A client is served φ with its ω_k.

    Args:
      penalty: λ, how firmly what comes into the head is held near the prototype of its class.
      head_epochs: passes over a client's examples in which its head trains; the body's are
        `local_epochs`.
    """
    require_at_least("fedpac.penalty", penalty, 0)
    require_at_least("fedpac.head_epochs", head_epochs, 1)
    if not federation.task.has_classes:
        raise UsageError("fedpac makes a prototype of each class; choose a dataset with classes")
    classes, d = federation.outputs, features.width("fedpac", model, federation)
    both = features.WithFeatures(model)
    by_head = training._replace(epochs=head_epochs, steps=None)
    fit_head = common.trainer(model, federation.task, by_head)

    names = tuple(common.shapes(model, federation))

    def parts(tree: PyTree) -> tuple[PyTree, PyTree]:
        """The head and the body of the model in a tree."""
        return trees.split({name: tree[name] for name in names if name in tree}, {model.head})

    def init(key: jax.Array, start: State | None = None) -> State:
        if start is not None and isinstance(start.clients, Momentum):
            whole = trees.join(parts(start.server)[1], trees.row(start.rows, 0))
            head, body = parts(common.initial(model, federation, key, State(whole, (), ())))
            server, rows = start.server, start.rows
        else:
            head, body = parts(common.initial(model, federation, key, start))
            server = {**body, **common.no_prototypes(classes, d)}
            rows = trees.repeat(head, federation.clients)
        momentum = Momentum(
            *(common.kept(training, part["params"], federation) for part in (head, body))
        )
        return State(server, rows, momentum)

    def send(state: State, ctx: ClientContext) -> PyTree:
        return trees.join(state.server, trees.row(state.rows, ctx.i))

    def train(payload: PyTree, client: Momentum, ctx: ClientContext) -> ClientResult:
        data, (head, body) = ctx.data, parts(payload)
        before = common.features_by_class(both, trees.join(body, head), data, classes)
        examples = jnp.maximum(jnp.sum(before.counts), 1.0)
        h = (before.counts / examples)[:, None] * before.means
        variance = jnp.maximum(before.square - jnp.sum(jnp.square(h)), 0.0) / examples

        one, two = (ctx._replace(key=key) for key in jax.random.split(ctx.key))
        head, of_head, first = fit_head(head, client.head, one, body)
        pulled = common.near_prototypes(federation.task, payload, penalty)
        fit_body = common.trainer(both, pulled, training)
        body, of_body, metrics = fit_body(body, client.body, two, head)

        trained = trees.join(body, head)
        after = common.features_by_class(both, trained, data, classes)
        more = {"prototypes": after.means, "counts": after.counts, "h": h, "variance": variance}
        metrics = {**metrics, "head_loss": first["loss"]}
        return ClientResult({**trained, **more}, trained, Momentum(of_head, of_body), metrics)

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        uploads, old = cohort.present(cohort.uploads), state.server
        heads, bodies = parts(uploads)
        a = mixtures(uploads["h"], uploads["variance"], cohort.arrived)
        mixed = jax.tree.map(lambda leaf: jnp.tensordot(a, leaf, 1, precision="highest"), heads)
        body = cohort.mean(bodies, parts(old)[1])
        return {**body, **common.new_prototypes(old, uploads)}, cohort.put(state.rows, mixed)

    def personalize(state: State, client: Momentum, ctx: ClientContext) -> PyTree:
        return trees.join(parts(state.server)[1], trees.row(state.rows, ctx.i))

    return Algorithm(init, send, train, receive, personalize, model.apply)


FEDPAC = Method(fedpac, title="FedPAC", paper="Xu et al. 2023")
