"""An NNX module as a network of ours; imported when a caller brings one, for NNX takes long to."""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import conv_general_dilated as plain_convolution

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks.lowerings.conv import lowering
from fedjax_pfl.networks.user_defined import PyTree, UserNetwork, draws, spread_mask


@dataclasses.dataclass(frozen=True)
class NnxNetwork(UserNetwork):
    """What makes an NNX module; its Param are `params`, its BatchStat `batch_stats`."""

    @cached_property
    def module(self) -> nnx.Module:
        """One without values."""
        return nnx.eval_shape(lambda: self.made(nnx.Rngs(0)))

    @cached_property
    def _parts(self) -> tuple[Any, list[tuple[str | None, tuple[Any, ...], Any]]]:
        """Its structure; and of each of its variables the collection (None: random), path, form."""
        structure, state = nnx.split(self.module)
        found: list[tuple[str | None, tuple[Any, ...], Any]] = []
        for path, variable in nnx.to_flat_state(state):
            if isinstance(variable, nnx.RngState):
                found.append((None, path, variable))
            elif isinstance(variable, nnx.Param):
                found.append(("params", path, variable))
            elif isinstance(variable, nnx.BatchStat):
                found.append(("batch_stats", path, variable))
            else:
                where = "/".join(map(str, path))
                kind = type(variable).__name__
                raise UsageError(
                    f"{self.name} has {where}, which is a {kind}; what it keeps can be Param or "
                    "BatchStat only"
                )
        return structure, found

    def init(self, key: jax.Array, x: jax.Array) -> dict[str, PyTree]:
        del x
        return self._variables(self.made(nnx.Rngs(key)))

    def _variables(self, module: nnx.Module) -> dict[str, PyTree]:
        state = dict(nnx.to_flat_state(nnx.state(module)))
        made: dict[str, PyTree] = {}
        for kind, path, _ in self._parts[1]:
            if kind is not None:
                place = made.setdefault(kind, {})
                for word in path[:-1]:
                    place = place.setdefault(str(word), {})
                place[str(path[-1])] = state[path].get_value()
        return made

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
        structure, parts = self._parts
        key = rngs["dropout"] if rngs else jax.random.key(0)
        state, begun = {}, []
        for i, (kind, path, variable) in enumerate(parts):
            value: Any = None if kind is None else variables[kind]
            if isinstance(variable, nnx.RngKey):
                value = jax.random.fold_in(key, i)
            elif kind is None:
                value = jnp.zeros(variable.get_value().shape, variable.get_value().dtype)
            else:
                for word in path:
                    value = value[str(word)]
            state[path] = variable.replace(value)
            begun += [(path, value)] if kind is None else []
        module = nnx.merge(structure, nnx.from_flat_state(state))
        module.train() if train else module.eval()
        for _, layer in nnx.iter_modules(module):
            if isinstance(layer, nnx.Conv) and layer.conv_general_dilated is plain_convolution:
                layer.conv_general_dilated = lowering(self.conv)
            if isinstance(layer, nnx.BatchNorm) and train and mask is not None:
                _give_mask(self.name, layer, mask)
        outputs = module(x, **self._how(train))
        if not train:
            after = dict(nnx.to_flat_state(nnx.state(module, nnx.RngState)))
            if any(after[path].get_value() is not value for path, value in begun):
                raise UsageError(draws(self.name))
        if mutable is False:
            return outputs
        changed = self._variables(module)
        return outputs, {kind: changed[kind] for kind in mutable}


def _give_mask(name: str, norm: nnx.BatchNorm, mask: jax.Array) -> None:
    """Let a BatchNorm, which is thrown away after the call that it is made for, know the mask."""
    plain = type(norm)

    def call(self: Any, x: Any, *more: Any, **how: Any) -> Any:
        return plain.__call__(self, x, *more, **{**how, "mask": spread_mask(name, mask, x)})

    object.__setattr__(norm, "__class__", type(plain.__name__, (plain,), {"__call__": call}))
