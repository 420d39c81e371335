"""FedAMP: each client is held near a mixture of all clients' models, most of those like its own.

Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, 2021.

  u_i = ξ_ii θ_i + Σ_{j≠i} ξ_ij θ_j, at the server;   θ_i ← θ_i − η (∇f_i(θ_i; B) + λ/α (θ_i − u_i))
  distance: ξ_ij = α/σ exp(−‖θ_i − θ_j‖²/σ),  ξ_ii = 1 − Σ_{j≠i} ξ_ij
  cosine:   ξ_ij = (1 − ξ_ii) softmax_j(σ cos(θ_i, θ_j)), with the same ξ_ii for all: HeurFedAMP
A client trains and is served its own model.

Deviations: where the ξ_ij of a client come to more than 1 they are scaled to 1, so that ξ_ii is not
negative (the paper has α small enough). α does not fall from round to round. Models may be stale,
where clients are sampled. BatchNorm statistics stay with the client.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.local import Client, local
from fedjax_pfl.algorithms.shared import common
from fedjax_pfl.algorithms.shared.method import Method
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
    """With λ = 0 it is Local. Rows: the parameters of each client's last model. Clients: Local's.

    Args:
      attention: how alike models are: cosine, or distance, which is the paper's first form.
      sigma: σ; a large one makes cosine sharper and distance wider.
      self_weight: ξ_ii of cosine.
      alpha: α; of distance it scales the weights of others, of both it divides λ.
      penalty: λ, how firmly a client is held near its mixture.
    """
    require_one_of("fedamp.attention", attention, ATTENTION)
    require_above("fedamp.sigma", sigma, 0)
    require_above("fedamp.alpha", alpha, 0)
    require_at_least("fedamp.penalty", penalty, 0)
    share = (self_weight >= 0) & (self_weight <= 1)
    require(share, f"fedamp.self_weight is {self_weight}; it is a share, 0 to 1")
    if int(federation.active.sum()) < 2:
        raise UsageError("fedamp mixes in others' models; it needs two active clients or more")
    active = jnp.asarray(federation.active)
    alone = local(model, training, federation)

    def pairs(rows: PyTree, i: Any, *of: Any) -> list[jax.Array]:
        """Of each function of two numbers Σ of(θ_j, θ_i) over all parameters, for every j: [N]."""
        mine = jax.tree.leaves(trees.row(rows, i))

        def sums(row: PyTree) -> list[jax.Array]:
            leaves = list(zip(jax.tree.leaves(row), mine, strict=True))
            return [jnp.sum(jnp.stack([jnp.sum(f(a, b)) for a, b in leaves])) for f in of]

        return offload.map_clients(sums, rows)

    def weights(rows: PyTree, i: Any) -> jax.Array:
        """ξ_i: [N]."""
        others = active.at[i].set(False)
        if attention == "cosine":
            squares, dots = pairs(rows, i, lambda a, _: jnp.square(a), jnp.multiply)
            lengths = jnp.sqrt(squares)
            cosine = dots / jnp.maximum(lengths * lengths[i], 1e-12)
            found = jax.nn.softmax(jnp.where(others, sigma * cosine, -jnp.inf))
            found = (1 - self_weight) * found
        else:
            (squares,) = pairs(rows, i, lambda a, b: jnp.square(a - b))
            found = jnp.where(others, alpha / sigma * jnp.exp(-squares / sigma), 0.0)
            found = found / jnp.maximum(jnp.sum(found), 1.0)
        return found.at[i].set(1 - jnp.sum(found))

    def init(key: jax.Array, start: State | None = None) -> State:
        state = alone.init(key, start)
        return state._replace(rows={"params": state.clients.variables["params"]})

    def send(state: State, ctx: ClientContext) -> PyTree:
        return offload.weighted_sum(state.rows, weights(state.rows, ctx.i))

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        plain = local_training.gradient(model, federation.task, ctx.data)
        near = common.held(plain, payload["params"], penalty / alpha)
        theta, rest, momentum, metrics = local_training.fit(
            training, near, *local_training.split_variables(client.variables),
            client.momentum, ctx,
        )  # fmt: skip
        own = {"params": theta, **rest}
        return ClientResult({"params": theta}, own, Client(own, momentum), metrics)

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        return state.server, cohort.put(state.rows, cohort.uploads)

    def observe(state: State) -> dict[str, jax.Array]:
        clients = jnp.arange(federation.clients)
        return {"xi": jax.lax.map(lambda i: weights(state.rows, i), clients)}

    return alone._replace(
        init=init, send=send, train=train, receive=receive, observe=observe, offload=("params",)
    )


FEDAMP = Method(
    fedamp,
    title="FedAMP",
    paper="Huang et al. 2021",
    pictures={
        "xi": Picture("Weights of models, ξ", "how much of whose model a client is served", "from")
    },
)
