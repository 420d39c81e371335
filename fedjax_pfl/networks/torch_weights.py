"""Weights of PyTorch networks, as a `state_dict` in a `.safetensors` file, for networks here.

Layers are matched by kind, shape and order, because their names differ between projects, unless the
file has exactly the names that `to_torch` writes:

    layer         PyTorch                       here
    convolution   weight [O, I, H, W], bias     kernel [H, W, I, O], bias
    dense         weight [O, I], bias           kernel [I, O], bias
    norm          weight, bias, running_mean,   scale, bias, mean, var
                  running_var

PyTorch flattens images as [C, H, W] and Flax as [H, W, C], so dense layers and norms that read a
flattened image are reordered. Outputs of a dense layer are flattened in the same order in both.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core import tensor_file, trees
from fedjax_pfl.core.errors import UsageError, first_line
from fedjax_pfl.networks import tracing

PyTree = Any
_SKIPPED = "num_batches_tracked"  # PyTorch's count of batches, which no result depends on
_NORM = {"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
_LINEAR = {"kernel": "weight", "bias": "bias"}
_REMEDY = "choose the network, with its layer sizes, that it was saved from"
_Shapes = dict[str, tuple[int, ...]]  # of a layer's arrays, by PyTorch's name


class _Leaf(NamedTuple):
    """An array of a network and its place in a layer of PyTorch."""

    path: tuple[str, ...]  # in the variables, such as ("params", "conv1", "kernel")
    torch_name: str  # such as "weight"
    shape: tuple[int, ...]  # here
    dtype: np.dtype
    channels: int  # of the image that the leaf has flattened on axis 0; 1 if there is none

    def to_torch(self, array: np.ndarray) -> np.ndarray:
        """Returns the array in PyTorch's layout."""
        if array.ndim > 2:
            return np.moveaxis(array, (-1, -2), (0, 1))
        rows = array.reshape(-1, self.channels, *array.shape[1:])
        return rows.swapaxes(0, 1).reshape(array.shape).T

    def from_torch(self, array: np.ndarray) -> np.ndarray:
        """Returns an array in PyTorch's layout in the layout here; inverse of `to_torch`."""
        if array.ndim > 2:
            return np.moveaxis(array, (0, 1), (-1, -2))
        rows = array.T.reshape(self.channels, -1, *array.shape[:-1])
        return rows.swapaxes(0, 1).reshape(self.shape)

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """Shape in PyTorch."""
        if self.path[-1] != "kernel":
            return self.shape
        return (*self.shape[:-3:-1], *self.shape[:-2])


def from_torch(
    path: str | os.PathLike[str],
    network: Any,
    input_shape: Sequence[int],
    *,
    layers: Sequence[str] | None = None,
) -> PyTree:
    """Reads the weights of a PyTorch network.

    Arrays are matched by name if the file has exactly the names and shapes that `to_torch` writes.
    Otherwise, layers of equal kind and shape are matched in the order of the numbers in their
    names, to the network's layers from the input to the output.
    `num_batches_tracked` is skipped. Raises UsageError for the first layer that does not match.

    Args:
      path: File that `safetensors.torch.save_file(model.state_dict(), path)` wrote.
      network: The network here, such as `networks.LeNet()`.
      input_shape: Shape of an example, images as (height, width, channels).
      layers: Names of the layers in the file, such as "base.conv1", from the input to the output.
        Default: they are matched as above.

    Returns:
      Variables of the network, for `network.apply` or `networks.Pretrained`.
    """
    foreign = _read(path)
    variables: dict[str, Any] = {}
    for leaf, name in _match(path, foreign, _layers(network, input_shape), layers):
        *parents, last = leaf.path
        level = variables
        for parent in parents:
            level = level.setdefault(parent, {})
        array = leaf.from_torch(foreign[name])
        level[last] = jnp.asarray(np.ascontiguousarray(array), leaf.dtype)
    return variables


def to_torch(
    path: str | os.PathLike[str],
    network: Any,
    variables: PyTree,
    input_shape: Sequence[int],
    *,
    like: str | os.PathLike[str] | None = None,
    layers: Sequence[str] | None = None,
) -> None:
    """Writes the variables of a network as a PyTorch `state_dict`.

    PyTorch reads it with `model.load_state_dict(safetensors.torch.load_file(path))`. Raises
    UsageError if the file cannot be written.

    Args:
      path: The file to write.
      network: The network here.
      variables: Its variables.
      input_shape: Shape of an example, images as (height, width, channels).
      like: A file for `from_torch` whose names are used. Default: names such as conv1.weight.
      layers: As for `from_torch`, with `like`.
    """
    state = state_dict(network, variables, input_shape, like=like, layers=layers)
    content = tensor_file.safetensors_package().numpy.save(state)
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror})") from None


def state_dict(
    network: Any,
    variables: PyTree,
    input_shape: Sequence[int],
    *,
    like: str | os.PathLike[str] | None = None,
    layers: Sequence[str] | None = None,
) -> dict[str, np.ndarray]:
    """Returns the arrays that `to_torch` writes, by name."""
    own_layers = _layers(network, input_shape)
    if like is None:
        pairs = _named(own_layers)
    else:
        pairs = _match(like, _read(like), own_layers, layers)
    state = {}
    for leaf, name in pairs:
        state[name] = np.ascontiguousarray(leaf.to_torch(_value(variables, leaf)))
    return state


def _value(variables: PyTree, leaf: _Leaf) -> np.ndarray:
    """Returns the array of `leaf`; raises UsageError if `variables` are not of its network."""
    array, name = variables, ".".join(leaf.path[1:])
    for key in leaf.path:
        if key not in array:
            raise UsageError(
                f"the variables have no {name}; give those of the whole network, such as those of "
                "a client's personal model"
            )
        array = array[key]
    if np.shape(array) != leaf.shape:
        raise UsageError(
            f"{name} is {list(np.shape(array))} in the variables and {list(leaf.shape)} in the "
            "network; give the variables of this network"
        )
    return np.asarray(array)


def check_layers(network: Any, input_shape: Sequence[int]) -> None:
    """Raises UsageError for a layer that is no convolution, dense layer or norm."""
    _layers(network, input_shape)


def _read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Returns the arrays of a `state_dict` by name; UsageError for arrays without a counterpart."""
    arrays = tensor_file.read(path)
    arrays = {name: v for name, v in arrays.items() if name.rpartition(".")[2] != _SKIPPED}
    for name, array in arrays.items():
        if name.rpartition(".")[2] not in _NORM.values():
            raise UsageError(
                f"{path}: {name} {list(array.shape)} belongs to no convolution, dense layer or norm"
            )
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise UsageError(f"{path}: {name} has the dtype {array.dtype}, which is no float")
    return arrays


def _layers(network: Any, input_shape: Sequence[int]) -> dict[str, list[_Leaf]]:
    """Returns the leaves of each layer of a network, from the input to the output.

    Layers have names as in PyTorch, such as "block.conv1". Raises UsageError for a layer that is no
    convolution, dense layer or norm.
    """
    x = jnp.zeros((1, *input_shape))
    if not hasattr(network, "init"):
        raise UsageError(
            f"{type(network).__name__} combines a network with other arrays, which PyTorch's "
            "weights have no names for; save it in the layout of Flax"
        )
    try:
        variables = jax.eval_shape(lambda: dict(network.init(jax.random.key(0), x)))
    except Exception as error:  # networks raise many types for a wrong shape
        raise UsageError(
            f"the network does not take examples of shape {list(input_shape)}: {first_line(error)}"
        ) from None
    grouped: dict[str, list[tuple[tuple[str, ...], Any]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
        names = tuple(key.key for key in path)
        grouped.setdefault(trees.layer_name(path), []).append((names, leaf))
    layers = dict[str, list[_Leaf]]()
    for layer in tracing.transposed_convolutions(network.apply, variables, x):
        raise UsageError(f"{layer} is a transposed convolution; {tracing.KNOWN_LAYERS}")
    flattened = tracing.flattened_channels(network.apply, variables, x)
    names = getattr(network, "layers", ())
    if not all(isinstance(name, str) for name in names) or set(names) != set(grouped):
        names = tracing.layers_in_order(network.apply, variables, x)
    for layer in names:
        kernel = next((leaf for path, leaf in grouped[layer] if path[-1] == "kernel"), None)
        names_here = _NORM if kernel is None else _LINEAR
        for path, leaf in grouped[layer]:
            if path[-1] not in names_here or (leaf is not kernel and leaf.ndim != 1):
                raise UsageError(
                    f"{layer} has {path[-1]} {list(leaf.shape)}: it is no convolution, dense layer "
                    "or norm, the layers that PyTorch's weights are known for"
                )
        layers[layer.replace("/", ".")] = [
            _Leaf(
                path=path,
                torch_name=names_here[path[-1]],
                shape=leaf.shape,
                dtype=leaf.dtype,
                # A dense layer's outputs are not flattened.
                channels=flattened.get(layer, 1) if kernel is None or leaf is kernel else 1,
            )
            for path, leaf in grouped[layer]
        ]
    return layers


def _named(own_layers: Mapping[str, Sequence[_Leaf]]) -> list[tuple[_Leaf, str]]:
    """Returns each leaf of a network with the name that `to_torch` gives it."""
    return [(leaf, f"{name}.{leaf.torch_name}") for name in own_layers for leaf in own_layers[name]]


def _match(
    path: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray],
    own_layers: Mapping[str, Sequence[_Leaf]],
    order: Sequence[str] | None,
) -> list[tuple[_Leaf, str]]:
    """Returns each leaf of a network with the name of its array in the file `path`.

    `own_layers` has the leaves of each layer from the input to the output, `order` the names of the
    file's layers in this order, or None. Raises UsageError unless exactly one match exists for
    every layer of both.
    """
    named = _named(own_layers)
    own_shapes = {name: leaf.torch_shape for leaf, name in named}
    if order is None and {name: array.shape for name, array in arrays.items()} == own_shapes:
        return named
    foreign: dict[str, _Shapes] = {}
    for name, array in arrays.items():
        layer, _, leaf_name = name.rpartition(".")
        foreign.setdefault(layer, {})[leaf_name] = array.shape
    if order is not None and sorted(order) != sorted(foreign):
        raise UsageError(
            f"{path} has the layers {', '.join(sorted(foreign))}; name each of them once in "
            "`layers`, from the input to the output"
        )
    names = sorted(foreign, key=_natural) if order is None else list(order)
    pairs = []
    for layer, leaves in own_layers.items():
        shapes = {leaf.torch_name: leaf.torch_shape for leaf in leaves}
        candidates = [name for name in names if _rank(foreign[name]) == _rank(shapes)]
        candidates = candidates if order is None else candidates[:1]
        fitting = [name for name in candidates if foreign[name] == shapes]
        if not fitting:
            lack = "file has no layer of this kind left"
            if candidates:
                lack = f"file's {candidates[0]} has {_text(foreign[candidates[0]])}"
            raise UsageError(f"{path}: {layer} needs {_text(shapes)}, and the {lack}; {_REMEDY}")
        for name in fitting[1:]:
            if not _are_numbered(fitting[0], name):
                raise UsageError(
                    f"{path}: {layer} can be {fitting[0]} or {name}, which have equal "
                    "shapes; rename all layers in the file to the network's names, such as "
                    f"{layer}, or read it with from_torch(..., layers=...), which says their "
                    "order, and save the variables with to_torch"
                )
        names.remove(fitting[0])
        pairs += [(leaf, f"{fitting[0]}.{leaf.torch_name}".lstrip(".")) for leaf in leaves]
    if names:
        text = f"{names[0]} with {_text(foreign[names[0]])}"
        raise UsageError(f"{path} also has {text}, which has no layer here; {_REMEDY}")
    return pairs


def _rank(shapes: _Shapes) -> int:
    """Returns the number of axes of a layer's weight, which tells its kind."""
    return len(shapes.get("weight", (0,)))


def _text(shapes: _Shapes) -> str:
    return ", ".join(f"{name} {list(shapes[name])}" for name in _NORM.values() if name in shapes)


def _natural(name: str) -> list[Any]:
    """Returns a sort key: numbers in a name count as numbers, and come before no number."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)] + [math.inf]


def _are_numbered(first: str, second: str) -> bool:
    """Returns True if the first difference of two names is between two numbers."""
    pairs = zip(_natural(first), _natural(second), strict=False)
    return isinstance(next(max(a, b) for a, b in pairs if a != b), int)
