"""MobileNet-v2."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.core.errors import require_one_of
from fedjax_pfl.networks import init
from fedjax_pfl.networks.lowerings.conv import lowering
from fedjax_pfl.networks.normalisation import BatchNorm

NORMS = ("batch", "group")  # values of `norm`
_STEM, _LAST = 32, 1280
# (expansion, channels, repeats, stride of the first block)
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_KINDS = ("expand", "depth", "project")
_GROUP = 8  # channels per group of GroupNorm; all widths are multiples of it


class _Block(NamedTuple):
    """Sizes of one inverted residual block."""

    inputs: int  # channels
    inner: int  # channels after the expansion
    outputs: int  # channels
    stride: int


class MobileNet(nn.Module):
    """MobileNet-v2 for any image size; 2,236,682 parameters with 10 outputs and 3 channels.

    Layers are conv1, norm1, then in block i expand{i}, expand_norm{i}, depth{i},
    depth_norm{i}, project{i}, project_norm{i}, then conv2, norm2 and fc1.

    References: Sandler et al., MobileNetV2: Inverted Residuals and Linear Bottlenecks (2018);
    sizes and initialisation as in torchvision's `mobilenet_v2`. Deviations: no pre-trained weights.

    Args:
      width: Factor of the paper's numbers of channels.
      norm: batch, or group, which is independent of the other examples in a batch.
      dropout: Dropout rate before the last layer.
    """

    outputs: int = 10
    width: float = 1.0
    norm: str = "batch"
    dropout: float = 0.2
    conv: str = "auto"  # lowering of convolutions, see `lowerings.conv`
    head = "fc1"  # name of the last layer

    @property
    def layers(self) -> tuple[str, ...]:
        names = ["conv1", "norm1"]
        for i, block in enumerate(self._blocks(), 1):
            kinds = ("depth", "project") if block.inner == block.inputs else _KINDS
            names += [f"{kind}{norm}{i}" for kind in kinds for norm in ("", "_norm")]
        return (*names, "conv2", "norm2", "fc1")

    def _blocks(self) -> list[_Block]:
        """Returns the sizes of all blocks, from the input to the output."""
        blocks, inputs = [], _rounded(_STEM * self.width)
        for expansion, channels, repeats, stride in _STAGES:
            outputs = _rounded(channels * self.width)
            for r in range(repeats):
                block = _Block(
                    inputs=inputs,
                    inner=inputs * expansion,
                    outputs=outputs,
                    stride=1 if r else stride,
                )
                blocks.append(block)
                inputs = outputs
        return blocks

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: init.Mask = None) -> jax.Array:
        """Maps [B, H, W, C] to [B, outputs]; `mask` is bool [B], False for padding."""
        require_one_of("mobilenet.norm", self.norm, NORMS)

        def conv(
            x: jax.Array, outputs: int, name: str, size: int = 1, stride: int = 1, groups: int = 1
        ) -> jax.Array:
            """Applies a convolution with kernels of `size` x `size`, without bias, to x."""
            layer = nn.Conv(
                outputs,
                (size, size),
                strides=(stride, stride),
                padding=[(size // 2, size // 2)] * 2,
                feature_group_count=groups,
                use_bias=False,
                kernel_init=nn.initializers.variance_scaling(2.0, "fan_out", "normal"),
                conv_general_dilated=lowering(self.conv),
                name=name,
            )
            return layer(x)

        def norm(x: jax.Array, name: str) -> jax.Array:
            if self.norm == "batch":
                return BatchNorm(name=name)(x, train, mask)
            return nn.GroupNorm(None, _GROUP, epsilon=1e-5, use_fast_variance=False, name=name)(x)

        x = nn.relu6(norm(conv(x, _rounded(_STEM * self.width), "conv1", 3, 2), "norm1"))
        for i, block in enumerate(self._blocks(), 1):
            y = x
            if block.inner != block.inputs:
                y = nn.relu6(norm(conv(y, block.inner, f"expand{i}"), f"expand_norm{i}"))
            y = conv(y, block.inner, f"depth{i}", 3, block.stride, block.inner)
            y = nn.relu6(norm(y, f"depth_norm{i}"))
            y = norm(conv(y, block.outputs, f"project{i}"), f"project_norm{i}")
            x = x + y if block.stride == 1 and block.inputs == block.outputs else y
        x = nn.relu6(norm(conv(x, _rounded(_LAST * max(1.0, self.width)), "conv2"), "norm2"))
        x = jnp.mean(x, (1, 2))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.outputs, kernel_init=nn.initializers.normal(0.01), name=self.head)(x)


def _rounded(channels: float) -> int:
    """Rounds to the nearest multiple of 8, at least 8, or up if that is more than 10 % down."""
    nearest = max(_GROUP, int(channels + _GROUP / 2) // _GROUP * _GROUP)
    return nearest + _GROUP if nearest < 0.9 * channels else nearest
