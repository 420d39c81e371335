"""Ditto: each client has a model of its own, held near the global one.

Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, 2021.

  w_k ← w_k − η ∇f(w_k; B), and w ← Σ_k n_k w_k / Σ_k n_k: FedAvg
  v_k ← v_k − η (∇f(v_k; B) + λ (v_k − w)), w the model that came down

Deviations: v meets the batches that w_k meets, in the same order. The penalty holds parameters,
never statistics, which v keeps to itself.
"""

from typing import Any, NamedTuple

import jax

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared import common
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import require_at_least


class Client(NamedTuple):
    """What stays with a client."""

    own: PyTree  # the variables v
    momentum: PyTree  # of v
    shared: PyTree  # momentum of w


def ditto(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    penalty: float = 0.5,
    own_epochs: int | None = None,
) -> Algorithm:
    """A client is served v; with λ = 0 it is Local. Server: FedAvg's. Clients: `Client`.

    Args:
      penalty: λ, how firmly v is held near w.
      own_epochs: passes over a client's examples in which v trains; unset: as w does.
    """
    require_at_least("ditto.penalty", penalty, 0)
    require_at_least("ditto.own_epochs", own_epochs, 1)
    average = fedavg(model, training, federation)
    by_own = training if own_epochs is None else training._replace(epochs=own_epochs, steps=None)

    def init(key: jax.Array, start: State | None = None) -> State:
        state = average.init(key, start)
        own = common.own_first(state.server, start, Client, federation)
        momentum = common.kept(by_own, state.server["params"], federation)
        return state._replace(clients=Client(own, momentum, state.clients))

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        shared = average.train(payload, client.shared, ctx)
        plain = local_training.gradient(model, federation.task, ctx.data)
        near = common.held(plain, payload["params"], penalty)
        v, rest, momentum, metrics = local_training.fit(
            by_own, near, *local_training.split_variables(client.own), client.momentum, ctx
        )
        own = {"params": v, **rest}
        metrics = {**metrics, "shared_loss": shared.metrics["loss"]}
        return ClientResult(shared.upload, own, Client(own, momentum, shared.client), metrics)

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        return client.own

    return average._replace(init=init, train=train, personalize=personalize)


DITTO = Method(ditto, title="Ditto", paper="Li et al. 2021")
