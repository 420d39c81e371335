"""ResNet9 of the Factorized-FL paper."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.networks import init
from fedjax_pfl.networks.normalisation import BatchNorm


class ResNet9(nn.Module):
    """Eight convolutions without bias, each with BatchNorm and ReLU, and a linear head.

    Layers are conv1, norm1, ..., conv8, norm8, fc1. With 10 outputs on three channels there are
    2,574,282 numbers: 2,565,824 in kernels, 5,888 in BatchNorm, 2,570 in the head.

    References: the network of Jeong and Hwang, Factorized-FL (2022), as in their public code.

    Args:
      width: Number of kernels of the first convolution. Later ones have up to 4x as many.
    """

    outputs: int = 10
    width: int = 64
    conv: str = "auto"  # lowering of convolutions, see `lowerings.conv`
    head = "fc1"  # name of the last layer

    @property
    def layers(self) -> tuple[str, ...]:
        return (*(f"{kind}{i}" for i in range(1, 9) for kind in ("conv", "norm")), self.head)

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: init.Mask = None) -> jax.Array:
        """Maps [B, H, W, C] to [B, outputs]; `mask` is bool [B], False for padding."""

        def block(
            x: jax.Array,
            i: int,
            kernels: int,
            size: int = 3,
            stride: int = 1,
            padding: str = "SAME",
            pool: tuple[int, int] | None = None,
        ) -> jax.Array:
            """Applies convolution i, BatchNorm, max pooling and ReLU to x [B, H, W, C]."""
            # SAME would pad a convolution with stride 2 on one side only.
            pads = (((size // 2,) * 2,) * 2) if padding == "SAME" else padding
            layer = init.conv(
                x.shape[-1],
                kernels,
                (size, size),
                f"conv{i}",
                strides=(stride, stride),
                padding=pads,
                bias=False,
                lowered=self.conv,
            )
            return nn.relu(BatchNorm(pool, name=f"norm{i}")(layer(x), train, mask))

        w = self.width
        x = block(block(x, 1, w), 2, 2 * w, size=5, stride=2)
        x = x + block(block(x, 3, 2 * w), 4, 2 * w)
        x = block(x, 5, 4 * w, pool=(2, 2))
        x = x + block(block(x, 6, 4 * w), 7, 4 * w)
        x = jnp.max(block(x, 8, 4 * w, padding="VALID"), (1, 2))
        return init.dense(x.shape[-1], self.outputs, self.head)(x)
