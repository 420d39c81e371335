"""A model in two parts: what stays with each client, and what FedAvg averages."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared import common
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import UsageError, require
from fedjax_pfl.core.local_training import Training
from fedjax_pfl.networks import norm_layers


class Client(NamedTuple):
    """What stays with a client."""

    own: PyTree  # the variables that are its own
    momentum: PyTree


def of_layers(names: Collection[str]) -> Callable[[str, str], bool]:
    """What belongs to these layers."""

    def is_own(layer: str, leaf: str) -> bool:
        return layer in names

    return is_own


def last_layers(
    model: Any, federation: Federation, setting: str, many: int, *, early: int
) -> tuple[str, ...]:
    """The last layers; a BatchNorm is not counted and goes with the layer before it.

    Args:
      setting: that says how many. early: how many layers there must be before them.
    """
    norms = norm_layers(common.shapes(model, federation))
    counted = [layer for layer in model.layers if layer not in norms]
    most = max(len(counted) - early, 1)
    require(
        1 <= many <= most,
        f"{setting} is {many}, and the network has {len(counted)} layers besides BatchNorm; "
        f"choose 1 to {most}",
    )
    return tuple(model.layers[model.layers.index(counted[-many]) :])


def partly_shared(
    model: Any,
    training: Training,
    federation: Federation,
    own: Callable[[str, str], bool],
) -> Algorithm:
    """FedAvg on all but what is `own`, by layer and leaf; every client trains all of it together.

    Server: the shared variables, which are all that travels. Clients: their own variables, and
    momentum of the whole model where it is kept. A phase starts from a global model,
    whose `own` part every client gets, or from a state with the same two parts; momentum begins
    anew in each phase.
    """
    first_own, first_shared = trees.divide(common.shapes(model, federation), own)
    if not first_own or not first_shared:
        layers = ", ".join(trees.layers({**first_own, **first_shared}))
        raise UsageError(
            "a part of the network has to stay with the clients and a part to be shared; "
            f"this one has only {layers}"
        )
    stacked_own = jax.eval_shape(lambda own: trees.repeat(own, federation.clients), first_own)

    def init(key: jax.Array, start: State | None = None) -> State:
        if (
            start is not None
            and isinstance(start.clients, Client)
            and trees.same_shapes((first_shared, stacked_own), (start.server, start.clients.own))
        ):
            shared, owned = start.server, start.clients.own
        else:
            mine, shared = trees.divide(common.initial(model, federation, key, start), own)
            owned = trees.repeat(mine, federation.clients)
        params = trees.join(shared, trees.row(owned, 0))["params"]
        return State(shared, (), Client(owned, common.kept(training, params, federation)))

    sgd = common.trainer(model, federation.task, training)

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        whole = trees.join(payload, client.own)
        variables, momentum, metrics = sgd(whole, client.momentum, ctx)
        mine, shared = trees.divide(variables, own)
        return ClientResult(shared, variables, Client(mine, momentum), metrics)

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        return trees.join(state.server, client.own)

    averaged = fedavg(model, training, federation)
    return averaged._replace(init=init, train=train, personalize=personalize)
