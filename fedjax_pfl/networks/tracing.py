"""What a network does with its parameters and its input, read from its trace: nothing is run."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from fedjax_pfl.core import trees

PyTree = Any
_TOKENS = "x"
# What leaves an array the same but for its form, so that what follows is what uses it.
_FORM = frozenset(
    (
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "expand_dims",
        "reshape",
        "rev",
        "select_n",
        "slice",
        "split",
        "squeeze",
        "stop_gradient",
        "transpose",
    )
)


def layers_in_order(
    apply: Callable[[PyTree, Any], Any], variables: PyTree, x: Any
) -> tuple[str, ...]:
    """The names of all layers in the order in which their last parameter is used.

    variables, x: shapes will do. A layer that is not used comes first.
    """
    leaves = jax.tree_util.tree_leaves_with_path({"variables": variables})
    names = [trees.layer_name(path[1:]) for path, _ in leaves]
    used: dict[str, tuple[int, ...]] = {name: () for name in names}
    trace = jax.make_jaxpr(apply)(variables, x).jaxpr
    for labels, place, _ in _uses(trace, dict(zip(trace.invars, map(_one, names), strict=False))):
        for name in labels & used.keys():
            used[name] = max(used[name], place)
    return tuple(sorted(used, key=lambda name: used[name]))


def embedded(apply: Callable[[PyTree, Any], Any], variables: PyTree, x: Any) -> int | None:
    """The fewest rows of the arrays that the input picks rows of; None where it picks none."""
    trace = jax.make_jaxpr(apply)(variables, x).jaxpr
    found = [
        int(np.min([eqn.invars[0].aval.shape[d] for d in dims]))
        for labels, _, eqn in _uses(trace, {trace.invars[-1]: _one(_TOKENS)}, indices=True)
        if (dims := eqn.params["dimension_numbers"].start_index_map)
    ]
    return min(found, default=None)


def _one(label: str) -> frozenset[str]:
    return frozenset({label})


def _uses(
    trace: Jaxpr,
    labels: dict[Var, frozenset[str]],
    place: tuple[int, ...] = (),
    *,
    indices: bool = False,
) -> Iterator[tuple[frozenset[str], tuple[int, ...], Any]]:
    """Where what is labelled is used: its labels, the place in the order, and the operation.

    indices: only where it says which rows are gathered. The labels of what has changed its form
    only are added to `labels`.
    """
    nothing = frozenset[str]()
    for i, eqn in enumerate(trace.eqns):
        mine = [labels.get(v, nothing) if isinstance(v, Var) else nothing for v in eqn.invars]
        here, any_of = (*place, i), nothing.union(*mine)
        if eqn.primitive.name == "gather" and indices and mine[1]:
            yield mine[1], here, eqn
        elif any_of and not indices:
            yield any_of, here, eqn
        if not any_of:
            continue
        if eqn.primitive.name in _FORM:
            labels |= dict.fromkeys(eqn.outvars, any_of)
        for inner in _inner(eqn):
            # What a loop's condition reads comes first, and it has not all that its body has.
            last = mine[len(mine) - len(inner.invars) :] if len(mine) > len(inner.invars) else mine
            own = dict(zip(inner.invars, last, strict=False))
            yield from _uses(inner, own, here, indices=indices)
            if len(inner.outvars) == len(eqn.outvars):
                for outer, made in zip(eqn.outvars, inner.outvars, strict=True):
                    if isinstance(made, Var) and made in own:
                        labels[outer] = own[made]


def _inner(eqn: Any) -> Iterator[Jaxpr]:
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, Jaxpr):
                yield one
