"""LeNet."""

import flax.linen as nn
import jax

from fedjax_pfl.networks import init
from fedjax_pfl.networks.lowerings.conv import max_pool
from fedjax_pfl.networks.normalisation import BatchNorm


class LeNet(nn.Module):
    """Convolutions, each with ReLU and 2x2 pooling, then fully connected layers.

    Layers are conv1, conv2, ..., fc1, fc2, ...; with `batch_norm` norm1, norm2, ... follow
    the convolutions. 121,182 parameters on 32x32x3 images, 85,822 on 28x28x1, with 10 outputs.

    References: the target network of Shamsian et al., "Personalized Federated Learning using
    Hypernetworks" (2021). Deviations: ReLU comes after pooling, which gives the same result.

    Args:
      kernels: Number of kernels of each convolution.
      dense: Number of outputs of each fully connected layer except the last.
      kernel_size: Height and width of a kernel.
      padding: VALID for none, or SAME to keep the size of the image.
      batch_norm: Whether BatchNorm follows each convolution.
    """

    outputs: int = 10
    kernels: tuple[int, ...] = (16, 32)
    dense: tuple[int, ...] = (120, 84)
    kernel_size: int = 5
    padding: str = "VALID"
    batch_norm: bool = False
    conv: str = "auto"  # lowering of convolutions, see `lowerings.conv`

    @property
    def layers(self) -> tuple[str, ...]:
        kinds = ("conv", "norm") if self.batch_norm else ("conv",)
        body = (f"{kind}{i}" for i in range(1, len(self.kernels) + 1) for kind in kinds)
        return (*body, *(f"fc{i}" for i in range(1, len(self.dense) + 2)))

    @property
    def head(self) -> str:
        return f"fc{len(self.dense) + 1}"

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: init.Mask = None) -> jax.Array:
        """Maps [B, H, W, C] to [B, outputs]; `mask` is bool [B], False for padding."""
        window = (self.kernel_size, self.kernel_size)
        for i, kernels in enumerate(self.kernels, 1):
            if self.conv == "fused" and not self.batch_norm:
                x = init.ConvReluPool(kernels, window, self.padding, name=f"conv{i}")(x)
                continue
            layer = init.conv(
                x.shape[-1], kernels, window, f"conv{i}", padding=self.padding, lowered=self.conv
            )
            x = layer(x)
            if self.batch_norm:
                x = BatchNorm((2, 2), name=f"norm{i}")(x, train, mask)
            else:
                x = max_pool(x, (2, 2))
            x = nn.relu(x)
        x = x.reshape(x.shape[0], -1)
        for i, size in enumerate(self.dense, 1):
            x = nn.relu(init.dense(x.shape[-1], size, f"fc{i}")(x))
        return init.dense(x.shape[-1], self.outputs, self.head)(x)
