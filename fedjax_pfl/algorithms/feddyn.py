"""FedDyn: a linear and a quadratic term in each client's loss give all clients one optimum.

Acar et al., Federated Learning Based on Dynamic Regularization, 2021.

  θ_k ≈ argmin f_k(θ) − ⟨g_k, θ⟩ + α/2 ‖θ − w‖²;   g_k ← g_k − α (θ_k − w)
  h ← h − α/N Σ_k (θ_k − w);   w ← mean_k θ_k − h/α,  over those that arrived, of N clients
Local SGD from w approximates the argmin. h is the mean of all g_k, also if clients drop out.

Deviations: none in the method. Means are not weighted by examples, as in the paper. The authors'
code gives clients with few examples a larger α and clips gradients. It uses α = 0.01 where the
default here is 0.1, and also tests the mean of all clients' last models. Momentum, decay and
clipping, if set, act on the whole gradient. BatchNorm statistics are averaged. With keep_head, a
client's private head has a linear term and the server's h has none for it, so the head's loss also
has the term α/2 ‖head − initial head‖².
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.initial_state import initial_client_rows
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import fit_variables, proximal
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
    """State that one client keeps between rounds. `State.clients` stacks it over clients."""

    g: PyTree  # g_k, the linear term of its loss, in the structure of the parameters
    momentum: PyTree  # optimiser state, or () if clients do not keep it


def feddyn(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    alpha: float = 0.1,
) -> Algorithm:
    """Creates FedDyn: a linear and a quadratic term in each client's loss correct its drift.

    The server stores the variables of the model and, as `drift`, the mean h of the clients' linear
    terms g_k, which is not sent. Clients store `Client`.

    Args:
      alpha: α, the weight of the distance to the global model, and the step size of the linear
        terms of clients and server.
    """
    require_above("feddyn.alpha", alpha, 0)
    base = fedavg(model, training, federation)
    clients = int(federation.active.sum())

    def model_of(server: PyTree) -> PyTree:
        return {name: part for name, part in server.items() if name != "drift"}

    def init(key: jax.Array, start: State | None = None) -> State:
        state = base.init(key, start)
        zeros = jax.tree.map(jnp.zeros_like, state.server["params"])
        g = initial_client_rows(zeros, start, Client, "g", federation)
        # A group of clients may have none that trains: its newcomers come in a later phase.
        active = jnp.asarray(federation.active, jnp.float32)
        drift = trees.weighted_mean(g, active) if clients else zeros
        return State({**state.server, "drift": drift}, (), Client(g, state.clients))

    def send(state: State, ctx: ClientContext) -> PyTree:
        return model_of(state.server)

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        w = payload["params"]
        gradient = local_training.gradient(model, federation.task, ctx.data)
        with_quadratic = proximal(gradient, w, alpha)

        def with_both(theta: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> Any:
            aux, grads = with_quadratic(theta, model_state, batch, key)
            return aux, jax.tree.map(jnp.subtract, grads, client.g)

        variables, momentum, metrics = fit_variables(
            training, with_both, payload, client.momentum, ctx
        )
        g = jax.tree.map(
            lambda g, new, old: g - alpha * (new - old), client.g, variables["params"], w
        )
        return ClientResult(
            upload=variables, variables=variables, client=Client(g, momentum), metrics=metrics
        )

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        w, uploads = state.server["params"], cohort.uploads
        mean = cohort.mean(uploads, model_of(state.server), cohort.arrived)
        updates = jax.tree.map(lambda new, old: new - old[None], uploads["params"], w)
        sums = jax.tree.map(lambda leaf: jnp.sum(leaf, 0), cohort.present(updates))
        drift = jax.tree.map(lambda h, s: h - alpha * s / clients, state.server["drift"], sums)
        params = jax.tree.map(lambda m, h: m - h / alpha, mean["params"], drift)
        return {**mean, "params": params, "drift": drift}, state.rows

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        return model_of(state.server)

    return base._replace(
        init=init, send=send, train=train, receive=receive, personalize=personalize
    )


FEDDYN = Method(feddyn, title="FedDyn", paper="Acar et al. 2021")
