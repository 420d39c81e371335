"""Properties of a network that are read from its jaxpr, without running it."""

import math
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.core import jaxprs, trees
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


class _Origin(NamedTuple):
    """Origin of an array in a network."""

    is_input: bool = False  # whether it depends on the network's input
    layers: Labels = _NO_LABELS  # whose parameters it depends on, since the last product
    channels: int = 1  # of the image that was flattened to it
    same_order: bool = False  # whether PyTorch flattens it in the same order


def flattened_channels(
    apply: Callable[[PyTree, Any], Any], variables: PyTree, x: Any
) -> dict[str, int]:
    """Returns C for every layer that reads an image [B, ..., C] flattened to [B, ...·C].

    An image transposed to [B, C, ...] is in PyTorch's order, and so are outputs [B, ..., C] of a
    dense layer, which reads and writes the last axis in PyTorch too. Arguments as for
    `layers_in_order`.
    """
    leaves = jax.tree_util.tree_leaves_with_path({"variables": variables})
    arguments = [_Origin(layers=Labels({trees.layer_name(path[1:])})) for path, _ in leaves]
    dense = {trees.layer_name(path[1:]) for path, leaf in leaves if _is_dense_kernel(path, leaf)}
    closed, channels = jax.make_jaxpr(apply)(variables, x), dict[str, int]()

    def operation(eqn: Any, operands: Sequence[_Origin]) -> list[_Origin]:
        count = max((operand.channels for operand in operands), default=1)
        if count > 1:
            channels.update(dict.fromkeys(_NO_LABELS.union(*(o.layers for o in operands)), count))
        return [_result_origin(eqn, operands, dense)] * len(eqn.outvars)

    jaxprs.interpret(
        closed.jaxpr,
        [_Origin()] * len(closed.consts),
        [*arguments, _Origin(is_input=True)],
        operation,
        lambda constant: _Origin(),
    )
    return channels


def _is_dense_kernel(path: tuple[Any, ...], leaf: Any) -> bool:
    return path[-1].key == "kernel" and len(leaf.shape) == 2


def _result_origin(eqn: Any, operands: Sequence[_Origin], dense: Set[str]) -> _Origin:
    """Returns the origin of the results of an equation from its operands' origins.

    `dense` has the names of the dense layers.
    """
    name, is_input = eqn.primitive.name, any(operand.is_input for operand in operands)
    if not is_input or name in ("conv_general_dilated", "dot_general"):
        layers = _NO_LABELS.union(*(o.layers for o in operands if not is_input))
        products = _NO_LABELS.union(*(o.layers for o in operands if not o.is_input))
        if products:
            return _Origin(is_input, layers, same_order=is_input and products <= dense)
        return _Origin(is_input, layers, same_order=any(o.same_order for o in operands))
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if name == "reshape" and len(before) > 2 and after == (before[0], math.prod(before[1:])):
        return _Origin(True, channels=1 if operands[0].same_order else before[-1])
    equal_shaped = [o for v, o in zip(eqn.invars, operands, strict=True) if v.aval.shape == after]
    same_order = any(operand.same_order for operand in equal_shaped)
    if name == "transpose":
        same_order = eqn.params["permutation"] == (0, len(after) - 1, *range(1, len(after) - 1))
    return _Origin(
        is_input=True,
        layers=_NO_LABELS.union(*(operand.layers for operand in operands)),
        channels=max((operand.channels for operand in equal_shaped), default=1),
        same_order=same_order,
    )


def transposed_convolutions(
    apply: Callable[[PyTree, Any], Any], variables: PyTree, x: Any
) -> list[str]:
    """Returns the names of the layers that are transposed convolutions with strides above 1.

    Arguments as for `layers_in_order`.
    """
    leaves = jax.tree_util.tree_leaves_with_path({"variables": variables})
    trace = jax.make_jaxpr(apply)(variables, x).jaxpr
    layers = (Labels({trees.layer_name(path[1:])}) for path, _ in leaves)
    uses = _uses(trace, dict(zip(trace.invars, layers, strict=False)))
    return [
        name
        for used, _, eqn in uses
        if max(eqn.params.get("lhs_dilation", (1,))) > 1
        for name in sorted(used)
    ]


def vocabulary_size(apply: Callable[[PyTree, Any], Any], variables: PyTree, x: Any) -> int | None:
    """Returns the number of rows of the smallest array, such as an embedding, indexed by `x`.

    None if the tokens `x` are not used as an index. A slice of `x` does not count, because columns
    can have vocabularies of their own. Arguments as for `layers_in_order`.
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
        is_slice = eqn.primitive.name in ("slice", "split")
        if eqn.primitive.name in _REARRANGING and not (indices and is_slice):
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
