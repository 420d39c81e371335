"""Local: every client trains its own model and nothing travels."""

from typing import Any, NamedTuple

import jax

from fedjax_pfl.algorithms.shared import common
from fedjax_pfl.algorithms.shared.method import Method
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


class Client(NamedTuple):
    """What stays with a client."""

    variables: PyTree
    momentum: PyTree


def local(model: Any, training: Training, federation: Federation) -> Algorithm:
    """Independent training from one common first model. Clients: variables, momentum if kept."""
    sgd = common.trainer(model, federation.task, training)

    def init(key: jax.Array, start: State | None = None) -> State:
        variables = common.initial(model, federation, key, start)
        momentum = common.kept(training, variables["params"], federation)
        return State((), (), Client(trees.repeat(variables, federation.clients), momentum))

    def send(state: State, ctx: ClientContext) -> PyTree:
        return ()

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        variables, momentum, metrics = sgd(client.variables, client.momentum, ctx)
        return ClientResult((), variables, Client(variables, momentum), metrics)

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        return state.server, state.rows

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        return client.variables

    return Algorithm(init, send, train, receive, personalize, model.apply)


LOCAL = Method(local, title="Local", paper="")
