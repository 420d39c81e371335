"""A network with convolutions over time."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks import init
from fedjax_pfl.networks.lowerings.conv import max_pool
from fedjax_pfl.networks.normalisation import BatchNorm


class CNN1D(nn.Module):
    """Convolutions with ReLU and pooling of two time steps, a mean over time and a linear head.

    Layers are conv1, conv2, ... and fc1; with `batch_norm` norm1, norm2, ... follow the
    convolutions. Kernels are [kernel_size, 1, inputs, outputs]. Convolutions keep the length of a
    window; pooling drops the last step of an odd length.

    Args:
      kernels: Number of kernels of each convolution.
      kernel_size: Time steps of a kernel.
      batch_norm: Whether BatchNorm follows each convolution.
    """

    outputs: int = 10
    kernels: tuple[int, ...] = (32, 64)
    kernel_size: int = 5
    batch_norm: bool = False
    conv: str = "auto"  # lowering of convolutions, see `lowerings.conv`
    head = "fc1"  # name of the last layer

    @property
    def layers(self) -> tuple[str, ...]:
        kinds = ("conv", "norm") if self.batch_norm else ("conv",)
        body = (f"{kind}{i}" for i in range(1, len(self.kernels) + 1) for kind in kinds)
        return (*body, self.head)

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: init.Mask = None) -> jax.Array:
        """Maps [B, T, C] to [B, outputs]; `mask` is bool [B], False for padding."""
        x = x[:, :, None]
        for i, kernels in enumerate(self.kernels, 1):
            layer = init.conv(
                x.shape[-1],
                kernels,
                (self.kernel_size, 1),
                f"conv{i}",
                padding="SAME",
                lowered=self.conv,
            )
            x = layer(x)
            if self.batch_norm:
                x = BatchNorm((2, 1), name=f"norm{i}")(x, train, mask)
            else:
                x = max_pool(x, (2, 1))
            x = nn.relu(x)
        if x.shape[1] == 0:
            raise UsageError(
                f"{len(self.kernels)} poolings leave no step of these windows: use windows of "
                f"{2 ** len(self.kernels)} steps or more, or fewer cnn1d.kernels"
            )
        x = jnp.mean(x, (1, 2))
        return init.dense(x.shape[-1], self.outputs, self.head)(x)
