"""FedAvg: one global model, the mean of what the clients trained, weighted by their examples.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.
"""

from typing import Any

import jax

from fedjax_pfl.algorithms.shared import common
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.local_training import Training


def fedavg(model: Any, training: Training, federation: Federation) -> Algorithm:
    """w ← Σ_k n_k w_k / Σ_k n_k over the clients that answered.

    Server: the variables, BatchNorm statistics included. Clients: momentum, where it is kept.
    """
    sgd = common.trainer(model, federation.task, training)

    def init(key: jax.Array, start: State | None = None) -> State:
        variables = common.initial(model, federation, key, start)
        return State(variables, (), common.kept(training, variables["params"], federation))

    def send(state: State, ctx: ClientContext) -> PyTree:
        return state.server

    def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
        variables, client, metrics = sgd(payload, client, ctx)
        return ClientResult(variables, variables, client, metrics)

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        return cohort.mean(cohort.uploads, state.server), state.rows

    def personalize(state: State, client: PyTree, ctx: ClientContext) -> PyTree:
        return state.server

    return Algorithm(init, send, train, receive, personalize, model.apply)


FEDAVG = Method(fedavg, title="FedAvg", paper="McMahan et al. 2017")
