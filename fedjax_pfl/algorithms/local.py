"""Local: every client trains its own model, without communication."""

from typing import Any, NamedTuple

import jax

from fedjax_pfl.algorithms.shared.initial_state import (
    continuing,
    initial_momentum,
    initial_variables,
)
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import model_trainer
from fedjax_pfl.core import trees
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


class LocalClient(NamedTuple):
    """State that one client keeps between rounds. `State.clients` stacks it over clients."""

    variables: PyTree  # the client's own model
    momentum: PyTree  # optimiser state, or () if clients do not keep it


def local(model: Any, training: Training, federation: Federation) -> Algorithm:
    """Creates Local: every client trains its own model, and nothing is sent.

    All clients start from the same model. Clients store `LocalClient`.
    """
    train_model = model_trainer(model, federation.task, training)

    def init(key: jax.Array, start: State | None = None) -> State:
        variables = initial_variables(model, federation, key, start)
        momentum = initial_momentum(training, variables["params"], federation)
        return State((), (), LocalClient(trees.repeat(variables, federation.clients), momentum))

    def send(state: State, ctx: ClientContext) -> PyTree:
        return ()

    def train(payload: PyTree, client: LocalClient, ctx: ClientContext) -> ClientResult:
        variables, momentum, metrics = train_model(client.variables, client.momentum, ctx)
        return ClientResult(
            upload=(), variables=variables, client=LocalClient(variables, momentum), metrics=metrics
        )

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        return state.server, state.rows

    def personalize(state: State, client: LocalClient, ctx: ClientContext) -> PyTree:
        return client.variables

    return Algorithm(
        init=continuing(init),
        send=send,
        train=train,
        receive=receive,
        personalize=personalize,
        predict=model.apply,
    )


LOCAL = Method(local, title="Local", paper="")
