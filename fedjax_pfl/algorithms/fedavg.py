"""FedAvg: one global model, the mean of the clients' trained models weighted by their examples.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.
"""

from typing import Any

import jax

from fedjax_pfl.algorithms.shared.initial_state import initial_momentum, initial_variables
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import model_trainer
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
    """Creates FedAvg: the server averages the models of the clients that returned an update.

    The mean is weighted by training examples. The server stores the variables, BatchNorm statistics
    included. Clients store their optimiser state, or () if they do not keep it.
    """
    train_model = model_trainer(model, federation.task, training)

    def init(key: jax.Array, start: State | None = None) -> State:
        variables = initial_variables(model, federation, key, start)
        return State(variables, (), initial_momentum(training, variables["params"], federation))

    def send(state: State, ctx: ClientContext) -> PyTree:
        return state.server

    def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
        variables, momentum, metrics = train_model(payload, client, ctx)
        return ClientResult(upload=variables, variables=variables, client=momentum, metrics=metrics)

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        return cohort.mean(cohort.uploads, state.server), state.rows

    def personalize(state: State, client: PyTree, ctx: ClientContext) -> PyTree:
        return state.server

    return Algorithm(
        init=init,
        send=send,
        train=train,
        receive=receive,
        personalize=personalize,
        predict=model.apply,
    )


FEDAVG = Method(fedavg, title="FedAvg", paper="McMahan et al. 2017")
