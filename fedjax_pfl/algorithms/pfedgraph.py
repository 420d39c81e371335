"""pFedGraph: the server weighs clients by how alike they have learned, and mixes a model for each.

Ye et al., Personalized Federated Learning with Inferred Collaboration Graphs, 2023. θ⁰ is the model
that all began with, p_j = n_j / Σ n, and all sums are over the clients that arrived:

  s_ij = cos(θ_i − θ⁰, θ_j − θ⁰)
  w_i = argmin_w α ‖w − p‖² − Σ_j w_j s_ij over weights, which is the one next to p + s_i / 2α
  u_i ← Σ_j w_ij θ_j
  θ_i ← θ_i − η ∇(f_i(θ_i; B) − λ cos(θ_i, u_i)), from θ_i = u_i

Deviations: the authors' code sets cosines above .9 to 1, and has no second term in the first round.
BatchNorm statistics are mixed with the parameters and do not count in cosines.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms import common
from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.core import local_training, simplex, trees
from fedjax_pfl.core.algorithm import Algorithm, Cohort, Federation, PyTree, State, Trained, Visit
from fedjax_pfl.core.errors import above, at_least
from fedjax_pfl.core.examples import Batch
from fedjax_pfl.core.task import Task


def pfedgraph(
    model: Any,
    task: Task,
    training: local_training.Training,
    federation: Federation,
    *,
    alpha: float = 0.8,
    penalty: float = 0.01,
) -> Algorithm:
    """With α near 0 and λ = 0 it is Local; with a large α it is FedAvg.

    Server: θ⁰. Rows: u_i, which a client is served. Clients: momentum, where it is kept.

    Args:
      alpha: α, how firmly weights are held near shares of examples; a small one is for those alike.
      penalty: λ, how firmly a client's model keeps the direction of what it was sent.
    """
    above("pfedgraph.alpha", alpha, 0)
    at_least("pfedgraph.penalty", penalty, 0)
    average = fedavg(model, task, training, federation)

    def init(key: jax.Array, start: State | None = None) -> State:
        if start is not None and isinstance(start.server, dict) and "first" in start.server:
            first = common.initial(model, federation, key, State(trees.row(start.rows, 0), (), ()))
            rows, server = start.rows, start.server
        else:
            first = common.initial(model, federation, key, start)
            rows, server = trees.repeat(first, federation.clients), {"first": first["params"]}
        return State(server, rows, common.kept(training, first["params"], federation))

    def send(state: State, visit: Visit) -> PyTree:
        return trees.row(state.rows, visit.i)

    def train(payload: PyTree, client: PyTree, visit: Visit) -> Trained:
        plain = local_training.gradient(model, task, visit.data)

        def turned_away(params: PyTree) -> jax.Array:
            pairs = zip(jax.tree.leaves(params), jax.tree.leaves(payload["params"]), strict=True)
            dot = sum(jnp.sum(a * b) for a, b in pairs)
            squares = trees.squared_norm(params) * trees.squared_norm(payload["params"])
            return -dot / jnp.sqrt(jnp.maximum(squares, 1e-24))

        def along(params: PyTree, rest: PyTree, batch: Batch, key: jax.Array) -> Any:
            loss_rest, grads = plain(params, rest, batch, key)
            away = jax.grad(turned_away)(params)
            return loss_rest, jax.tree.map(lambda g, a: g + penalty * a, grads, away)

        params, rest, momentum, metrics = local_training.fit(
            training, along, *local_training.split_variables(payload), client, visit
        )
        variables = {"params": params, **rest}
        return Trained(variables, variables, momentum, metrics)

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        uploads, here = cohort.present(cohort.uploads), cohort.arrived
        first = jax.tree.map(lambda leaf: leaf[None], state.server["first"])
        learned = jax.tree.map(jnp.subtract, uploads["params"], first)
        flat = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(learned)]
        dots = sum(jnp.matmul(one, one.T, precision="highest") for one in flat)
        lengths = jnp.sqrt(jnp.diagonal(dots))
        alike = dots / jnp.maximum(lengths[:, None] * lengths[None], 1e-24)
        shares = cohort.weights / jnp.maximum(jnp.sum(cohort.weights), 1.0)
        nearest = jax.vmap(simplex.project, (0, None))
        w = nearest(shares[None] + alike / (2 * alpha), here)
        mixed = jax.tree.map(lambda leaf: jnp.tensordot(w, leaf, 1, precision="highest"), uploads)
        return state.server, cohort.put(state.rows, mixed)

    def personal(state: State, client: PyTree, visit: Visit) -> PyTree:
        return trees.row(state.rows, visit.i)

    far = tuple(common.shapes(model, federation))
    return average._replace(
        init=init, send=send, train=train, receive=receive, personal=personal, far=far
    )
