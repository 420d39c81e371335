"""Properties of a network that are read from its jaxpr, without running it."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from fedjax_pfl.core import trees
from fedjax_pfl.core.jaxprs import Jaxpr, Var, inner_programs

PyTree = Any
Labels = frozenset[str]  # names of layers, or _TOKENS for the network's input
Position = tuple[int, ...]  # index of an equation, after the indices of the equations around it
_TOKENS = "x"
_NO_LABELS = Labels()
# Operations that only rearrange or convert an array. Their results keep its labels.
_REARRANGING = frozenset(
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
    """Returns the names of the layers, ordered by the last use of any of their parameters.

    Unused layers come first. `apply` maps (variables, x) to outputs; shapes are enough.
    """
    leaves = jax.tree_util.tree_leaves_with_path({"variables": variables})
    names = [trees.layer_name(path[1:]) for path, _ in leaves]
    last_use: dict[str, Position] = {name: () for name in names}
    trace = jax.make_jaxpr(apply)(variables, x).jaxpr
    labels = dict(zip(trace.invars, (Labels({name}) for name in names), strict=False))
    for used, position, _ in _uses(trace, labels):
        for name in used & last_use.keys():
            last_use[name] = max(last_use[name], position)
    return tuple(sorted(last_use, key=lambda name: last_use[name]))


def vocabulary_size(apply: Callable[[PyTree, Any], Any], variables: PyTree, x: Any) -> int | None:
    """Returns the number of rows of the smallest array, such as an embedding, indexed by `x`.

    None if the tokens `x` are not used as an index. Arguments as for `layers_in_order`.
    """
    trace = jax.make_jaxpr(apply)(variables, x).jaxpr
    rows = [
        int(np.min([eqn.invars[0].aval.shape[d] for d in dims]))
        for _, _, eqn in _uses(trace, {trace.invars[-1]: Labels({_TOKENS})}, indices=True)
        if (dims := eqn.params["dimension_numbers"].start_index_map)
    ]
    return min(rows, default=None)


def _uses(
    trace: Jaxpr, labels: dict[Var, Labels], position: Position = (), *, indices: bool = False
) -> Iterator[tuple[Labels, Position, Any]]:
    """Yields (labels, position, equation) for every equation that reads a labelled variable.

    Args:
      trace: The jaxpr. Jaxprs inside its equations, such as loop bodies, are searched too.
      labels: Labels of its variables. Those of rearranged variables are added in place.
      position: Position of the equation that contains the jaxpr; () for the outermost.
      indices: Yield only gathers whose indices are labelled.
    """
    for i, eqn in enumerate(trace.eqns):
        operands = [
            _NO_LABELS if not isinstance(v, Var) else labels.get(v, _NO_LABELS) for v in eqn.invars
        ]
        eqn_position, used = (*position, i), _NO_LABELS.union(*operands)
        if eqn.primitive.name == "gather" and indices and operands[1]:
            yield operands[1], eqn_position, eqn
        elif used and not indices:
            yield used, eqn_position, eqn
        if not used:
            continue
        if eqn.primitive.name in _REARRANGING:
            labels |= dict.fromkeys(eqn.outvars, used)
        for inner in inner_programs(eqn):
            # The operands of a loop's condition precede those of its body.
            extra = max(0, len(operands) - len(inner.invars))
            inner_labels = dict(zip(inner.invars, operands[extra:], strict=False))
            yield from _uses(inner, inner_labels, eqn_position, indices=indices)
            if len(inner.outvars) == len(eqn.outvars):
                for outer_var, inner_var in zip(eqn.outvars, inner.outvars, strict=True):
                    if isinstance(inner_var, Var) and inner_var in inner_labels:
                        labels[outer_var] = inner_labels[inner_var]
