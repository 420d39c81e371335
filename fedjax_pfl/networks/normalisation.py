"""What networks share: masked batch normalisation, and which layers are of which kind."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.core import trees


def batch_norm(x: jax.Array, train: bool, mask: jax.Array | None, name: str) -> jax.Array:
    """Batch normalisation over all axes but the last, from inside a compact module.

    x: [B, ..., C]; mask: bool [B], the examples that statistics are taken from. A batch without a
    single one is normalised by all of it, so that it stays finite until its step is discarded.

    Deviations: the running variance averages the biased batch variance, PyTorch's the unbiased one.
    """
    if mask is not None:
        mask = (mask | ~jnp.any(mask)).reshape(-1, *(1,) * (x.ndim - 1))
    norm = nn.BatchNorm(
        use_running_average=not train,
        momentum=0.9,  # PyTorch counts from the other side: its default is 0.1
        epsilon=1e-5,
        use_fast_variance=False,  # E[x²] − E[x]² cancels; what it saves is small
        name=name,
    )
    return norm(x, mask=mask)


def norm_layers(variables: Any) -> frozenset[str]:
    """Names of the normalisation layers, as `trees.layer_name` gives them.

    They are found by what they are, modules that keep batch statistics, and not by their names.
    """
    return frozenset(trees.layers(variables.get("batch_stats", {})))
