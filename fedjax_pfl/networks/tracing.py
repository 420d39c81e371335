"""Properties of a network that are read from its jaxpr, without running it."""

import math
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.core import jaxprs, trees
from fedjax_pfl.core.errors import UsageError
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
# Operations that keep the last axis of an array, unless they change its length or its place.
_KEEPING_LAST_AXIS = frozenset(
    (
        "broadcast_in_dim",
        "concatenate",
        "dynamic_slice",
        "expand_dims",
        "gather",
        "pad",
        "reshape",
        "slice",
        "split",
        "squeeze",
        "transpose",
    )
)
# Other operations whose results may have an operand's shape, but that are not elementwise.
_NOT_ELEMENTWISE = frozenset(
    ("cond", "dynamic_update_slice", "fft", "pallas_call", "scan", "sort", "while")
)
_NOT_ELEMENTWISE_PREFIXES = ("cum", "reduce_window", "scatter", "select_and")
# Orders of an array's axes in PyTorch.
_LAST = "channels last"  # an image [B, ..., C], which PyTorch has as [B, C, ...]
_SPLIT = "channels split"  # an image [B, ..., C, G] with an axis of its channels or after them
_FIRST = "channels first"  # an image that is transposed to PyTorch's order
_SAME = "same"  # a dense layer's outputs, or an image without channels
_DIVIDED = "divided"  # the same, but one axis of a dense layer's outputs became several
_PRODUCTS = ("conv_general_dilated", "dot_general")
KNOWN_LAYERS = "PyTorch's weights are known for convolutions, dense layers and norms"
_REMEDY = (
    "flatten them as [B, C, ...], with x.transpose(0, 3, 1, 2) before the reshape, or save in the "
    "layout of Flax"
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
    # Whose parameters it holds; once it depends on the input, only while it is uniform.
    layers: Labels = _NO_LABELS
    channels: int = 1  # of the image that was flattened to its last axis
    axes: str = _LAST  # order of its axes in PyTorch
    is_uniform: bool = False  # whether it is constant on its last axis, but for its `layers`
    reordered_by: str = ""  # operation after which a flattened image's order is unknown


def flattened_channels(
    apply: Callable[[PyTree, Any], Any], variables: PyTree, x: Any
) -> dict[str, int]:
    """Returns C for every layer that reads an image [B, ..., C] flattened to [B, ...·C].

    An image transposed to [B, C, ...] is in PyTorch's order, and so are outputs [B, ..., C] of a
    dense layer, which reads and writes the last axis in PyTorch too. Arguments as for
    `layers_in_order`. Raises UsageError for a product with a whole kernel of several axes, as of
    `DenseGeneral`, and for a layer that reads an image after an operation, such as a concatenation
    of flattened images, that leaves its order in PyTorch unknown.
    """
    leaves = jax.tree_util.tree_leaves_with_path({"variables": variables})
    arguments = [_Origin(layers=Labels({trees.layer_name(path[1:])})) for path, _ in leaves]
    dense = {trees.layer_name(path[1:]) for path, leaf in leaves if _is_dense_kernel(path, leaf)}
    shapes = {(trees.layer_name(path[1:]), leaf.shape) for path, leaf in leaves if leaf.ndim > 2}
    closed, channels = jax.make_jaxpr(apply)(variables, x), dict[str, int]()

    def operation(eqn: Any, operands: Sequence[_Origin]) -> list[_Origin]:
        results = [_result_origin(eqn, operands, out.aval.shape, dense) for out in eqn.outvars]
        layers = _NO_LABELS.union(*(operand.layers for operand in operands))
        whole_kernels = shapes & {(layer, v.aval.shape) for layer in layers for v in eqn.invars}
        if whole_kernels and eqn.primitive.name == "dot_general" and results[0].is_input:
            layer, shape = min(whole_kernels)
            kind = f"a product with a kernel of {len(shape)} axes, and no convolution"
            raise UsageError(f"{layer} is {kind}; {KNOWN_LAYERS}")
        reordered_by = next((r.reordered_by for r in results if r.reordered_by), "")
        if layers and reordered_by:
            raise UsageError(
                f"{min(layers)} reads images through {reordered_by}, after which their order in "
                f"PyTorch is unknown; {_REMEDY}"
            )
        count = max((operand.channels for operand in operands), default=1)
        if count > 1:
            channels.update(dict.fromkeys(layers, count))
        return results

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


def _result_origin(
    eqn: Any, operands: Sequence[_Origin], after: tuple[int, ...], dense: Set[str]
) -> _Origin:
    """Returns the origin of a result of an equation from its operands' origins.

    `after` is the result's shape, `dense` has the names of the dense layers. Raises UsageError for
    a flattened image that is combined with features in another order.
    """
    name, layers = eqn.primitive.name, _NO_LABELS.union(*(o.layers for o in operands))
    if not any(operand.is_input for operand in operands):
        return _Origin(layers=layers)
    shapes = [variable.aval.shape for variable in eqn.invars]
    is_flattened = any(operand.channels > 1 for operand in operands)
    reordered_by = next((o.reordered_by for o in operands if o.reordered_by), "")
    if name in _PRODUCTS:
        if is_flattened and not _sums_flattened_axes(eqn, operands):
            reordered_by = reordered_by or name
        products = _NO_LABELS.union(*(o.layers for o in operands if not o.is_input))
        is_dense = products <= dense if products else any(o.axes != _LAST for o in operands)
        if name != "dot_general" and any(o.axes == _DIVIDED for o in operands):
            reordered_by = "reshape"
        axes = _SAME if is_dense else _LAST
        return _Origin(is_input=True, axes=axes, reordered_by=reordered_by)
    if reordered_by:
        return _Origin(is_input=True, reordered_by=reordered_by)
    before, first = shapes[0], operands[0]
    if name == "reshape" and not is_flattened and _is_flattening(before, after):
        # Repeated entries, as in GroupNorm, and images of one pixel are in PyTorch's order too.
        is_image = first.axes in (_LAST, _SPLIT)
        has_one_order = not is_image or first.is_uniform or math.prod(before[1:-1]) == 1
        if first.axes == _SPLIT and not has_one_order:
            return _Origin(is_input=True, reordered_by=name)
        axes, count = (_SAME, 1) if has_one_order else (_LAST, before[-1])
        return _Origin(is_input=True, channels=count, axes=axes, is_uniform=first.is_uniform)
    if name.startswith("reduce_window") and first.axes == _DIVIDED:
        return _Origin(is_input=True, reordered_by="reshape")

    is_elementwise = _is_elementwise(name) and _broadcast(shapes) == after
    sources = []  # operands whose last axis becomes the last axis of the result
    if is_elementwise or _keeps_last_axis(eqn, before, after):
        count = len(operands) if is_elementwise or name == "concatenate" else 1
        sources = list(zip(shapes, operands, strict=True))[:count]
    elif is_flattened:
        is_lost = not (_reduces_last_axis(eqn) or _is_image(before, after, first.channels))
        return _Origin(is_input=True, reordered_by=name if is_lost else "")
    varying = [
        operand
        for shape, operand in sources
        if operand.is_input and not operand.is_uniform and shape[-1:] == after[-1:]
    ]
    channels = {operand.channels for operand in varying}
    if len(channels) > 1:
        if is_elementwise:
            raise UsageError(
                f"{name} combines a flattened image with features in another order, which "
                f"PyTorch's weights cannot express; {_REMEDY}"
            )
        return _Origin(is_input=True, reordered_by=name)
    is_uniform = not varying if sources else name == "broadcast_in_dim"
    return _Origin(
        is_input=True,
        layers=layers if is_uniform and sources else _NO_LABELS,
        channels=max(channels, default=1),
        axes=_axes(eqn, operands, after),
        is_uniform=is_uniform,
    )


def _axes(eqn: Any, operands: Sequence[_Origin], after: tuple[int, ...]) -> str:
    """Returns the order of the axes of a result that is neither a product nor flattened.

    `after` is the result's shape. Operands with another number of axes than the result, such as
    the bias of a layer, do not count unless they come first.
    """
    name, axes, shapes = eqn.primitive.name, operands[0].axes, [v.aval.shape for v in eqn.invars]
    before = shapes[0]
    if name == "transpose":
        permutation, later_axes = eqn.params["permutation"], range(1, len(after))
        if axes == _LAST and permutation == (0, len(after) - 1, *later_axes[:-1]):
            return _FIRST
        return _LAST if axes == _FIRST and permutation == (0, *later_axes[1:], 1) else axes
    is_folded = name == "reshape" and before[-1:] == after[-1:] and before[:1] != after[:1]
    if len(after) <= 2 < len(before) and not is_folded and axes != _SPLIT:
        return _SAME
    if len(after) < len(before):
        has_lost_last = before[-1] == 1 != after[-1] or _reduces_last_axis(eqn)
        if axes == _SPLIT:
            return _LAST if has_lost_last or name == "reshape" else axes
        return _SAME if has_lost_last or axes == _DIVIDED else axes
    if len(after) > len(before) and before[-1:] != after[-1:] and axes != _FIRST:
        if axes == _LAST:
            return _SPLIT if len(before) > 2 and before[:-1] == after[: len(before) - 1] else _LAST
        return axes if axes == _SPLIT else _DIVIDED if after[-1] > 1 else _LAST
    counted = [
        operand.axes
        for shape, operand in zip(shapes, operands, strict=True)
        if operand.is_input and not operand.is_uniform and len(shape) == len(after)
    ]
    if name.startswith("reduce_window") and axes == _SAME:
        return _LAST
    # Images [B, H, W, C] decide, because PyTorch transposes what is added to them. Series and
    # features are as in PyTorch if one of them is.
    first_kind = _LAST if len(after) > 3 else _SAME
    return first_kind if first_kind in counted else (*counted, axes)[0]


def _is_flattening(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Returns True if a reshape flattens all axes of images [B, ..., C] but the first."""
    if len(before) < 3 or after[-1:] != (math.prod(before[1:]),):
        return False
    return len(after) <= 2 or before[0] > 1  # else, groups of channels of one pixel are joined


def _is_image(before: tuple[int, ...], after: tuple[int, ...], channels: int) -> bool:
    """Returns True if a reshape undoes the flattening of images [B, ..., channels]."""
    return len(after) > 2 and after[0] == before[0] and after[-1] == channels


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Returns the shape that `shapes` broadcast to; None if they do not."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        return None


def _is_elementwise(name: str) -> bool:
    """Returns True if the result of an operation has the order of its operands."""
    not_elementwise = _KEEPING_LAST_AXIS | _NOT_ELEMENTWISE
    return name not in not_elementwise and not name.startswith(_NOT_ELEMENTWISE_PREFIXES)


def _reduces_last_axis(eqn: Any) -> bool:
    """Returns True for a sum, maximum or the like over the last axis, which has no order then."""
    axes = eqn.params.get("axes", ()) if eqn.primitive.name.startswith("reduce_") else ()
    return len(eqn.invars[0].aval.shape) - 1 in axes


def _keeps_last_axis(eqn: Any, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Returns True if the last axis of the first operand is the last one of the result.

    `before` and `after` are their shapes.
    """
    name, params, last = eqn.primitive.name, eqn.params, len(before) - 1
    if not before or before[-1:] != after[-1:]:
        return False
    if name == "transpose":
        return bool(params["permutation"][-1] == last)
    if name == "broadcast_in_dim":
        return bool(params["broadcast_dimensions"][-1] == len(after) - 1)
    if name == "gather":
        numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
        is_collapsed = last in numbers.collapsed_slice_dims
        offsets = numbers.offset_dims
        return sizes[-1] == before[-1] and not is_collapsed and offsets[-1] == len(after) - 1
    is_reduction = name.startswith("reduce_") and "axes" in params and not _reduces_last_axis(eqn)
    return name in _KEEPING_LAST_AXIS or is_reduction


def _sums_flattened_axes(eqn: Any, operands: Sequence[_Origin]) -> bool:
    """Returns True if a product sums over all flattened images, so that no order is left.

    The other factor is a kernel [features, outputs] or has the same order.
    """
    if eqn.primitive.name != "dot_general":
        return False
    (contracted, _), shapes = eqn.params["dimension_numbers"], [v.aval.shape for v in eqn.invars]
    for i, operand in enumerate(operands):
        other, last = operands[1 - i], len(shapes[i]) - 1
        if operand.channels > 1:
            is_kernel = len(shapes[1 - i]) == 2 or not other.layers
            in_order = not other.is_input or other.channels == operand.channels
            if last not in contracted[i] or not is_kernel or not in_order:
                return False
    return True


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
