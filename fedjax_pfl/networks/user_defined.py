"""User-defined networks: Flax linen or NNX modules with the interface of built-in networks.

Built-in networks are called (x, train, mask). A user's module is called with x and those of train,
training, deterministic and so on that it has. If its arguments are x, train and mask, it also gets
the mask. Its BatchNorm layers get the mask of the batch, and it has random numbers in training.
Layers are in the order of their calls and the head is the last, unless the module has attributes
`layers`, a tuple of names, or `head`, a name.
"""

import abc
import dataclasses
import inspect
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta, unfreeze

from fedjax_pfl.core import trees
from fedjax_pfl.core.errors import UsageError, first_line
from fedjax_pfl.networks import tracing
from fedjax_pfl.networks.lowerings.conv import lowering

PyTree = Any
_TRAINING_FLAGS = ("train", "training", "is_training")
_EVALUATION_FLAGS = ("deterministic", "evaluate", "inference")


@dataclasses.dataclass(frozen=True)
class UserNetwork(abc.ABC):
    """A user's module with the interface of a built-in network."""

    name: str  # in configurations
    settings: Mapping[str, Any]  # arguments of the module, and the digest of its code
    definition: Any  # a linen module, or a function nnx.Rngs -> NNX module
    input_shape: tuple[int, ...] = ()  # of one example
    input_dtype: str = "float32"
    conv: str = "auto"  # lowering of convolutions that do not choose one themselves

    @abc.abstractmethod
    def init(self, key: jax.Array, x: jax.Array) -> dict[str, PyTree]:
        """Returns variables for x [B, ...] as nested dicts: `params`, and `batch_stats` if any."""

    @abc.abstractmethod
    def apply(
        self,
        variables: PyTree,
        x: jax.Array,
        train: bool = False,
        mask: jax.Array | None = None,
        *,
        rngs: Mapping[str, jax.Array] | None = None,
        mutable: Any = False,
    ) -> Any:
        """Applies the module.

        Args:
          variables: As returned by `init`.
          x: Examples [B, ...].
          train: Whether this is a training step.
          mask: bool [B], False for padding.
          rngs: Random key `dropout`, required in training.
          mutable: Collections to return, or False.

        Returns:
          The outputs, or (outputs, updated collections) if `mutable` is given.
        """

    @property
    @abc.abstractmethod
    def module(self) -> Any:
        """The module, to read attributes and signature; of NNX with shapes instead of values."""

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """Names of all layers, in the order of their calls."""
        shapes = jax.eval_shape(lambda: self.init(jax.random.key(0), self._example))
        traced = tracing.layers_in_order(self.apply, shapes, self._example)
        names = getattr(self.module, "layers", ())
        if not (names and isinstance(names, tuple) and all(isinstance(n, str) for n in names)):
            return traced
        if set(names) != set(traced):
            raise UsageError(
                f"{self.name}.layers names {', '.join(names)}; its layers are "
                f"{', '.join(traced)}: name all of them and no others, or leave layers out"
            )
        return names

    @cached_property
    def head(self) -> str:
        """Name of the last layer."""
        name = getattr(self.module, "head", None)
        if not isinstance(name, str):
            return self.layers[-1]
        if name not in self.layers:
            raise UsageError(
                f"{self.name}.head is {name!r}; choose one of its layers {', '.join(self.layers)}, "
                f"or leave head out"
            )
        return name

    @property
    def _example(self) -> jax.Array:
        return jnp.zeros((2, *self.input_shape), self.input_dtype)

    def _mask(self, mask: jax.Array | None) -> dict[str, jax.Array | None]:
        """Returns the mask as an argument if the module is called like a built-in network."""
        accepted = list(inspect.signature(self.module.__call__).parameters)
        return {"mask": mask} if accepted == ["x", "train", "mask"] else {}

    def _flags(self, train: bool) -> dict[str, bool]:
        """Returns the flags, such as train or deterministic, that the module's call accepts."""
        accepted = inspect.signature(self.module.__call__).parameters
        flags = dict.fromkeys(_TRAINING_FLAGS, train) | dict.fromkeys(_EVALUATION_FLAGS, not train)
        return {name: value for name, value in flags.items() if name in accepted}


@dataclasses.dataclass(frozen=True)
class LinenNetwork(UserNetwork):
    """A user's linen module."""

    @property
    def module(self) -> nn.Module:
        """The linen module."""
        return self.definition

    def init(self, key: jax.Array, x: jax.Array) -> dict[str, PyTree]:
        """Returns initial variables of the module for examples x [B, ...].

        Raises UsageError if it has collections other than `params` and `batch_stats`.
        """
        keys = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        options = {**self._flags(False), **self._mask(None)}
        variables = meta.unbox(unfreeze(self.definition.init(keys, x, **options)))
        for collection in variables:
            if collection not in ("params", "batch_stats"):
                raise UsageError(
                    f"{self.name} keeps {collection} besides its parameters; keep them as "
                    "batch_stats, or leave them out"
                )
        return dict(variables)

    def apply(
        self,
        variables: PyTree,
        x: jax.Array,
        train: bool = False,
        mask: jax.Array | None = None,
        *,
        rngs: Mapping[str, jax.Array] | None = None,
        mutable: Any = False,
    ) -> Any:
        """Implements `UserNetwork.apply`; sets BatchNorm's mask and the convolutions' lowering."""

        def intercept(call: Any, arguments: Any, options: Any, context: Any) -> Any:
            layer, is_call = context.module, context.method_name == "__call__"
            no_mask = options.get("mask") is None
            if is_call and isinstance(layer, nn.BatchNorm) and train and no_mask:
                inputs = arguments[0] if arguments else options["x"]
                options = {**options, "mask": spread_mask(self.name, mask, inputs)}
            if is_call and isinstance(layer, nn.Conv) and layer.conv_general_dilated is None:
                object.__setattr__(layer, "conv_general_dilated", lowering(self.conv))
            return call(*arguments, **options)

        # Flax falls back to the key `params` for random numbers of other names.
        keys = rngs and {**rngs, "params": jax.random.fold_in(rngs["dropout"], 2)}
        with nn.intercept_methods(intercept):
            return self.definition.apply(
                variables, x, rngs=keys, mutable=mutable, **self._flags(train), **self._mask(mask)
            )


def spread_mask(name: str, mask: jax.Array | None, x: jax.Array) -> jax.Array | None:
    """Returns the mask [B] of a batch in the shape that BatchNorm takes for its input x [B, ...].

    It is bool [B, 1, ...] with the rank of x, all True if the batch is all padding; None without
    mask. Raises UsageError, which names the network, if x has another first axis.
    """
    if mask is None:
        return None
    if x.shape[0] != mask.shape[0]:
        raise UsageError(
            f"the BatchNorm of {name} sees {list(x.shape)}, whose first axis is not the "
            f"{mask.shape[0]} examples of a batch; normalise before axes are folded, or use "
            "LayerNorm or GroupNorm"
        )
    return (mask | ~jnp.any(mask)).reshape(-1, *(1,) * (x.ndim - 1))


def random_evaluation_error(name: str) -> UsageError:
    """Returns the UsageError for the network `name`, which needs random numbers in evaluation."""
    return UsageError(
        f"{name} draws random numbers when it is evaluated, where there are none; let its "
        "__call__ take train, and give Dropout deterministic=not train"
    )


def check_network(name: str, model: Any, x: Any) -> Any:
    """Checks by tracing that a user's network can be evaluated and trained, or raises UsageError.

    `x` are examples [B, ...], or a ShapeDtypeStruct of them. Returns a ShapeDtypeStruct of the
    outputs, [B, outputs] or [B, T, outputs].
    """
    key = jax.eval_shape(jax.random.key, 0)
    variables = dict(jax.eval_shape(model.init, key, x))
    mask = jax.ShapeDtypeStruct(x.shape[:1], jnp.bool_)
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables.get("params", {})):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            keys = jax.tree_util.keystr(path, simple=True, separator="/")
            raise UsageError(f"{name} has {keys}, a parameter of {leaf.dtype}; use real numbers")
    params = variables.get("params", {})
    if "kernel" in params and not any(isinstance(part, Mapping) for part in params.values()):
        raise UsageError(
            f"{name} is a layer and no network: its kernel and bias would count as two layers; use "
            "it in a module, such as nn.Sequential([nn.Dense(10)])"
        )
    if not variables.get("params"):
        raise UsageError(f"{name} has no parameters; there is nothing to train")

    def train(variables: PyTree, x: Any, mask: Any, key: Any) -> Any:
        mutable = [collection for collection in variables if collection != "params"]
        return model.apply(
            variables, x, train=True, mask=mask, rngs={"dropout": key}, mutable=mutable
        )

    try:
        evaluated = jax.eval_shape(lambda v, x: model.apply(v, x), variables, x)
    except Exception as error:
        if "RngError" in type(error).__name__:
            raise random_evaluation_error(name) from None
        if "ModifyScope" in type(error).__name__:
            raise UsageError(
                f"{name} changes batch_stats when it is evaluated; let its __call__ take train, "
                "and give BatchNorm use_running_average=not train"
            ) from None
        raise
    trained, updated = jax.eval_shape(train, variables, x, mask, key)
    if getattr(trained, "shape", None) != getattr(evaluated, "shape", None):
        shapes = [list(getattr(outputs, "shape", ())) for outputs in (trained, evaluated)]
        raise UsageError(
            f"{name} has outputs {shapes[0]} when it trains and {shapes[1]} when it is evaluated; "
            "return one array of the same shape in both"
        )
    for collection, tree in variables.items():
        if collection != "params" and not trees.same_shapes(tree, updated[collection]):
            raise UsageError(
                f"{name} changes shapes or types of {collection} in a training step; update them "
                "in place, without another shape or type"
            )
    return evaluated


def check_fits(name: str, model: Any, examples: Any) -> Any:
    """Returns `check_network`, and raises UsageError for every exception of the network too."""
    try:
        return check_network(name, model, examples)
    except UsageError:
        raise
    except Exception as error:  # Flax raises any type if an input does not suit a layer
        line = first_line(error)
        hint = "; an NNX module has Dropout(..., rngs=rngs)" if "rngs" in line else ""
        raise UsageError(f"{name} fails for examples {examples.shape[1:]}: {line}{hint}") from error


def check_output_shape(name: str, outputs: Any, output_shape: tuple[int, ...]) -> None:
    """Raises UsageError if outputs for two examples do not suit the task of a federation.

    `outputs` is what `check_network` returns for the network `name`, and `output_shape` is the
    federation's.
    """
    expected = (2, *output_shape)
    if getattr(outputs, "shape", None) != expected:
        unit = (
            "each class, label or target" if len(output_shape) == 1 else "each position and class"
        )
        raise UsageError(
            f"{name} gives {list(getattr(outputs, 'shape', []))} for 2 examples, and their "
            f"task needs {list(expected)}, an output for {unit}"
        )


def check_tokens(model: Any, x: np.ndarray) -> tuple[int, int] | None:
    """Looks for a token in x, int [examples, T], outside the vocabulary of a network.

    Returns (index of the first such token in the flattened x, vocabulary size), or None.
    """
    shape = jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype)
    variables = jax.eval_shape(model.init, jax.eval_shape(jax.random.key, 0), shape)
    rows = tracing.vocabulary_size(lambda v, x: model.apply(v, x), variables, shape)
    if rows is None:
        return None
    out_of_range = (x < 0) | (x >= rows)
    return (int(np.argmax(out_of_range)), rows) if out_of_range.any() else None
