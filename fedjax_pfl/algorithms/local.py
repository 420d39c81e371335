"""Local: every client trains its own model and nothing travels."""

from typing import Any, NamedTuple

import jax

from fedjax_pfl.algorithms import common
from fedjax_pfl.core import local_training as local_work
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Algorithm, Federation, PyTree, State
from fedjax_pfl.core.examples import ClientData
from fedjax_pfl.core.task import Task


class Client(NamedTuple):
    """What stays with a client."""

    variables: PyTree
    momentum: PyTree


def local(
    model: Any, task: Task, training: local_work.Training, federation: Federation
) -> Algorithm:
    """Independent training from one common first model. Clients: variables, momentum if kept."""

    def init(key: jax.Array, start: State | None = None) -> State:
        variables = common.initial(model, federation, key, start)
        momentum = common.kept(training, variables["params"], federation)
        return State((), (), Client(trees.repeat(variables, federation.clients), momentum))

    def send(server: PyTree, rows: PyTree, i: Any, t: Any, key: jax.Array) -> PyTree:
        return ()

    def train(payload: PyTree, client: Client, data: ClientData, t: Any, key: jax.Array) -> Any:
        variables, momentum, metrics = common.train_all(
            model, task, training, client.variables, client.momentum, data, t, key
        )
        return (), variables, Client(variables, momentum), metrics

    def receive(
        server: PyTree,
        rows: PyTree,
        ids: jax.Array,
        arrived: jax.Array,
        payloads: PyTree,
        uploads: PyTree,
        t: Any,
    ) -> tuple[PyTree, PyTree]:
        return server, rows

    def personal(
        server: PyTree, rows: PyTree, client: Client, i: Any, data: ClientData, t: Any, key: Any
    ) -> PyTree:
        return client.variables

    return Algorithm(init, send, train, receive, personal, model.apply)
