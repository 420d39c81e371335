"""Convolutions over time, for windows of several channels."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.networks import init
from fedjax_pfl.networks.lowerings.conv import max_pool
from fedjax_pfl.networks.normalisation import batch_norm


class CNN1D(nn.Module):
    """Windows [B, T, C]: convolutions, each with ReLU and pooling of two, their mean over time.

    Layers are conv1, conv2, ... and fc1; with `batch_norm` norm1, norm2, ... follow the
    convolutions. Kernels are [kernel_size, 1, in, out]; a window keeps its length until it is
    pooled, and one of odd length loses its last step there.

    Args:
      kernels: how many each convolution has.
      kernel_size: steps that a kernel sees, an odd number.
      batch_norm: whether BatchNorm follows each convolution.
    """

    outputs: int = 10
    kernels: tuple[int, ...] = (32, 64)
    kernel_size: int = 5
    batch_norm: bool = False
    conv: str = "auto"

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all layers, from the input to the output."""
        kinds = ("conv", "norm") if self.batch_norm else ("conv",)
        early = (f"{kind}{i}" for i in range(1, len(self.kernels) + 1) for kind in kinds)
        return (*early, self.head)

    @property
    def head(self) -> str:
        """Name of the last layer, the one that knows the classes."""
        return "fc1"

    @nn.compact
    def __call__(
        self, x: jax.Array, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        """[B, T, C] and a mask bool [B] of the examples that are not padding -> [B, outputs]."""
        x = x[:, :, None]
        around = ((self.kernel_size // 2,) * 2, (0, 0))
        for i, kernels in enumerate(self.kernels, 1):
            layer = init.conv(
                x.shape[-1],
                kernels,
                (self.kernel_size, 1),
                f"conv{i}",
                padding=around,
                lowered=self.conv,
            )
            x = layer(x)
            if self.batch_norm:
                x = batch_norm(x, train, mask, f"norm{i}")
            x = nn.relu(max_pool(x, (2, 1)))
        x = jnp.mean(x, (1, 2))
        return init.dense(x.shape[-1], self.outputs, self.head)(x)
