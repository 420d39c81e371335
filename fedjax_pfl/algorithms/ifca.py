"""IFCA: the server has k models, and each client trains the one with the lowest loss on its data.

Ghosh et al., An Efficient Framework for Clustered Federated Learning, 2020. θ_1, ..., θ_k are the
models of the server, f_i is the mean loss on the n_i training examples of client i:

  j_i ← argmin_j f_i(θ_j);   w_i ← SGD on f_i, from θ_{j_i}
  θ_j ← Σ_i n_i w_i / Σ_i n_i over the clients with j_i = j; unchanged if there are none

This is the paper's model averaging. With weight sharing, only the last layers differ between the
k models, and the other layers are averaged over all clients.

Deviations: the mean is weighted by examples, in the paper it is unweighted; the authors' code for
FEMNIST weights it. Of equally good models a client takes the one of its last round, or the next one
after it. There is one random start; on CIFAR the authors repeat it until every model is chosen by
enough clients, on FEMNIST they train a global model first. Clients choose the model that they are
served by training loss; the authors' code for MNIST and CIFAR uses the loss on test examples.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.initial_state import initial_variables
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import model_trainer
from fedjax_pfl.algorithms.shared.split_model import last_layers
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
from fedjax_pfl.core.diagnostics import Diagnostic, Picture, mean, of_array
from fedjax_pfl.core.errors import UsageError, require_at_least
from fedjax_pfl.core.examples import ClientData
from fedjax_pfl.networks.pretrained import require_random_start
from fedjax_pfl.networks.zero_head import require_random_copies


class Server(NamedTuple):
    """Server-side state: the layers of all k models."""

    clusters: PyTree  # variables of the layers of each cluster, leaves [k, ...]
    shared: PyTree  # variables of the layers that all clusters share; {} if there are none


DIAGNOSTICS = {
    "clusters": Diagnostic(
        meaning="clusters that clients chose in their last round",
        value=of_array("cluster", lambda cluster: len(np.unique(cluster[cluster >= 0]))),
        inactive=lambda value, observed: mean(value) == 1.0,
        warning="all clients chose {value:.0f} cluster, which is FedAvg; try another seed, or see "
        "ifca.cluster_layers",
    ),
}
PICTURES = {
    "cluster": Picture("Clusters", "the cluster that each client chose last; -1: none so far")
}


def _without(tree: PyTree, names: Iterable[str]) -> PyTree:
    return {name: part for name, part in tree.items() if name not in names}


def ifca(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    clusters: int = 3,
    cluster_layers: int | None = None,
) -> Algorithm:
    """Creates IFCA: each client trains the cluster's model with the lowest loss on its examples.

    The server stores `Server`, with different initial models; the rows are the cluster that each
    client chose last, int32 [N], at first -1. Clients store the same as FedAvg. A client downloads
    all models, its last one (at first 0) first and the others as `others`. It uploads the first one
    plus what training changed in the chosen one, whose number of positions from the first it sends
    as `chosen`. A later phase, a part of a run with one algorithm, starts only from a state of
    IFCA: copies of one model would stay equal.

    Args:
      clusters: k, the number of models; 1 is FedAvg.
      cluster_layers: Number of the last layers that differ between clusters; the others are shared.
        A BatchNorm is not counted; it belongs to the layer before it. Unset: all layers.
    """
    require_at_least("ifca.clusters", clusters, 1)
    names: tuple[str, ...] | None = None
    if cluster_layers is not None:
        names = last_layers(model, federation, "ifca.cluster_layers", cluster_layers, early=0)
    require_random_start("ifca", model)  # copies of one model would stay copies
    require_random_copies("ifca", model, model.layers if names is None else names)
    base = fedavg(model, training, federation)
    train_model = model_trainer(model, federation.task, training)

    def parts(variables: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the variables of a cluster's own layers and of the shared layers."""
        return (variables, {}) if names is None else trees.split(variables, names)

    def init(key: jax.Array, start: State | None = None) -> State:
        initialise = partial(initial_variables, model, federation, start=None)
        models = jax.vmap(initialise)(jax.random.split(key, clusters))
        own_layers, shared_layers = parts(models)
        server = Server(own_layers, trees.row(shared_layers, 0))
        rows = jnp.full(federation.clients, -1, jnp.int32)
        if start is not None:
            if not trees.same_shapes((server, rows), (start.server, start.rows)):
                raise UsageError(
                    "a phase of ifca can only start from ifca with the same network and clusters; "
                    "copies of one model would stay copies"
                )
            server, rows = start.server, start.rows
        return State(server, rows, base.init(key, None).clients)

    def send(state: State, ctx: ClientContext) -> PyTree:
        order = (jnp.maximum(state.rows[ctx.i], 0) + jnp.arange(clusters)) % clusters
        models = jax.tree.map(lambda leaf: leaf[order], state.server.clusters)
        others = jax.tree.map(lambda leaf: leaf[1:], models)
        return {**trees.join(state.server.shared, trees.row(models, 0)), "others": others}

    def choose(payload: PyTree, data: ClientData) -> tuple[PyTree, jax.Array]:
        """Returns the downloaded model with the lowest training loss, and its position."""
        first, shared = parts(_without(payload, ("others",)))
        models = jax.tree.map(
            lambda leaf, others: jnp.concatenate([leaf[None], others]), first, payload["others"]
        )

        def loss(own_layers: PyTree) -> jax.Array:
            variables = trees.join(shared, own_layers)
            scores = local_training.evaluate(
                model.apply, variables, data, data.train, federation.task
            )
            return jnp.where(jnp.isnan(scores.loss), jnp.inf, scores.loss)

        chosen = jnp.argmin(jax.lax.map(loss, models)).astype(jnp.int32)
        return trees.join(shared, trees.row(models, chosen)), chosen

    def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
        start, chosen = choose(payload, ctx.data)
        variables, momentum, metrics = train_model(start, client, ctx)
        # Compression, norms and attacks compare an upload with the first model of the payload.
        changed = trees.add_change(_without(payload, ("others",)), start, variables)
        return ClientResult(
            upload={**changed, "chosen": chosen},
            variables=variables,
            client=momentum,
            metrics=metrics,
        )

    def receive(state: State, cohort: Cohort) -> tuple[Server, jax.Array]:
        last = jnp.maximum(state.rows.at[cohort.ids].get(mode="fill", fill_value=0), 0)
        cluster = (last + cohort.present(cohort.uploads["chosen"])) % clusters
        changed, shared_layers = parts(_without(cohort.uploads, ("chosen",)))

        def models_at(places: jax.Array) -> PyTree:
            # Not from the payloads, which would keep all models of all clients in memory.
            return jax.tree.map(lambda leaf: leaf[places], state.server.clusters)

        own_layers = trees.add_change(models_at(cluster), models_at(last), changed)

        def average(arguments: tuple[jax.Array, PyTree]) -> PyTree:
            j, old = arguments
            return cohort.mean(own_layers, old, jnp.where(cluster == j, cohort.weights, 0.0))

        models = jax.lax.map(average, (jnp.arange(clusters), state.server.clusters))
        server = Server(models, cohort.mean(shared_layers, state.server.shared))
        return server, cohort.put(state.rows, cluster)

    def personalize(state: State, client: PyTree, ctx: ClientContext) -> PyTree:
        return choose(send(state, ctx), ctx.data)[0]

    def observe(state: State) -> dict[str, jax.Array]:
        return {"cluster": state.rows}

    return Algorithm(
        init=init,
        send=send,
        train=train,
        receive=receive,
        personalize=personalize,
        predict=model.apply,
        observe=observe,
    )


IFCA = Method(
    ifca, title="IFCA", paper="Ghosh et al. 2020", diagnostics=DIAGNOSTICS, pictures=PICTURES
)
