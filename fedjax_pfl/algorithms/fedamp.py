"""FedAMP: a penalty ties each client to a mixture of models, mostly of those similar to its own.

Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, 2021.

  u_i = ξ_ii θ_i + Σ_{j≠i} ξ_ij θ_j, at the server;   θ_i ← θ_i − η (∇f_i(θ_i; B) + λ/α (θ_i − u_i))
  distance: ξ_ij = α/σ exp(−‖θ_i − θ_j‖²/σ),  ξ_ii = 1 − Σ_{j≠i} ξ_ij
  cosine:   ξ_ij = (1 − ξ_ii) softmax_j(σ cos(θ_i, θ_j)), with the same ξ_ii for all: HeurFedAMP
A client trains and is served its own model. The default is HeurFedAMP.

Deviations: if the ξ_ij of a client sum to more than 1, they are scaled to 1. Then ξ_ii is not
negative; the paper chooses α small enough. α does not decrease over the rounds. Models may be
stale if clients are sampled. BatchNorm statistics stay on the client.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.local import LocalClient, local
from fedjax_pfl.algorithms.shared.initial_state import continuing
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import fit_variables, proximal
from fedjax_pfl.core import local_training, offload, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.diagnostics import Picture
from fedjax_pfl.core.errors import (
    UsageError,
    require,
    require_above,
    require_at_least,
    require_one_of,
)

ATTENTION = ("cosine", "distance")


def fedamp(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    attention: str = "cosine",
    sigma: float = 10.0,
    self_weight: float = 0.5,
    alpha: float = 1.0,
    penalty: float = 1.0,
) -> Algorithm:
    """Creates FedAMP: a penalty ties each client's model to a mixture of similar clients' models.

    With λ = 0 it is Local. The rows are the parameters of each client's last model; the server
    stores nothing else. Clients store the same as Local. Needs at least two active clients.

    Args:
      attention: Similarity of models: cosine (HeurFedAMP), or distance (FedAMP).
      sigma: σ, the scale of similarities; a larger value makes cosine sharper and distance wider.
      self_weight: ξ_ii, the weight of a client's own model in its mixture if attention is cosine.
      alpha: α, which divides λ. If attention is distance it also scales the weights of others.
      penalty: λ, the weight of the distance between a client's model and its mixture.
    """
    require_one_of("fedamp.attention", attention, ATTENTION)
    require_above("fedamp.sigma", sigma, 0)
    require_above("fedamp.alpha", alpha, 0)
    require_at_least("fedamp.penalty", penalty, 0)
    valid = (self_weight >= 0) & (self_weight <= 1)
    require(valid, f"fedamp.self_weight is {self_weight}; it is a share, 0 to 1")
    if federation.least_contributors < 2:
        raise UsageError("fedamp mixes models of other clients; use at least 2 active clients")
    base = local(model, training, federation)

    def products(rows: PyTree, i: Any, origin: PyTree) -> tuple[jax.Array, jax.Array]:
        """Returns ‖θ_j − o‖² and ⟨θ_j − o, θ_i − o⟩ for every client j, [N] each.

        `rows` are the parameters θ_j of all clients, stacked; `origin` are the parameters o.
        """

        def difference(row: PyTree) -> PyTree:
            return jax.tree.map(jnp.subtract, *map(trees.at_least_float32, (row, origin)))

        of_i = difference(trees.row(rows, i))

        def of_row(row: PyTree) -> tuple[jax.Array, jax.Array]:
            row = difference(row)
            dots = jax.tree.map(lambda a, b: jnp.vdot(a, b, precision="highest"), row, of_i)
            return trees.squared_norm(row), jnp.sum(jnp.stack(jax.tree.leaves(dots)))

        return offload.map_clients(of_row, rows)

    def weights(rows: PyTree, i: Any) -> jax.Array:
        """Returns the weights in client i's mixture of all clients' models, `rows`, [N]."""
        is_other = federation.contributors(i).at[i].set(False)
        first = trees.row(rows, 0)
        if attention == "cosine":
            squares, dots = products(rows, i, jax.tree.map(jnp.zeros_like, first))
            lengths = jnp.sqrt(squares)
            cosine = dots / jnp.maximum(lengths * lengths[i], 1e-12)
            xi = jax.nn.softmax(jnp.where(is_other, sigma * cosine, -jnp.inf))
            xi = (1 - self_weight) * xi
        else:
            # Distances of models from one of them are short, so the difference loses few digits.
            squares, dots = products(rows, i, first)
            squared_distance = jnp.maximum(squares + squares[i] - 2 * dots, 0.0)
            xi = jnp.where(is_other, alpha / sigma * jnp.exp(-squared_distance / sigma), 0.0)
            xi = xi / jnp.maximum(jnp.sum(xi), 1.0)
        return xi.at[i].set(1 - jnp.sum(xi))

    def init(key: jax.Array, start: State | None = None) -> State:
        state = base.init(key, start)
        return state._replace(rows={"params": state.clients.variables["params"]})

    def send(state: State, ctx: ClientContext) -> PyTree:
        return offload.weighted_sum(state.rows, weights(state.rows, ctx.i))

    def train(payload: PyTree, client: LocalClient, ctx: ClientContext) -> ClientResult:
        gradient = local_training.gradient(model, federation.task, ctx.data)
        gradient = proximal(gradient, payload["params"], penalty / alpha)
        variables, momentum, metrics = fit_variables(
            training, gradient, client.variables, client.momentum, ctx
        )
        return ClientResult(
            upload={"params": variables["params"]},
            variables=variables,
            client=LocalClient(variables, momentum),
            metrics=metrics,
        )

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        return state.server, cohort.put(state.rows, cohort.uploads)

    def observe(state: State) -> dict[str, jax.Array]:
        clients = jnp.arange(federation.clients)
        return {"xi": jax.lax.map(lambda i: weights(state.rows, i), clients, batch_size=128)}

    return base._replace(
        init=continuing(init),
        send=send,
        train=train,
        receive=receive,
        observe=observe,
        offload=("params",),
        kept_change=1.0,
    )


FEDAMP = Method(
    fedamp,
    title="FedAMP",
    paper="Huang et al. 2021",
    pictures={
        "xi": Picture("Weights of models, ξ", "how much of whose model a client is served", "from")
    },
)
