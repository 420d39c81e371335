"""Functions of one client, applied to the clients of a finished run one after another."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, PyTree
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.groups import group_algorithms, wrap_clients
from fedjax_pfl.data import client_data
from fedjax_pfl.runs.result import Result
from fedjax_pfl.simulation.offloaded_rows import OffloadedRows
from fedjax_pfl.simulation.stores import ClientStore


def client_ids(result: Result, clients: Sequence[int] | None) -> list[int]:
    """Returns the client ids in `clients` in order, or all if None.

    Raises UsageError for one that does not exist.
    """
    n = result.federation.clients
    ids = sorted({int(i) for i in (range(n) if clients is None else clients)})
    if invalid := [i for i in ids if not 0 <= i < n]:
        raise UsageError(f"there is no client {invalid[0]}; there are {n}, from 0 to {n - 1}")
    return ids


def map_clients(
    function: Callable[[Algorithm, Any, PyTree, ClientContext], PyTree],
    result: Result,
    state: Any,
    t: int,
    ids: Sequence[int],
) -> Iterator[tuple[int, PyTree]]:
    """Yields each client id and the result of a function for this client, in NumPy arrays.

    Args:
      function: (algorithm of the client's group, state without clients, client-side state of the
        client, context whose key is that of the run) -> tree of arrays. It is compiled.
      result: Result of a run; the algorithm of the phase where it ended is used.
      state: State after `t` rounds, of this phase.
      t: Number of rounds.
      ids: Client ids.
    """
    algorithm = result.phases[result.phase].algorithm
    # Copies everything to one device once, for all clients.
    store = state.clients if isinstance(state.clients, ClientStore) else None
    full_state = state._replace(clients=()) if store else wrap_clients(algorithm, state)
    state, data = jax.device_put(jax.device_get((full_state, result.data)))
    shared = state._replace(clients=())
    offloaded = OffloadedRows(store) if store else None

    def program(member: Algorithm) -> Any:
        def call(state: Any, data: Any, client: PyTree, i: Any, t: Any, key: Any) -> PyTree:
            state = state._replace(rows=offloaded.join(state.rows)) if offloaded else state
            ctx = ClientContext(i=i, data=client_data(data, i), t=t, key=key)
            return function(member, state, client, ctx)

        return jax.jit(call)

    programs = [program(member) for member in group_algorithms(algorithm)]
    key = jax.random.key(result.config["seed"])
    for i in ids:
        g = int(result.federation.groups[i])
        if store:
            client = trees.row(store.read(g, np.array([i])), 0)
        else:
            client = trees.row(state.clients[g], i)
        yield i, jax.device_get(programs[g](shared, data, client, i, t, key))
