"""Batch normalisation that ignores padding."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.core import trees


def batch_norm(x: jax.Array, train: bool, mask: jax.Array | None, name: str) -> jax.Array:
    """Applies BatchNorm over all axes but the last, inside a Flax module. Keeps the shape.

    Deviations: the running variance averages biased batch variances; PyTorch averages unbiased
    ones.

    `x` is [B, ..., C]. With `train`, statistics are those of the examples in `mask`, bool [B], and
    the running ones are updated. If there are no examples, all rows are used, which keeps values
    finite until the step is discarded.
    """
    if mask is not None:
        mask = (mask | ~jnp.any(mask)).reshape(-1, *(1,) * (x.ndim - 1))
    norm = nn.BatchNorm(
        use_running_average=not train,
        momentum=0.9,  # PyTorch's momentum is 1 minus this
        epsilon=1e-5,
        use_fast_variance=False,  # E[x²] − E[x]² loses digits and saves little time
        name=name,
    )
    return norm(x, mask=mask)


def norm_layers(variables: Any) -> frozenset[str]:
    """Returns the names of the layers with batch statistics, as in `trees.layer_name`."""
    return frozenset(trees.layers(variables.get("batch_stats", {})))
