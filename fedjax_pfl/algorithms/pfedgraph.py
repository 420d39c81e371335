"""pFedGraph: the server averages a model for each client, weighted by the similarity of updates.

Ye et al., Personalized Federated Learning with Inferred Collaboration Graphs, 2023. θ⁰ is the
initial model, p_j = n_j / Σ n, and all sums are over the clients that returned an update:

  s_ij = cos(θ_i − θ⁰, θ_j − θ⁰)
  w_i = argmin_w α ‖w − p‖² − Σ_j w_j s_ij over w ≥ 0 with sum 1: the projection of p + s_i / 2α
  u_i ← Σ_j w_ij θ_j
  θ_i ← θ_i − η ∇(f_i(θ_i; B) − λ cos(θ_i, u_i)), from θ_i = u_i

Deviations: the authors' code adds the cosine to the loss instead of subtracting it, compares θ_i
with Σ_j w_ij θ_j / ‖θ_j‖, a sum of normalised models, instead of u_i, and has no cosine in the
first round. It also sets similarities above 0.9 to 1. BatchNorm statistics are averaged with the
parameters but not part of the cosines. A client that has not been sampled yet is served θ⁰.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.initial_state import (
    initial_momentum,
    initial_variables,
    model_shapes,
)
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import fit_variables
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
from fedjax_pfl.core.errors import require_above, require_at_least
from fedjax_pfl.core.examples import Batch


def pfedgraph(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    alpha: float = 0.8,
    penalty: float = 0.01,
) -> Algorithm:
    """Creates pFedGraph: the server mixes a model for each client, by similarity of updates.

    α near 0 with λ = 0 gives Local, a large α gives FedAvg. The server stores the initial
    parameters θ⁰ as `first`; the rows are the variables of the mixture sent to each client. Clients
    store their optimiser state, or () if they do not keep it.

    Args:
      alpha: α, the weight of the distance between a client's mixing weights and the shares of
        examples. A small α follows similarity.
      penalty: λ, the weight of the cosine between a client's model and the model it was sent.
    """
    require_above("pfedgraph.alpha", alpha, 0)
    require_at_least("pfedgraph.penalty", penalty, 0)
    base = fedavg(model, training, federation)

    def init(key: jax.Array, start: State | None = None) -> State:
        if start is not None and isinstance(start.server, dict) and "first" in start.server:
            first = initial_variables(
                model, federation, key, State(trees.row(start.rows, 0), (), ())
            )
            rows, server = start.rows, start.server
        else:
            first = initial_variables(model, federation, key, start)
            rows, server = trees.repeat(first, federation.clients), {"first": first["params"]}
        return State(server, rows, initial_momentum(training, first["params"], federation))

    def send(state: State, ctx: ClientContext) -> PyTree:
        return trees.row(state.rows, ctx.i)

    def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
        loss_gradient = local_training.gradient(model, federation.task, ctx.data)

        def negative_cosine(params: PyTree) -> jax.Array:
            pairs = zip(jax.tree.leaves(params), jax.tree.leaves(payload["params"]), strict=True)
            dot = sum(jnp.sum(a * b) for a, b in pairs)
            squares = trees.squared_norm(params) * trees.squared_norm(payload["params"])
            return -dot / jnp.sqrt(jnp.maximum(squares, 1e-24))

        def gradient(params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> Any:
            aux, grads = loss_gradient(params, model_state, batch, key)
            cosine_grads = jax.grad(negative_cosine)(params)
            return aux, jax.tree.map(lambda g, c: g + penalty * c, grads, cosine_grads)

        variables, momentum, metrics = fit_variables(training, gradient, payload, client, ctx)
        return ClientResult(upload=variables, variables=variables, client=momentum, metrics=metrics)

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        uploads = cohort.present(cohort.uploads)
        first = jax.tree.map(lambda leaf: leaf[None], state.server["first"])
        params_and_first = map(trees.at_least_float32, (uploads["params"], first))
        updates = jax.tree.map(jnp.subtract, *params_and_first)
        flat = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(updates)]
        dots = sum(jnp.matmul(leaf, leaf.T, precision="highest") for leaf in flat)
        norms = jnp.sqrt(jnp.diagonal(dots))
        cosines = dots / jnp.maximum(norms[:, None] * norms[None], 1e-24)
        shares = cohort.weights / jnp.maximum(jnp.sum(cohort.weights), 1.0)
        project = jax.vmap(simplex.project, (0, None))
        w = project(shares[None] + cosines / (2 * alpha), cohort.arrived)
        mixed = trees.combine(w, uploads)
        return state.server, cohort.put(state.rows, mixed)

    def personalize(state: State, client: PyTree, ctx: ClientContext) -> PyTree:
        return trees.row(state.rows, ctx.i)

    offload = tuple(model_shapes(model, federation))
    return base._replace(
        init=init, send=send, train=train, receive=receive, personalize=personalize, offload=offload
    )


PFEDGRAPH = Method(pfedgraph, title="pFedGraph", paper="Ye et al. 2023")
