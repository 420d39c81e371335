"""Batch normalisation that ignores padding."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from fedjax_pfl.core import trees
from fedjax_pfl.networks.lowerings.conv import max_pool

_MOMENTUM = 0.9  # PyTorch's momentum is 1 minus this
_EPSILON = 1e-5


class BatchNorm(nn.Module):
    """Normalises [B, ..., C] over all axes but the last, with statistics of the batch in training.

    Parameters and statistics are as in `flax.linen.BatchNorm`.

    Deviations: the running variance averages biased batch variances; PyTorch averages unbiased
    ones.

    Args:
      pool: Window of a max pooling of the normalised images [B, H, W, C], see `max_pool`.
    """

    pool: tuple[int, int] | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
        """Returns normalised values, in training after an update of the running statistics.

        `mask` is bool [B]; examples outside do not count. If there are no others, all rows count,
        which keeps values finite until the step is discarded.
        """
        channels, row = x.shape[-1:], (*(1,) * (x.ndim - 1), -1)
        scale = self.param("scale", nn.initializers.ones, channels).reshape(row)
        bias = self.param("bias", nn.initializers.zeros, channels).reshape(row)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, channels)
        running_var = self.variable("batch_stats", "var", jnp.ones, channels)
        mean, variance = running_mean.value.reshape(row), running_var.value.reshape(row)
        if train:
            if mask is not None:
                mask = (mask | ~jnp.any(mask)).reshape(-1, *(1,) * (x.ndim - 1))
            mean = _mean(x, mask)
            variance = _variance(x, mean, mask)
            if not self.is_initializing():
                for running, value in ((running_mean, mean), (running_var, variance)):
                    new = (1 - _MOMENTUM) * value.reshape(channels)
                    running.value = _MOMENTUM * running.value + new
        if self.pool:
            # The rest is monotone in x for each channel. Pooled images are smaller, so it is faster
            # after pooling. Where a scale is negative, the largest result is that of the least x.
            sign = jnp.where(scale < 0, -1.0, 1.0).astype(x.dtype)
            x = sign * max_pool(sign * x, self.pool)
        return (x - mean) * (lax.rsqrt(variance + _EPSILON) * scale) + bias


def _mean(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Returns the mean over all axes but the last, [1, ..., C], where `mask` is True."""
    return jnp.mean(x.astype(jnp.float32), tuple(range(x.ndim - 1)), where=mask, keepdims=True)


@jax.custom_jvp
def _variance(x: jax.Array, mean: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Returns the biased variance around `mean`, which must be that of `_mean`."""
    # E[x²] − E[x]² would lose digits and save little time.
    return _mean(jnp.square(x - mean), mask)


@_variance.defjvp
def _variance_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """Leaves out the tangent of the mean, whose factor is the mean of x − mean: 0."""
    x, mean, mask = primals
    return _variance(x, mean, mask), _mean(2 * (x - mean) * tangents[0], mask)


def norm_layers(variables: Any) -> frozenset[str]:
    """Returns the names of the layers with batch statistics, as in `trees.layer_name`."""
    return frozenset(trees.layers(variables.get("batch_stats", {})))
