"""A network of your own, a Flax linen or NNX module, as one of ours.

Ours are called (x, train, mask); a module of your own with what it asks for of train, training,
deterministic and so on, or with x alone. Its BatchNorm is given the mask of a batch's examples, and
in training it has random numbers. The order of its layers, and its head, which is the last of them,
are those of its calls, unless it has `layers`, a tuple of names, or `head`, a name, itself.
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
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks import tracing
from fedjax_pfl.networks.lowerings.conv import lowering

PyTree = Any
_TRAIN = ("train", "training", "is_training")
_EVALUATE = ("deterministic", "evaluate", "inference")


@dataclasses.dataclass(frozen=True)
class UserNetwork(abc.ABC):
    """A module as a network of ours."""

    name: str  # as configurations call it
    settings: Mapping[str, Any]  # of what it was made with, among them the digest of its code
    made: Any  # a linen module; or, of NNX, what makes one of random numbers
    input_shape: tuple[int, ...] = ()
    input_dtype: str = "float32"
    conv: str = "auto"  # how its convolutions are computed, where they say nothing themselves

    @abc.abstractmethod
    def init(self, key: jax.Array, x: jax.Array) -> dict[str, PyTree]:
        """First variables, in nested dicts: `params`, and `batch_stats` where it has some."""

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
        """As a linen module's own; `mask` is bool [B], false where there is no example."""

    @property
    @abc.abstractmethod
    def module(self) -> Any:
        """The module, to be looked at."""

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """Names of all layers, in the order in which they are called."""
        shapes = jax.eval_shape(lambda: self.init(jax.random.key(0), self._example))
        found = tracing.layers_in_order(self.apply, shapes, self._example)
        said = getattr(self.module, "layers", ())
        if not (said and isinstance(said, tuple) and all(isinstance(one, str) for one in said)):
            return found
        if set(said) != set(found):
            raise UsageError(
                f"{self.name}.layers names {', '.join(said)}; its layers are {', '.join(found)}: "
                "name all of them and no others, or leave layers out"
            )
        return said

    @cached_property
    def head(self) -> str:
        """Name of the last layer, the one that knows the classes."""
        said = getattr(self.module, "head", None)
        if not isinstance(said, str):
            return self.layers[-1]
        if said not in self.layers:
            raise UsageError(
                f"{self.name}.head is {said!r}; choose one of its layers {', '.join(self.layers)}, "
                f"or leave head out"
            )
        return said

    @property
    def _example(self) -> jax.Array:
        return jnp.zeros((2, *self.input_shape), self.input_dtype)

    def _how(self, train: bool) -> dict[str, bool]:
        """What it asks for of whether it trains."""
        asked = inspect.signature(self.module.__call__).parameters
        wanted = dict.fromkeys(_TRAIN, train) | dict.fromkeys(_EVALUATE, not train)
        return {name: value for name, value in wanted.items() if name in asked}


@dataclasses.dataclass(frozen=True)
class LinenNetwork(UserNetwork):
    """A linen module."""

    @property
    def module(self) -> nn.Module:
        """The module itself."""
        return self.made

    def init(self, key: jax.Array, x: jax.Array) -> dict[str, PyTree]:
        keys = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        variables = meta.unbox(unfreeze(self.made.init(keys, x, **self._how(False))))
        for kind in variables:
            if kind not in ("params", "batch_stats"):
                raise UsageError(
                    f"{self.name} keeps {kind} beside its parameters; keep them as batch_stats, or "
                    "leave them out"
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
        def ours(call: Any, arguments: Any, more: Any, context: Any) -> Any:
            layer, called = context.module, context.method_name == "__call__"
            if called and isinstance(layer, nn.BatchNorm) and train and more.get("mask") is None:
                more = {**more, "mask": spread_mask(self.name, mask, arguments[0])}
            if called and isinstance(layer, nn.Conv) and layer.conv_general_dilated is None:
                object.__setattr__(layer, "conv_general_dilated", lowering(self.conv))
            return call(*arguments, **more)

        # Whatever else it asks for by name is drawn from `params`, as Flax has it.
        keys = rngs and {**rngs, "params": jax.random.fold_in(rngs["dropout"], 2)}
        with nn.intercept_methods(ours):
            return self.made.apply(variables, x, rngs=keys, mutable=mutable, **self._how(train))


def spread_mask(name: str, mask: jax.Array | None, x: jax.Array) -> jax.Array | None:
    """The mask with the rank of what BatchNorm sees; all, where no example is one."""
    if mask is None:
        return None
    if x.shape[0] != mask.shape[0]:
        raise UsageError(
            f"the BatchNorm of {name} sees {list(x.shape)}, whose first axis is not the "
            f"{mask.shape[0]} examples of a batch; normalise before axes are folded, or use "
            "LayerNorm or GroupNorm"
        )
    return (mask | ~jnp.any(mask)).reshape(-1, *(1,) * (x.ndim - 1))


def draws(name: str) -> str:
    """What is said where a network draws random numbers in evaluation."""
    return (
        f"{name} draws random numbers when it is evaluated, where there are none; let its "
        "__call__ take train, and give Dropout deterministic=not train"
    )


def check(name: str, model: Any, x: Any) -> Any:
    """The outputs' shape for examples like x; UsageError where it cannot be evaluated or trained.

    name: as the configuration calls it. x: its shape will do.
    """
    key = jax.eval_shape(jax.random.key, 0)
    variables = dict(jax.eval_shape(model.init, key, x))
    mask = jax.ShapeDtypeStruct(x.shape[:1], jnp.bool_)
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables.get("params", {})):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            raise UsageError(f"{name} has {where}, a parameter of {leaf.dtype}; use real numbers")
    if not variables.get("params"):
        raise UsageError(f"{name} has no parameters; there is nothing to train")

    def train(variables: PyTree, x: Any, mask: Any, key: Any) -> Any:
        changing = [kind for kind in variables if kind != "params"]
        how = {"train": True, "mask": mask, "rngs": {"dropout": key}}
        return model.apply(variables, x, mutable=changing, **how)

    try:
        evaluated = jax.eval_shape(lambda v, x: model.apply(v, x), variables, x)
    except Exception as error:
        if "RngError" in type(error).__name__:
            raise UsageError(draws(name)) from None
        if "ModifyScope" in type(error).__name__:
            raise UsageError(
                f"{name} changes batch_stats when it is evaluated; let its __call__ take train, "
                "and give BatchNorm use_running_average=not train"
            ) from None
        raise
    trained, rest = jax.eval_shape(train, variables, x, mask, key)
    if getattr(trained, "shape", None) != getattr(evaluated, "shape", None):
        shapes = [list(getattr(outputs, "shape", ())) for outputs in (trained, evaluated)]
        raise UsageError(
            f"{name} has outputs {shapes[0]} when it trains and {shapes[1]} when it is evaluated; "
            "return one array of the same shape, whatever train is"
        )
    for kind, tree in variables.items():
        if kind != "params" and not trees.same_shapes(tree, rest[kind]):
            raise UsageError(
                f"{name} has other shapes or types of {kind} after a step of training than before; "
                "update them in place, without another shape or type"
            )
    return evaluated


def check_tokens(name: str, model: Any, x: np.ndarray) -> tuple[int, int] | None:
    """A token that the network has no row for, as (where in x, rows); None where there is none."""
    shape = jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype)
    variables = jax.eval_shape(model.init, jax.eval_shape(jax.random.key, 0), shape)
    rows = tracing.embedded(lambda v, x: model.apply(v, x), variables, shape)
    if rows is None:
        return None
    wrong = (x < 0) | (x >= rows)
    return (int(np.argmax(wrong)), rows) if wrong.any() else None
