"""A model in two parts: personal variables, and shared ones that FedAvg averages."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.initial_state import (
    initial_momentum,
    initial_variables,
    model_shapes,
)
from fedjax_pfl.algorithms.shared.model_training import model_trainer
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


class SplitClient(NamedTuple):
    """State that one client keeps between rounds. `State.clients` stacks it over clients."""

    personal: PyTree  # variables that are not shared, such as those of the head
    momentum: PyTree  # optimiser state, or () if clients do not keep it


def in_layers(names: Collection[str]) -> Callable[[str, str], bool]:
    """Returns a function (layer name, leaf name) -> bool, True if the layer is one of `names`."""

    def is_inside(layer: str, leaf: str) -> bool:
        return layer in names

    return is_inside


def require_body(method: str, model: Any, federation: Federation) -> None:
    """Raises UsageError if the network has no layer before its head; `method` names the method."""
    body = trees.split(model_shapes(model, federation), {model.head})[1]
    require(
        body,
        f"{method} shares the layers before the last, and this network has only {model.head}; use "
        "a network with a hidden layer",
    )


def last_layers(
    model: Any, federation: Federation, setting: str, count: int, *, early: int
) -> tuple[str, ...]:
    """Returns the names of the last `count` layers, from input to output.

    A BatchNorm is not counted; it belongs to the layer before it and is among the names. Raises
    UsageError if the network has too few layers.

    Args:
      model: A network with `layers`, the names from input to output.
      federation: Tells the shape of an example.
      setting: Name of the setting that gives `count`, for the message.
      count: Number of layers.
      early: Least number of layers that must come before them.
    """
    norms = norm_layers(model_shapes(model, federation))
    counted = [layer for layer in model.layers if layer not in norms]
    most = max(len(counted) - early, 1)
    require(
        1 <= count <= most,
        f"{setting} is {count}, and the network has {len(counted)} layers besides BatchNorm; "
        f"choose 1 to {most}",
    )
    return tuple(model.layers[model.layers.index(counted[-count]) :])


def partly_shared(
    model: Any,
    training: Training,
    federation: Federation,
    is_personal: Callable[[str, str], bool],
) -> Algorithm:
    """Returns FedAvg of the shared variables; each client trains them together with its own.

    The server stores the shared variables, the only ones that are sent. Clients store
    `SplitClient`. A phase, a part of a run with one algorithm, starts from a global model, whose
    personal variables every client gets, or from a state that is split in the same way. Momentum
    starts at zero in each phase. Raises UsageError unless some layers are shared and some are not.

    Args:
      model: A Flax network.
      training: Local training.
      federation: The clients.
      is_personal: Maps the names of a layer and a leaf to True if the variable is personal.
    """
    personal_shapes, shared_shapes = trees.divide(model_shapes(model, federation), is_personal)
    if not personal_shapes or not shared_shapes:
        layers = ", ".join(trees.layers({**personal_shapes, **shared_shapes}))
        raise UsageError(
            "a part of the network has to stay with the clients and a part to be shared; "
            f"this one has only {layers}"
        )
    n = federation.clients
    row_shapes = jax.eval_shape(lambda tree: trees.repeat(tree, n), personal_shapes)

    def init(key: jax.Array, start: State | None = None) -> State:
        if (
            start is not None
            and isinstance(start.clients, SplitClient)
            and trees.same_shapes(
                (shared_shapes, row_shapes), (start.server, start.clients.personal)
            )
        ):
            shared, rows = start.server, start.clients.personal
        else:
            variables = initial_variables(model, federation, key, start)
            personal, shared = trees.divide(variables, is_personal)
            rows = trees.repeat(personal, n)
        params = trees.join(shared, trees.row(rows, 0))["params"]
        return State(shared, (), SplitClient(rows, initial_momentum(training, params, federation)))

    train_model = model_trainer(model, federation.task, training)

    def train(payload: PyTree, client: SplitClient, ctx: ClientContext) -> ClientResult:
        joined = trees.join(payload, client.personal)
        variables, momentum, metrics = train_model(joined, client.momentum, ctx)
        personal, shared = trees.divide(variables, is_personal)
        return ClientResult(
            upload=shared,
            variables=variables,
            client=SplitClient(personal, momentum),
            metrics=metrics,
        )

    def personalize(state: State, client: SplitClient, ctx: ClientContext) -> PyTree:
        return trees.join(state.server, client.personal)

    base = fedavg(model, training, federation)
    return base._replace(init=init, train=train, personalize=personalize)
