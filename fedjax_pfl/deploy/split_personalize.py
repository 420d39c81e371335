"""Splits a method's `personalize` into a server part and a client part.

`personalize` takes the server state, the client-side state and the client's examples. None of them
may leave its machine, so both machines evaluate the traced program in part. The server computes the
values that depend on its state only. The client computes all others. Values of the server part that
the client part reads are sent: the model for FedAvg, the mixed layers for pFedLA, the models of the
selected peers for FedFomo.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from fedjax_pfl.core import jaxprs, trees
from fedjax_pfl.core.algorithm import ClientContext, PyTree, State
from fedjax_pfl.core.errors import UsageError

Personal = Callable[[State, PyTree, ClientContext], PyTree]
_EITHER, _SERVER, _CLIENT = range(3)  # the machine that can compute a value


class _Value:
    """An intermediate value of the traced `personalize`.

    Attributes:
      owner: Machine that can compute it: _EITHER, _SERVER or _CLIENT.
      value: The array, or None on a machine that cannot compute it.
      size: Size in bytes.
      rows: Path of the server-side rows that this value has for all clients, or an empty string.
      crossed: The value was sent to the client.
      spread: Operation, operands and output index of a value that is larger than its operands. The
        operands are sent instead.
    """

    def __init__(self, owner: int, value: Any, size: int, *, rows: str = "") -> None:
        self.owner, self.value, self.size, self.rows = owner, value, size, rows
        self.crossed = False
        self.spread: tuple[Any, Sequence[_Value], int] | None = None


class _Side(NamedTuple):
    """The machine, server or client, that evaluates the traced `personalize`."""

    computes: tuple[int, ...]  # values of `_Value.owner` that it computes
    # Sends the array of a server value, or receives it; returns the array. Called once per value.
    cross: Callable[[_Value], Any]


def server_part(
    personalize: Personal, state: State, client: PyTree, ctx: ClientContext
) -> list[Any]:
    """Computes, on the server, the arrays that `client_part` reads. Returns them in that order.

    The client-side state `client` and the examples in `ctx` are shapes.
    """
    crossed: list[Any] = []

    def cross(value: _Value) -> Any:
        crossed.append(value.value)
        return value.value

    _evaluate_side(personalize, state, client, ctx, _Side((_EITHER, _SERVER), cross))
    return crossed


def client_part(
    personalize: Personal,
    server_values: Sequence[Any],
    state: State,
    client: PyTree,
    ctx: ClientContext,
) -> PyTree:
    """Computes, on the client, the variables of the personalised model.

    `server_values` are those that `server_part` returned; the server's `state` has shapes.
    """
    remaining = list(server_values)
    variables = _evaluate_side(
        personalize, state, client, ctx, _Side((_EITHER, _CLIENT), lambda value: remaining.pop(0))
    )
    assert not remaining, "the server sent more values than the client part reads"
    return variables


def _evaluate_side(
    personalize: Personal, state: State, client: PyTree, ctx: ClientContext, side: _Side
) -> PyTree:
    """Traces `personalize` and computes the part of the server or of the client.

    Returns the variables of the model; on the server, leaves that it cannot compute are None.
    `state` has shapes on the client; `client` and the examples in `ctx` have shapes on the server.
    """
    arguments = (state, client, ctx)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
    closed, out = jax.make_jaxpr(personalize, return_shape=True)(*shapes)
    inputs = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        owner = _owner_of(path)
        value = leaf if owner in side.computes else None
        stacked = path[0].idx == 0 and path[1].name == "rows"
        rows = jax.tree_util.keystr(path[1:], simple=True, separator="/") if stacked else ""
        inputs.append(_Value(owner, value, _size(leaf), rows=rows))
    constants = [_constant(array) for array in closed.consts]
    results = jaxprs.interpret(
        closed.jaxpr, constants, inputs, partial(_operation, side=side), _constant
    )
    leaves = [_read(value, side) for value in results]
    return jax.tree.unflatten(jax.tree.structure(out), leaves)


def _owner_of(path: tuple[Any, ...]) -> int:
    """Returns `_Value.owner` of an argument leaf, given its path in `(state, client, ctx)`."""
    if path[0].idx < 2:
        return (_SERVER, _CLIENT)[path[0].idx]
    return _CLIENT if path[1].name == "data" else _EITHER


def _constant(array: Any) -> _Value:
    return _Value(_EITHER, array, 0)


def _operation(equation: Any, operands: Sequence[_Value], side: _Side) -> list[_Value]:
    """Evaluates an equation of the jaxpr on one machine, if it can; returns the results.

    If an equation of the client has operands of the server, the server sends their values.
    """
    sizes = [_size(variable.aval) for variable in equation.outvars]
    owner = max((operand.owner for operand in operands), default=_EITHER)
    if owner == _CLIENT:
        values = [_read(operand, side) for operand in operands]
    else:
        values = [operand.value for operand in operands]
    outputs = jaxprs.compute(equation, values) if owner in side.computes else [None] * len(sizes)
    results = [_Value(owner, output, size) for output, size in zip(outputs, sizes, strict=True)]
    server_bytes = sum(operand.size for operand in operands if operand.owner == _SERVER)
    if owner != _SERVER:
        return results
    for variable, operand in zip(equation.invars, operands, strict=True):
        for output, result in zip(equation.outvars, results, strict=True):
            has_others = operand.rows and variable.aval.shape[0] > 1
            if has_others and output.aval.size >= variable.aval.size:  # still those of all clients
                result.rows = operand.rows
    if max(sizes) > server_bytes and not any(operand.rows for operand in operands):
        for position, result in enumerate(results):
            result.spread = equation, operands, position
    return results


def _size(aval: Any) -> int:
    """Returns the size of a value in bytes; 0 for a random key."""
    has_size = jax.dtypes.issubdtype(aval.dtype, jax.numpy.number) or aval.dtype == bool
    return trees.leaf_bytes(aval) if has_size else 0


def _read(value: _Value, side: _Side) -> Any:
    """Returns a value that the client computes with. If the server owns it, the value is sent.

    Raises UsageError for rows of other clients.
    """
    if value.owner == _SERVER and not value.crossed:
        if value.rows:
            raise UsageError(
                f"personalize combines all clients' {value.rows} with the client's own examples or "
                "state; rows of other clients are never sent"
            )
        value.crossed = True
        if value.spread is None:
            value.value = side.cross(value)
        else:
            equation, operands, position = value.spread
            outputs = jaxprs.compute(equation, [_read(operand, side) for operand in operands])
            value.value = outputs[position]
    return value.value
