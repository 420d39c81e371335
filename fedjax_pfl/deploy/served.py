"""Splits `personalize` into the server's part and the client's.

`personalize` takes the state of server and client and the client's examples, none of which may
leave its machine. Both machines therefore walk through its program. The server computes values that
depend on its own state (and on round, id and key, which both know), the client all others. The
values that the client reads of the server's part are sent: the model for FedAvg, the client's
mixture of layers for pFedLA, the chosen peers for FedFomo.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal
from jax.interpreters.partial_eval import dce_jaxpr

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import ClientContext, PyTree, State
from fedjax_pfl.core.errors import UsageError

Personal = Callable[[State, PyTree, ClientContext], PyTree]
_EITHER, _SERVER, _CLIENT = range(3)  # who can compute a value
# Programs within the program, which are walked through as well.
_CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
_CALLS |= {"custom_vjp_call": "call_jaxpr", "checkpoint": "jaxpr"}


class _Value:
    """A value of the program; None in the place that cannot compute it."""

    def __init__(self, who: int, value: Any, size: int, *, rows: str = "") -> None:
        self.who, self.value, self.size, self.rows = who, value, size, rows
        self.crossed = False
        # An operation, what goes into it, and which of its results this is: where a number is
        # spread over an array, it is the number that crosses over.
        self.spread: tuple[Any, Sequence[_Value], int] | None = None


class _Side(NamedTuple):
    """One of the two places."""

    computes: tuple[int, ...]
    cross: Callable[[_Value], Any]  # what is done once with a value that the client's part reads


def serve(personalize: Personal, state: State, client: PyTree, ctx: ClientContext) -> list[Any]:
    """Computes at the server the values that the client's part reads, in that order.

    Args:
      client: shapes, as are the examples in `ctx`.
    """
    crossed: list[Any] = []

    def cross(value: _Value) -> Any:
        crossed.append(value.value)
        return value.value

    _walk(personalize, state, client, ctx, _Side((_EITHER, _SERVER), cross))
    return crossed


def finish(
    personalize: Personal, served: Sequence[Any], state: State, client: PyTree, ctx: ClientContext
) -> PyTree:
    """Computes the variables at the client from the values of `serve`.

    Args:
      state: shapes.
    """
    left = list(served)
    made = _walk(
        personalize, state, client, ctx, _Side((_EITHER, _CLIENT), lambda value: left.pop(0))
    )
    assert not left, "more was served than is read"
    return made


def _walk(
    personalize: Personal, state: State, client: PyTree, ctx: ClientContext, side: _Side
) -> PyTree:
    arguments = (state, client, ctx)
    shapes = jax.tree.map(_shape, arguments)
    closed, out = jax.make_jaxpr(personalize, return_shape=True)(*shapes)
    inputs = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        who = _of(path)
        value = leaf if who in side.computes else None
        stacked = path[0].idx == 0 and path[1].name == "rows"
        rows = jax.tree_util.keystr(path[1:], simple=True, separator="/") if stacked else ""
        inputs.append(_Value(who, value, _bytes(leaf), rows=rows))
    constants = [_Value(_EITHER, value, 0) for value in closed.consts]
    results = _program(closed.jaxpr, constants, inputs, side)
    leaves = [_read(value, side) for value in results]
    return jax.tree.unflatten(jax.tree.structure(out), leaves)


def _of(path: tuple[Any, ...]) -> int:
    """Returns the machine that has an argument."""
    if path[0].idx < 2:
        return (_SERVER, _CLIENT)[path[0].idx]
    return _CLIENT if path[1].name == "data" else _EITHER


def _shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _program(
    jaxpr: Any, constants: Sequence[_Value], inputs: Sequence[_Value], side: _Side
) -> list[_Value]:
    """Evaluates a program without the parts that no result needs."""
    every = [*constants, *inputs]
    whole = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    kept, used = dce_jaxpr(whole, [True] * len(jaxpr.outvars))
    known = dict(zip(kept.invars, (v for v, u in zip(every, used, strict=True) if u), strict=True))

    def read(one: Any) -> _Value:
        return _Value(_EITHER, one.val, 0) if isinstance(one, Literal) else known[one]

    for equation in kept.eqns:
        given = [read(one) for one in equation.invars]
        name = equation.primitive.name
        if name in _CALLS:
            inner = equation.params[_CALLS[name]]
            begun = [_Value(_EITHER, c, 0) for c in getattr(inner, "consts", ())]
            made = _program(getattr(inner, "jaxpr", inner), begun, given, side)
        else:
            made = _operation(equation, given, side)
        known |= zip(equation.outvars, made, strict=True)
    return [read(one) for one in kept.outvars]


def _operation(equation: Any, given: Sequence[_Value], side: _Side) -> list[_Value]:
    sizes = [_bytes(one.aval) for one in equation.outvars]
    who = max((one.who for one in given), default=_EITHER)
    if who == _CLIENT:
        values = [_read(one, side) for one in given]
    else:
        values = [one.value for one in given]
    several = _evaluated(equation, values) if who in side.computes else [None] * len(sizes)
    made = [_Value(who, one, size) for one, size in zip(several, sizes, strict=True)]
    of_server = sum(one.size for one in given if one.who == _SERVER)
    if who == _SERVER and max(sizes) > of_server and not any(one.rows for one in given):
        for place, one in enumerate(made):
            one.spread = equation, given, place
    return made


def _evaluated(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Evaluates one operation."""
    primitive = equation.primitive
    with equation.ctx.manager:
        made = primitive.bind(*values, **primitive.get_bind_params(equation.params))
    return made if primitive.multiple_results else [made]


def _bytes(aval: Any) -> int:
    """Returns the bytes of a value; 0 for a random key."""
    plain = jax.dtypes.issubdtype(aval.dtype, jax.numpy.number) or aval.dtype == bool
    return trees.leaf_bytes(aval) if plain else 0


def _read(value: _Value, side: _Side) -> Any:
    """Returns a value that the client reads."""
    if value.who == _SERVER and not value.crossed:
        if value.rows:
            raise UsageError(
                f"personalize reads all clients' {value.rows} together with the client's own "
                "examples or state, and nobody is sent what belongs to others"
            )
        value.crossed = True
        if value.spread is None:
            value.value = side.cross(value)
        else:
            equation, given, place = value.spread
            value.value = _evaluated(equation, [_read(one, side) for one in given])[place]
    return value.value
