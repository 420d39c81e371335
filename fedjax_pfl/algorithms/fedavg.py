"""FedAvg: one global model, the mean of what the clients trained, weighted by their examples.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.
"""

from typing import Any

import jax

from fedjax_pfl.algorithms import common
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, Federation, PyTree, State
from fedjax_pfl.core.examples import ClientData
from fedjax_pfl.core.task import Task


def fedavg(
    model: Any, task: Task, training: local_training.Training, federation: Federation
) -> Algorithm:
    """w ← Σ_k n_k w_k / Σ_k n_k over the clients that answered.

    Server: the variables, BatchNorm statistics included. Clients: momentum, where it is kept.
    """

    def init(key: jax.Array, start: State | None = None) -> State:
        variables = common.initial(model, federation, key, start)
        return State(variables, (), common.kept(training, variables["params"], federation))

    def send(server: PyTree, rows: PyTree, i: Any, t: Any, key: jax.Array) -> PyTree:
        return server

    def train(payload: PyTree, client: PyTree, data: ClientData, t: Any, key: jax.Array) -> Any:
        variables, client, metrics = common.train_all(
            model, task, training, payload, client, data, t, key
        )
        return variables, variables, client, metrics

    def receive(
        server: PyTree,
        rows: PyTree,
        ids: jax.Array,
        arrived: jax.Array,
        payloads: PyTree,
        uploads: PyTree,
        t: Any,
    ) -> tuple[PyTree, PyTree]:
        weights = common.examples(federation, ids)
        return trees.weighted_mean(uploads, weights), rows

    def personal(
        server: PyTree, rows: PyTree, client: PyTree, i: Any, data: ClientData, t: Any, key: Any
    ) -> PyTree:
        return server

    return Algorithm(init, send, train, receive, personal, model.apply)
