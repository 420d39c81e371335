"""Initial parts of a method's state: model variables, optimiser state, rows of the clients."""

from collections.abc import Callable
from typing import Any

import jax

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Federation, PyTree, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.local_training import Training


def model_shapes(model: Any, federation: Federation) -> PyTree:
    """Returns a tree like a model's variables, of `jax.ShapeDtypeStruct`."""
    return jax.eval_shape(lambda: _new_variables(model, federation, jax.random.key(0)))


def _new_variables(model: Any, federation: Federation, key: jax.Array) -> PyTree:
    return dict(model.init(key, federation.examples()))


def initial_variables(
    model: Any, federation: Federation, key: jax.Array, start: State | None
) -> PyTree:
    """Returns new variables of a model, or those of the global model of an earlier phase.

    A phase is a part of a run with one algorithm. Raises UsageError if the shapes differ.

    Args:
      model: A Flax network.
      federation: Tells the shape of an example.
      key: Random key of the initialisation.
      start: Final state of the earlier phase, whose server state must have the model's
        collections, such as `params`; None: a new model.
    """
    if start is None:
        return _new_variables(model, federation, key)
    expected = model_shapes(model, federation)
    server = start.server if isinstance(start.server, dict) else {}
    variables = {name: server.get(name) for name in expected}
    if not trees.same_shapes(expected, variables):
        raise UsageError(
            "a phase can only start from one that ends with a global model of the same network; "
            "give the phases the same model, and put a method such as fedavg first"
        )
    return variables


def initial_momentum(training: Training, params: PyTree, federation: Federation) -> PyTree:
    """Returns the initial optimiser state, stacked over clients, for the parameters of one client.

    Returns () if clients do not keep it.
    """
    if not training.keep_optimizer:
        return ()
    return trees.repeat(training.optimizer.init(params), federation.clients)


def continuing(init: Callable[..., State]) -> Callable[..., State]:
    """Returns `init` that also accepts the final state of an earlier phase of the same method.

    A state with the same arrays as a new one is continued; only the optimiser starts anew. The
    client-side state must have a field `momentum`. Other states are passed to `init`.
    """

    def without_momentum(state: State) -> State:
        return state._replace(clients=state.clients._replace(momentum=()))

    def continue_or_init(key: jax.Array, start: State | None = None) -> State:
        if start is None or not hasattr(start.clients, "momentum"):
            return init(key, start)
        shapes = jax.eval_shape(lambda: init(key))
        if not trees.same_shapes(without_momentum(shapes), without_momentum(start)):
            return init(key, start)
        momentum = init(key).clients.momentum
        return start._replace(clients=start.clients._replace(momentum=momentum))

    return continue_or_init


def initial_client_rows(
    initial: PyTree, start: State | None, client_type: type, field: str, federation: Federation
) -> PyTree:
    """Returns the start value of one field of the client-side state, leaves [N, ...].

    Args:
      initial: Value for every client, unless `start` has the field with the same shapes.
      start: Final state of the earlier phase (part of the run with one algorithm), or None.
      client_type: The method's type of `State.clients`; states of other types are ignored.
      field: Name of the field in that type.
      federation: Tells the number of clients.
    """
    stacked = trees.repeat(initial, federation.clients)
    if start is None or not isinstance(start.clients, client_type):
        return stacked
    existing = getattr(start.clients, field)
    return existing if trees.same_shapes(stacked, existing) else stacked
