"""User-defined NNX modules. A separate file, because importing NNX takes long."""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import conv_general_dilated as default_convolution

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.jaxprs import depends_on
from fedjax_pfl.networks.lowerings.conv import lowering
from fedjax_pfl.networks.user_defined import (
    PyTree,
    UserNetwork,
    random_evaluation_error,
    spread_mask,
)


class _Variable(NamedTuple):
    """A variable of an NNX module, without its value."""

    collection: str | None  # params or batch_stats; None for random states
    path: tuple[Any, ...]  # keys of the variable in the module's state
    shape: Any  # the NNX variable with a shape as its value


@dataclasses.dataclass(frozen=True)
class NnxNetwork(UserNetwork):
    """A user's NNX module. Its Param are `params`, its BatchStat are `batch_stats`."""

    @cached_property
    def module(self) -> nnx.Module:
        """The module with shapes instead of values."""
        return nnx.eval_shape(lambda: self.definition(nnx.Rngs(0)))

    @cached_property
    def _structure(self) -> tuple[Any, list[_Variable]]:
        """Graph definition of the module, as from `nnx.split`, and its variables.

        Raises UsageError for variables other than Param and BatchStat.
        """
        structure, state = nnx.split(self.module)
        variables = []
        for path, variable in nnx.to_flat_state(state):
            if isinstance(variable, nnx.RngState):
                collection = None
            elif isinstance(variable, nnx.Param):
                collection = "params"
            elif isinstance(variable, nnx.BatchStat):
                collection = "batch_stats"
            else:
                raise UsageError(
                    f"{self.name} has {'/'.join(map(str, path))}, which is a "
                    f"{type(variable).__name__}; what it keeps can be Param or BatchStat only"
                )
            variables.append(_Variable(collection, path, variable))
        return structure, variables

    def init(self, key: jax.Array, x: jax.Array) -> dict[str, PyTree]:
        """Returns initial variables; `x` is ignored."""
        del x
        return self._values(self.definition(nnx.Rngs(key)))

    def _values(self, module: nnx.Module) -> dict[str, PyTree]:
        """Returns the values of a module's variables as nested dicts, by collection."""
        state = dict(nnx.to_flat_state(nnx.state(module)))
        values: dict[str, PyTree] = {}
        for collection, path, _ in self._structure[1]:
            if collection is not None:
                node = values.setdefault(collection, {})
                for key in path[:-1]:
                    node = node.setdefault(str(key), {})
                node[str(path[-1])] = state[path].get_value()
        return values

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
        """Implements `UserNetwork.apply`; sets BatchNorm's mask and the convolutions' lowering.

        Raises UsageError if the module uses random numbers in evaluation.
        """
        dropout_key = rngs["dropout"] if rngs else jax.random.key(0)

        def call(key: jax.Array) -> tuple[Any, nnx.Module, bool]:
            return self._call(variables, x, train, mask, key)

        outputs, module, uses_keys = call(dropout_key)
        # Recurrent cells take a key for their initial state, which is usually zero.
        if not train and uses_keys and depends_on(lambda key: call(key)[0], dropout_key):
            raise random_evaluation_error(self.name)
        if mutable is False:
            return outputs
        values = self._values(module)
        return outputs, {collection: values[collection] for collection in mutable}

    def _call(
        self,
        variables: PyTree,
        x: jax.Array,
        train: bool,
        mask: jax.Array | None,
        dropout_key: jax.Array,
    ) -> tuple[Any, nnx.Module, bool]:
        """Returns the outputs, the module after its call, and whether it took random keys."""
        structure, parts = self._structure
        state, random_states = {}, []
        for i, (collection, path, variable) in enumerate(parts):
            value: Any = None if collection is None else variables[collection]
            if isinstance(variable, nnx.RngKey):
                value = jax.random.fold_in(dropout_key, i)
            elif collection is None:
                value = jnp.zeros(variable.get_value().shape, variable.get_value().dtype)
            else:
                for key in path:
                    value = value[str(key)]
            state[path] = variable.replace(value)
            random_states += [(path, value)] if collection is None else []
        module = nnx.merge(structure, nnx.from_flat_state(state))
        module.train() if train else module.eval()
        for _, layer in nnx.iter_modules(module):
            if isinstance(layer, nnx.Conv) and layer.conv_general_dilated is default_convolution:
                layer.conv_general_dilated = lowering(self.conv)
            if isinstance(layer, nnx.BatchNorm) and train and mask is not None:
                _set_mask(self.name, layer, mask)
        outputs = module(x, **self._flags(train))
        new_states = dict(nnx.to_flat_state(nnx.state(module, nnx.RngState)))
        uses_keys = any(new_states[path].get_value() is not value for path, value in random_states)
        return outputs, module, uses_keys


def _set_mask(name: str, norm: nnx.BatchNorm, mask: jax.Array) -> None:
    """Makes the layer `norm` of the network `name` use the mask [B], in place.

    The layer exists only for one call.
    """
    norm_class = type(norm)

    def call(self: Any, x: Any, *arguments: Any, **options: Any) -> Any:
        options["mask"] = spread_mask(name, mask, x)
        return norm_class.__call__(self, x, *arguments, **options)

    masked_class = type(norm_class.__name__, (norm_class,), {"__call__": call})
    object.__setattr__(norm, "__class__", masked_class)
