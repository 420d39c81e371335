"""Initial state of a run, without a copy of the initial arrays for every client.

`init` returns client-side leaves [N, ...], most of which repeat one row. This module evaluates its
jaxpr: it computes repeated rows once, and recognises leaves that an earlier phase passes on. Only
leaves that differ between clients are computed for all of them.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.core import jaxprs

PyTree = Any


class Repeated(NamedTuple):
    """An array [N, ...] whose N rows are equal, stored as the operand of its broadcast."""

    operand: Any  # array before the broadcast
    shape: tuple[int, ...]  # shape after the broadcast, (N, ...)
    dimensions: tuple[int, ...]  # for each axis of `operand`, its axis in `shape`

    def row(self) -> jax.Array:
        """Returns the row of one client."""
        row_dimensions = tuple(d - 1 for d in self.dimensions)
        return jax.lax.broadcast_in_dim(self.operand, self.shape[1:], row_dimensions)

    def all_rows(self) -> jax.Array:
        """Returns the rows of all clients."""
        return jax.lax.broadcast_in_dim(self.operand, self.shape, self.dimensions)


class InitialLeaf(NamedTuple):
    """A client-side leaf [N, ...] of the initial state. One field is set, the others are None."""

    row: np.ndarray | None  # the row, if it is the same for all clients
    argument: int | None  # index of an equal leaf of the arguments of `init`
    all_rows: np.ndarray | None  # [N, ...]


def initial_state(
    init: Callable[..., Any],
    split: Callable[[Any], tuple[PyTree, PyTree]],
    arguments: PyTree,
    fetch: Callable[[int], Any],
    stored: Collection[int],
) -> tuple[PyTree, list[InitialLeaf]]:
    """Computes init(*arguments), with rows that are equal for all clients only once.

    Args:
      init: A method's `init`, which returns the state of all clients.
      split: Maps its result to two trees: one to compute in full, and one with leaves [N, ...].
      arguments: Tuple of the arguments, with shapes instead of arrays.
      fetch: Returns the array of leaf `k` of the arguments; called only for leaves that are needed.
      stored: Indices of the leaves of the arguments that `InitialLeaf.argument` may name.

    Returns:
      The first tree of the split, and a list of the leaves of the second tree.
    """
    shapes, structure = jax.tree.flatten(arguments)
    states: list[Any] = []

    def flat_init(*leaves: Any) -> list[Any]:
        """Maps the leaves of the arguments to the leaves of both trees."""
        rest, clients = split(init(*jax.tree.unflatten(structure, leaves)))
        states.append(jax.tree.structure(rest))
        return [*jax.tree.leaves(rest), *jax.tree.leaves(clients)]

    closed = jax.make_jaxpr(flat_init)(*shapes)
    rest_count = states[-1].num_leaves
    kinds: list[int | str] = []  # of each client-side leaf: argument number, "row" or "all_rows"

    def lean_init(*leaves: Any) -> list[Any]:
        """Like `flat_init`, with rows for repeated leaves and without leaves of the arguments."""
        values = jaxprs.interpret(closed.jaxpr, closed.consts, leaves, _operation)
        kinds.clear()
        results = [_expand(value) for value in values[:rest_count]]
        for value in values[rest_count:]:
            matches = [k for k in stored if leaves[k] is value]
            if matches:
                kinds.append(matches[0])
            elif isinstance(value, Repeated):
                kinds.append("row")
                results.append(value.row())
            else:
                kinds.append("all_rows")
                results.append(value)
        return results

    results = jaxprs.with_used_arguments(lean_init, shapes)(fetch)
    computed = iter(results[rest_count:])
    leaves = []
    for kind in kinds:
        if isinstance(kind, int):
            leaves.append(InitialLeaf(row=None, argument=kind, all_rows=None))
            continue
        value = np.asarray(next(computed))
        is_row = kind == "row"
        leaves.append(
            InitialLeaf(
                row=value if is_row else None, argument=None, all_rows=None if is_row else value
            )
        )
    return jax.tree.unflatten(states[-1], results[:rest_count]), leaves


def _expand(value: Any) -> Any:
    return value.all_rows() if isinstance(value, Repeated) else value


def _operation(equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Computes an equation of a jaxpr on arrays and `Repeated` values. Returns its results.

    A broadcast to all clients becomes `Repeated`, and stays so where possible.
    """
    arrays = [_expand(operand) for operand in operands]
    is_broadcast = equation.primitive.name == "broadcast_in_dim" and len(arrays) == 1
    if is_broadcast and 0 not in _axes(equation):
        return [Repeated(arrays[0], equation.params["shape"], _axes(equation))]
    return jaxprs.compute(equation, arrays)


def _axes(eqn: Any) -> tuple[int, ...]:
    """Returns the axes of a broadcast that its operand has; (0,) if the result is a scalar."""
    return tuple(eqn.params["broadcast_dimensions"]) if eqn.params["shape"] else (0,)
