"""The first state of a run without a copy for each client of what all of them begin with.

`init` gives [N, ...] of what stays with clients, most of it one row that is repeated. Here its
program is read: what it repeats is computed once, and what it passes on from an earlier phase is
named. Only what is drawn for each client is computed for all.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

PyTree = Any
_CALLS = ("jit", "pjit", "closed_call", "core_call")  # whose insides are looked into


class Repeated(NamedTuple):
    """A value that has one row for all clients, not yet repeated."""

    operand: Any
    shape: tuple[int, ...]
    dimensions: tuple[int, ...]  # of `shape`, those of the operand

    def row(self) -> jax.Array:
        within = tuple(d - 1 for d in self.dimensions)
        return jax.lax.broadcast_in_dim(self.operand, self.shape[1:], within)

    def whole(self) -> jax.Array:
        return jax.lax.broadcast_in_dim(self.operand, self.shape, self.dimensions)


class First(NamedTuple):
    """A leaf of [N, ...]: of its three ways one, the others None."""

    row: np.ndarray | None  # what all clients begin with
    same: int | None  # the leaf of the earlier phase that it is
    whole: np.ndarray | None


def first_state(
    init: Callable[..., Any],
    apart: Callable[[Any], tuple[PyTree, PyTree]],
    arguments: PyTree,
    fetch: Callable[[int], Any],
) -> tuple[PyTree, list[First]]:
    """(the rest of the state, each leaf of what is apart) of init(*arguments).

    Args:
      apart: of a state the rest, which is computed as it is, and what is [N, ...].
      arguments: shapes, of which leaf k is `fetch(k)` where it is needed.
    """
    shapes, tree = jax.tree.flatten(arguments)
    states: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        rest, own = apart(init(*jax.tree.unflatten(tree, leaves)))
        states.append(jax.tree.structure(rest))
        return [*jax.tree.leaves(rest), *jax.tree.leaves(own)]

    closed = jax.make_jaxpr(flat)(*shapes)
    number = states[-1].num_leaves
    ways: list[int | str] = []

    def lean(*leaves: Any) -> list[Any]:
        values = _evaluated(closed.jaxpr, closed.consts, leaves)
        ways.clear()
        found = [_made(value) for value in values[:number]]
        for value in values[number:]:
            passed = [k for k, leaf in enumerate(leaves) if leaf is value]
            ways.append(passed[0] if passed else "row" if isinstance(value, Repeated) else "whole")
            if not passed:
                found.append(value.row() if isinstance(value, Repeated) else value)
        return found

    program = jax.make_jaxpr(lean)(*shapes)
    used, needed = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    given = [fetch(k) for k, one in enumerate(needed) if one]
    ran = jax.jit(core.jaxpr_as_fun(core.ClosedJaxpr(used, program.consts)))(*given)
    rest, own = ran[:number], iter(ran[number:])
    firsts = []
    for way in ways:
        value = None if isinstance(way, int) else np.asarray(next(own))
        firsts.append(
            First(
                value if way == "row" else None,
                way if isinstance(way, int) else None,
                value if way == "whole" else None,
            )
        )
    return jax.tree.unflatten(states[-1], rest), firsts


def _made(value: Any) -> Any:
    return value.whole() if isinstance(value, Repeated) else value


def _evaluated(jaxpr: Any, consts: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """The program's results, with repeated rows as they are as long as nothing else reads them."""
    known: dict[Any, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *leaves), strict=True)
    )

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == "broadcast_in_dim" and len(eqn.invars) == 1 and 0 not in _axes(eqn):
            found = [Repeated(_made(read(eqn.invars[0])), params["shape"], _axes(eqn))]
        elif name in _CALLS and "jaxpr" in params:
            inner = params["jaxpr"]
            found = _evaluated(inner.jaxpr, inner.consts, list(map(read, eqn.invars)))
        else:
            inputs = dict.fromkeys(v for v in eqn.invars if not isinstance(v, core.Literal))
            found = _by_itself(jaxpr, eqn, {v: _made(known[v]) for v in inputs})
        known |= zip(eqn.outvars, found, strict=True)
    return list(map(read, jaxpr.outvars))


def _by_itself(jaxpr: Any, eqn: Any, inputs: Mapping[Any, Any]) -> list[Any]:
    """One operation's results, in their order; None where nobody reads one."""
    read = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
    one = jaxpr.replace(constvars=[], invars=list(inputs), outvars=read, eqns=[eqn])
    found = iter(core.jaxpr_as_fun(core.ClosedJaxpr(one, []))(*inputs.values()))
    return [None if isinstance(v, core.DropVar) else next(found) for v in eqn.outvars]


def _axes(eqn: Any) -> tuple[int, ...]:
    """Those of a broadcast that its operand has; all, where there are none that could be rows."""
    return tuple(eqn.params["broadcast_dimensions"]) if eqn.params["shape"] else (0,)
