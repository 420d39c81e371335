"""Initial state of a run, without a copy of the initial arrays for every client.

`init` returns client-side leaves [N, ...], most of which repeat one row. This module evaluates its
jaxpr: it computes repeated rows once, and recognises leaves that an earlier phase passes on. Only
leaves that differ between clients are computed for all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

PyTree = Any
_CALLS = ("jit", "pjit", "closed_call", "core_call")  # operations that are evaluated inside


class Repeated(NamedTuple):
    """A value [N, ...] with one row for all clients, before the broadcast."""

    operand: Any
    shape: tuple[int, ...]
    dimensions: tuple[int, ...]  # dimensions of `shape` that the operand has

    def row(self) -> jax.Array:
        """Returns the row of one client."""
        row_dimensions = tuple(d - 1 for d in self.dimensions)
        return jax.lax.broadcast_in_dim(self.operand, self.shape[1:], row_dimensions)

    def all_rows(self) -> jax.Array:
        """Returns the rows of all clients."""
        return jax.lax.broadcast_in_dim(self.operand, self.shape, self.dimensions)


class InitialLeaf(NamedTuple):
    """A client-side leaf [N, ...] of the initial state. Exactly one field is not None."""

    row: np.ndarray | None  # the row of every client
    argument: int | None  # number of the leaf of the arguments that it is equal to
    all_rows: np.ndarray | None  # [N, ...]


def initial_state(
    init: Callable[..., Any],
    split: Callable[[Any], tuple[PyTree, PyTree]],
    arguments: PyTree,
    fetch: Callable[[int], Any],
) -> tuple[PyTree, list[InitialLeaf]]:
    """Computes init(*arguments).

    Args:
      init: The function.
      split: Splits its result into a part to compute in full, and one with leaves [N, ...].
      arguments: Shapes of the arguments.
      fetch: Returns leaf `k` of the arguments; called for leaves that the result depends on.

    Returns:
      The first part of the split, and each leaf of the second part.
    """
    shapes, structure = jax.tree.flatten(arguments)
    states: list[Any] = []

    def flat_init(*leaves: Any) -> list[Any]:
        rest, clients = split(init(*jax.tree.unflatten(structure, leaves)))
        states.append(jax.tree.structure(rest))
        return [*jax.tree.leaves(rest), *jax.tree.leaves(clients)]

    closed = jax.make_jaxpr(flat_init)(*shapes)
    rest_count = states[-1].num_leaves
    kinds: list[int | str] = []  # of each client-side leaf: argument number, "row" or "all_rows"

    def lean_init(*leaves: Any) -> list[Any]:
        values = _evaluate(closed.jaxpr, closed.consts, leaves)
        kinds.clear()
        results = [_expand(value) for value in values[:rest_count]]
        for value in values[rest_count:]:
            matches = [k for k, leaf in enumerate(leaves) if leaf is value]
            if matches:
                kinds.append(matches[0])
            elif isinstance(value, Repeated):
                kinds.append("row")
                results.append(value.row())
            else:
                kinds.append("all_rows")
                results.append(value)
        return results

    program = jax.make_jaxpr(lean_init)(*shapes)
    pruned, is_used = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    inputs = [fetch(k) for k, used in enumerate(is_used) if used]
    results = jax.jit(core.jaxpr_as_fun(core.ClosedJaxpr(pruned, program.consts)))(*inputs)
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


def _evaluate(jaxpr: Any, consts: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """Returns the results of a jaxpr; values stay `Repeated` until an operation reads them."""
    values: dict[Any, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *leaves), strict=True)
    )

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == "broadcast_in_dim" and len(eqn.invars) == 1 and 0 not in _axes(eqn):
            results = [Repeated(_expand(read(eqn.invars[0])), params["shape"], _axes(eqn))]
        elif name in _CALLS and "jaxpr" in params:
            inner = params["jaxpr"]
            results = _evaluate(inner.jaxpr, inner.consts, list(map(read, eqn.invars)))
        else:
            inputs = dict.fromkeys(v for v in eqn.invars if not isinstance(v, core.Literal))
            results = _operation(jaxpr, eqn, {v: _expand(values[v]) for v in inputs})
        values |= zip(eqn.outvars, results, strict=True)
    return list(map(read, jaxpr.outvars))


def _operation(jaxpr: Any, eqn: Any, inputs: Mapping[Any, Any]) -> list[Any]:
    """Returns the results of one operation; None for results that are unused."""
    used = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
    program = jaxpr.replace(constvars=[], invars=list(inputs), outvars=used, eqns=[eqn])
    results = iter(core.jaxpr_as_fun(core.ClosedJaxpr(program, []))(*inputs.values()))
    return [None if isinstance(v, core.DropVar) else next(results) for v in eqn.outvars]


def _axes(eqn: Any) -> tuple[int, ...]:
    """Returns the axes of a broadcast that its operand has; (0,) if the result is a scalar."""
    return tuple(eqn.params["broadcast_dimensions"]) if eqn.params["shape"] else (0,)
