"""FedDyn: each client's loss gets a linear and a quadratic term, so that all end in one optimum.

Acar et al., Federated Learning Based on Dynamic Regularization, 2021.

  θ_k ≈ argmin f_k(θ) − ⟨g_k, θ⟩ + α/2 ‖θ − w‖²;   g_k ← g_k − α (θ_k − w)
  h ← h − α/N Σ_k (θ_k − w);   w ← mean_k θ_k − h/α,  over those that arrived, of N clients
By local SGD from w in the place of argmin. So h is the mean of all g_k, and stays so whoever drops
out.

Deviations: none in the method. Means are plain, as in the paper, not weighted by examples.
Momentum, decay and clipping, where they are set, act on the whole gradient. BatchNorm statistics
are averaged.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared import common
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import require_above
from fedjax_pfl.core.examples import Batch


class Client(NamedTuple):
    """What stays with a client."""

    own: PyTree  # g_k, as the parameters are
    momentum: PyTree


def feddyn(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    alpha: float = 0.1,
) -> Algorithm:
    """Server: the variables w and, as `drift`, h, which does not travel. Clients: `Client`.

    Args:
      alpha: α, how firmly clients are held near w, and by how much g_k and h move.
    """
    require_above("feddyn.alpha", alpha, 0)
    average = fedavg(model, training, federation)
    clients = int(federation.active.sum())

    def model_of(server: PyTree) -> PyTree:
        return {name: part for name, part in server.items() if name != "drift"}

    def init(key: jax.Array, start: State | None = None) -> State:
        state = average.init(key, start)
        zeros = jax.tree.map(jnp.zeros_like, state.server["params"])
        own = common.own_first(zeros, start, Client, federation)
        drift = trees.weighted_mean(own, jnp.asarray(federation.active, jnp.float32))
        return State({**state.server, "drift": drift}, (), Client(own, state.clients))

    def send(state: State, ctx: ClientContext) -> PyTree:
        return model_of(state.server)

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        w, rest = local_training.split_variables(payload)
        near = common.held(local_training.gradient(model, federation.task, ctx.data), w, alpha)

        def tilted(theta: PyTree, rest: PyTree, batch: Batch, key: jax.Array) -> Any:
            loss_rest, grads = near(theta, rest, batch, key)
            return loss_rest, jax.tree.map(jnp.subtract, grads, client.own)

        theta, rest, momentum, metrics = local_training.fit(
            training, tilted, w, rest, client.momentum, ctx
        )
        own = jax.tree.map(lambda g, new, old: g - alpha * (new - old), client.own, theta, w)
        trained = {"params": theta, **rest}
        return ClientResult(trained, trained, Client(own, momentum), metrics)

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        w, uploads = state.server["params"], cohort.uploads
        mean = cohort.mean(uploads, model_of(state.server), cohort.arrived)
        moved = jax.tree.map(lambda new, old: new - old[None], uploads["params"], w)
        sums = jax.tree.map(lambda leaf: jnp.sum(leaf, 0), cohort.present(moved))
        drift = jax.tree.map(lambda h, s: h - alpha * s / clients, state.server["drift"], sums)
        params = jax.tree.map(lambda m, h: m - h / alpha, mean["params"], drift)
        return {**mean, "params": params, "drift": drift}, state.rows

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        return model_of(state.server)

    return average._replace(
        init=init, send=send, train=train, receive=receive, personalize=personalize
    )


FEDDYN = Method(feddyn, title="FedDyn", paper="Acar et al. 2021")
