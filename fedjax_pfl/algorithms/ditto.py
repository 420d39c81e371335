"""Ditto: each client trains its own model, with a penalty on its distance to the global model.

Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, 2021.

  w_k ← w_k − η ∇f(w_k; B), and w ← Σ_k n_k w_k / Σ_k n_k: FedAvg
  v_k ← v_k − η (∇f(v_k; B) + λ (v_k − w)), with the downloaded w

v_k trains on the same batches as w_k, in the same order, as in the authors' code.

Deviations: the mean is weighted by examples; the authors' code samples clients by their examples
and takes the plain mean. They use λ = 1 in their published commands and tune it in the paper; the
default here is 0.5. The penalty applies to parameters only. BatchNorm statistics of v_k stay on the
client.
"""

from typing import Any, NamedTuple

import jax

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.initial_state import initial_client_rows, initial_momentum
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import fit_variables, proximal
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
    """State that one client keeps between rounds. `State.clients` stacks it over clients."""

    variables: PyTree  # the client's own model v_k
    momentum: PyTree  # optimiser state of v_k, or () if not kept
    shared_momentum: PyTree  # optimiser state of the local copy of the global model, or ()


def ditto(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    penalty: float = 0.5,
    own_epochs: int | None = None,
) -> Algorithm:
    """Creates Ditto: FedAvg, and each client trains its own model v_k near the global model.

    With λ = 0 v_k is that of Local. The server stores the same as FedAvg, clients store `Client`.
    The personalised model is v_k.

    Args:
      penalty: λ, the weight of the distance between the client's own and the global model.
      own_epochs: Passes over a client's examples to train its own model. Unset: the same as to
        train the global model.
    """
    require_at_least("ditto.penalty", penalty, 0)
    require_at_least("ditto.own_epochs", own_epochs, 1)
    base = fedavg(model, training, federation)
    v_training = (
        training if own_epochs is None else training._replace(epochs=own_epochs, steps=None)
    )

    def init(key: jax.Array, start: State | None = None) -> State:
        state = base.init(key, start)
        clients = Client(
            initial_client_rows(state.server, start, Client, "variables", federation),
            initial_momentum(v_training, state.server["params"], federation),
            state.clients,
        )
        return state._replace(clients=clients)

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        shared = base.train(payload, client.shared_momentum, ctx)
        gradient = local_training.gradient(model, federation.task, ctx.data)
        gradient = proximal(gradient, payload["params"], penalty)
        variables, momentum, metrics = fit_variables(
            v_training, gradient, client.variables, client.momentum, ctx
        )
        return ClientResult(
            upload=shared.upload,
            variables=variables,
            client=Client(variables, momentum, shared.client),
            metrics={**metrics, "shared_loss": shared.metrics["loss"]},
        )

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        return client.variables

    return base._replace(init=init, train=train, personalize=personalize)


DITTO = Method(ditto, title="Ditto", paper="Li et al. 2021")
