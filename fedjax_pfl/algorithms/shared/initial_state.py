"""Initial parts of a method's state: model variables, optimiser state, rows of the clients."""

from typing import Any

import jax

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Federation, PyTree, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.local_training import Training


def model_shapes(model: Any, federation: Federation) -> PyTree:
    """Returns the shapes and dtypes of a model's variables."""
    return jax.eval_shape(lambda: _new_variables(model, federation, jax.random.key(0)))


def _new_variables(model: Any, federation: Federation, key: jax.Array) -> PyTree:
    return dict(model.init(key, federation.examples()))


def initial_variables(
    model: Any, federation: Federation, key: jax.Array, start: State | None
) -> PyTree:
    """Initialises a model, or returns the global model of an earlier phase.

    Args:
      model: A Flax network.
      federation: Tells the shape of an example.
      key: Random key of the initialisation.
      start: Final state of an earlier phase, whose server state must have a model's collections.
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
    """Returns the initial optimiser state of all clients, stacked, or () if they do not keep it."""
    if not training.keep_optimizer:
        return ()
    return trees.repeat(training.optimizer.init(params), federation.clients)


def initial_client_rows(
    initial: PyTree, start: State | None, client_type: type, field: str, federation: Federation
) -> PyTree:
    """Returns one field of the client-side state, stacked over clients.

    Args:
      initial: Value for each client, unless an earlier phase of the method left another one.
      start: Final state of an earlier phase.
      client_type: The method's type of `State.clients`.
      field: Name of the field in that type.
      federation: Tells the number of clients.
    """
    stacked = trees.repeat(initial, federation.clients)
    if start is None or not isinstance(start.clients, client_type):
        return stacked
    existing = getattr(start.clients, field)
    return existing if trees.same_shapes(stacked, existing) else stacked
