"""State whose rows and client-side parts are spread over a mesh: N / devices clients per device.

XLA's partitioner gathers the rows that a client reads and sums over all rows where they are
stored, so methods need no code for it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_pfl.core.algorithm import PyTree, State
from fedjax_pfl.simulation import multiprocess
from fedjax_pfl.simulation.records import CompiledRounds, Evaluation, RoundFunctions, RoundSpec

_BLOCK = 1 << 26  # bytes sent to one device at a time if the rows of all clients are fetched


@jax.tree_util.register_pytree_node_class
class Spread:
    """Server-side rows or client-side state, padded so that all devices hold equally many rows.

    Attributes:
      padded: Tree with leaves [N + padding, ...].
      clients: N, the number of clients.
    """

    def __init__(self, padded: PyTree, clients: int) -> None:
        self.padded, self.clients = padded, clients

    def tree_flatten(self) -> tuple[tuple[PyTree], int]:
        """Implements JAX's pytree protocol."""
        return (self.padded,), self.clients

    @classmethod
    def tree_unflatten(cls, clients: int, children: tuple[PyTree]) -> "Spread":
        """Implements JAX's pytree protocol."""
        return cls(*children, clients)

    def cut(self) -> PyTree:
        """Returns the rows without padding."""
        return jax.tree.map(lambda leaf: leaf[: self.clients], self.padded)

    def gathered(self) -> PyTree:
        """Returns NumPy arrays of all clients in every process; all processes must call it."""
        return jax.tree.map(lambda leaf: _fetched(leaf)[: self.clients], self.padded)


def _fetched(leaf: Any) -> np.ndarray:
    """Returns a whole array in NumPy, fetched in blocks if other processes hold parts of it.

    A NumPy array is returned unchanged.
    """
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return np.asarray(leaf)
    sharding: Any = leaf.sharding
    step = max(1, _BLOCK * len(leaf) // max(1, leaf.nbytes))

    @partial(jax.jit, out_shardings=NamedSharding(sharding.mesh, P()))
    def block(leaf: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(leaf, start, min(step, len(leaf)))

    rows = np.empty(leaf.shape, leaf.dtype)
    for begin in range(0, len(leaf), step):
        start = min(begin, max(0, len(leaf) - step))  # the last block overlaps the one before
        part = block(leaf, np.int32(start))
        rows[start : start + len(part)] = np.asarray(part)
    return rows


def cut(state: State) -> State:
    """Returns a state in the form that methods take: `Spread` parts become arrays [N, ...]."""
    return State(*(part.cut() if isinstance(part, Spread) else part for part in state))


def gathered(state: State) -> State:
    """Returns a state whose `Spread` parts are NumPy arrays [N, ...]; other parts stay the same."""
    return State(*(part.gathered() if isinstance(part, Spread) else part for part in state))


def is_on_mesh(state: State, mesh: Mesh | None) -> bool:
    """Returns True if the rows and clients of a state are spread over the devices of this mesh."""
    if mesh is None:
        return False
    _, by_client = _shardings(mesh)
    return all(
        isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(by_client, leaf.ndim)
        for leaf in jax.tree.leaves((state.rows, state.clients))
    )


def pinned(spec: RoundSpec, state: State) -> State:
    """Constrains rows and clients of a state without `Spread` to be split over the mesh by client.

    Returns the state unchanged if the rounds of `spec` are not spread.
    """
    if not spec.is_spread:
        return state
    replicated, by_client = _shardings(spec.mesh)
    shardings = (replicated, by_client, by_client)
    return State(*map(jax.lax.with_sharding_constraint, state, shardings))


def _shardings(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """Returns the shardings of replicated values and of values that are split by client."""
    return NamedSharding(mesh, P()), NamedSharding(mesh, P(mesh.axis_names[0]))


def compile_rounds(functions: RoundFunctions) -> CompiledRounds:
    """Compiles rounds whose states have `Spread` rows and clients, over the mesh of their spec."""
    n, mesh = functions.spec.federation.clients, functions.spec.mesh
    everywhere, by_client = _shardings(mesh)
    padding, states = -n % mesh.size, State(everywhere, by_client, by_client)

    def pad(leaf: Any, numpy: Any = jnp) -> Any:
        return numpy.pad(leaf, ((0, padding), *((0, 0),) * (leaf.ndim - 1))) if padding else leaf

    def padded(state: State) -> State:
        parts = (Spread(jax.tree.map(pad, part), n) for part in state[1:])
        return State(state.server, *parts)

    def init(key: jax.Array, start: State | None = None) -> State:
        state = functions.init(key, None if start is None else cut(start))
        return padded(pinned(functions.spec, state))

    def run(key: jax.Array, state: State, data: Any, t: Any, rounds: Any) -> tuple[State, Any]:
        state, logs = functions.run(key, cut(state), data, t, rounds)
        return padded(state), logs

    def evaluate(key: jax.Array, state: State, data: Any, t: Any) -> Evaluation:
        return functions.evaluate(key, pinned(functions.spec, cut(state)), data, t)

    def place(tree: PyTree) -> PyTree:
        return multiprocess.replicate(tree, everywhere)

    def enter(state: State) -> State:
        def spread(tree: PyTree) -> Spread:
            if isinstance(tree, Spread):
                return tree
            leaves = (
                multiprocess.replicate(pad(np.asarray(leaf), np), by_client)
                for leaf in jax.tree.leaves(tree)
            )
            return Spread(jax.tree.unflatten(jax.tree.structure(tree), leaves), n)

        return State(place(state.server), spread(state.rows), spread(state.clients))

    return CompiledRounds(
        init=jax.jit(init, out_shardings=states),
        run=jax.jit(run, donate_argnums=1, out_shardings=(states, everywhere)),
        evaluate=jax.jit(evaluate, out_shardings=everywhere),
        place=place,
        enter=enter,
        everywhere=everywhere,
    )
