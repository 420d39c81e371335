"""A state whose rows and clients are spread over a mesh: of N clients each device has N / devices.

What one client reads is gathered from where it is, what a method makes of all rows is summed where
they are: XLA's partitioner sees to both, so that a method's author writes nothing for it.
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

_AT_ONCE = 1 << 26  # bytes that one device is sent at a time, where all clients' are fetched


@jax.tree_util.register_pytree_node_class
class Spread:
    """A state's rows or clients with their axis padded, as devices can only hold equally many."""

    def __init__(self, padded: PyTree, clients: int) -> None:
        self.padded, self.clients = padded, clients

    def tree_flatten(self) -> tuple[tuple[PyTree], int]:
        """As JAX asks for it."""
        return (self.padded,), self.clients

    @classmethod
    def tree_unflatten(cls, clients: int, children: tuple[PyTree]) -> "Spread":
        """The inverse."""
        return cls(*children, clients)

    def cut(self) -> PyTree:
        """Without the padding."""
        return jax.tree.map(lambda leaf: leaf[: self.clients], self.padded)

    def gathered(self) -> PyTree:
        """NumPy arrays of all clients, in every process; all have to call this."""

        return jax.tree.map(lambda leaf: _fetched(leaf)[: self.clients], self.padded)


def _fetched(leaf: jax.Array) -> np.ndarray:
    """All of an array; where other processes have parts of it, block by block over the devices."""
    if leaf.is_fully_addressable:
        return np.asarray(leaf)
    sharding: Any = leaf.sharding
    step = max(1, _AT_ONCE * len(leaf) // max(1, leaf.nbytes))

    @partial(jax.jit, out_shardings=NamedSharding(sharding.mesh, P()))
    def block(leaf: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(leaf, start, min(step, len(leaf)))

    whole = np.empty(leaf.shape, leaf.dtype)
    for at in range(0, len(leaf), step):
        start = min(at, max(0, len(leaf) - step))  # the last begins earlier, and is as long
        part = block(leaf, np.int32(start))
        whole[start : start + len(part)] = np.asarray(part)
    return whole


def cut(state: State) -> State:
    """A state as a method knows it."""
    return State(*(part.cut() if isinstance(part, Spread) else part for part in state))


def gathered(state: State) -> State:
    """A state with nothing spread; of another one, the same."""
    return State(*(part.gathered() if isinstance(part, Spread) else part for part in state))


def pinned(spec: RoundSpec, state: State) -> State:
    """A state as a method knows it, held to where it is; what is not spread stays as it is."""
    if not spec.spread:
        return state
    server, each = _shardings(spec.mesh)
    return State(*map(jax.lax.with_sharding_constraint, state, (server, each, each)))


def _shardings(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """Of what all devices have, and of what they share out by client."""
    return NamedSharding(mesh, P()), NamedSharding(mesh, P(mesh.axis_names[0]))


def compiled(plain: RoundFunctions) -> CompiledRounds:
    """Rounds whose states are spread over the mesh that they are made for."""
    n, mesh = plain.spec.federation.clients, plain.spec.mesh
    everywhere, each = _shardings(mesh)
    more, states = -n % mesh.size, State(everywhere, each, each)

    def pad(leaf: Any, numpy: Any = jnp) -> Any:
        return numpy.pad(leaf, ((0, more), *((0, 0),) * (leaf.ndim - 1))) if more else leaf

    def padded(state: State) -> State:
        parts = (Spread(jax.tree.map(pad, part), n) for part in state[1:])
        return State(state.server, *parts)

    def init(key: jax.Array, start: State | None = None) -> State:
        begun = plain.init(key, None if start is None else cut(start))
        return padded(pinned(plain.spec, begun))

    def run(key: jax.Array, state: State, data: Any, t: Any, rounds: Any) -> tuple[State, Any]:
        state, logs = plain.run(key, cut(state), data, t, rounds)
        return padded(state), logs

    def evaluate(key: jax.Array, state: State, data: Any, t: Any) -> Evaluation:
        return plain.evaluate(key, pinned(plain.spec, cut(state)), data, t)

    def place(tree: PyTree) -> PyTree:
        return multiprocess.put(tree, everywhere)

    def enter(state: State) -> State:
        def part(tree: PyTree) -> Spread:
            if isinstance(tree, Spread):
                return tree
            one_by_one = (multiprocess.put(pad(np.asarray(x), np), each) for x in leaves(tree))
            return Spread(jax.tree.unflatten(jax.tree.structure(tree), one_by_one), n)

        leaves = jax.tree.leaves
        return State(place(state.server), part(state.rows), part(state.clients))

    return CompiledRounds(
        jax.jit(init, out_shardings=states),
        jax.jit(run, donate_argnums=1, out_shardings=(states, everywhere)),
        jax.jit(evaluate, out_shardings=everywhere),
        place,
        enter,
        everywhere,
    )
