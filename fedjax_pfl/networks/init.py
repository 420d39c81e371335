"""Layers initialised as in PyTorch: weights and biases from U(-1/√fan_in, 1/√fan_in).

A Flax initialiser sees only the shape of its parameter, and the shape of a bias does not contain
the fan-in. `dense` and `conv` take it from their number of inputs.

References: `torch.nn.Linear` and `torch.nn.Conv2d`; kaiming_uniform_ with a = √5 has this bound.
"""

import math
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks.lowerings import fused
from fedjax_pfl.networks.lowerings.conv import lowering

Mask = jax.Array | None  # bool [B], False for padding; None: a batch without padding


def uniform(fan_in: int) -> nn.initializers.Initializer:
    """Returns an initialiser that samples from U(-1/√fan_in, 1/√fan_in).

    Raises UsageError for a layer without inputs.
    """
    if fan_in == 0:
        raise UsageError(
            "convolutions and poolings leave nothing of examples of this size; use larger examples "
            "or fewer layers"
        )
    bound = 1 / math.sqrt(fan_in)

    def sample(key: jax.Array, shape: Sequence[int], dtype: jnp.dtype = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return sample


def dense(inputs: int, outputs: int, name: str) -> nn.Dense:
    """Returns a fully connected layer, [..., inputs] -> [..., outputs]."""
    initializer = uniform(inputs)
    return nn.Dense(outputs, kernel_init=initializer, bias_init=initializer, name=name)


def conv(
    inputs: int,
    outputs: int,
    kernel: tuple[int, int],
    name: str,
    *,
    strides: tuple[int, int] = (1, 1),
    padding: str | Sequence[tuple[int, int]] = "VALID",
    bias: bool = True,
    lowered: str = "auto",
) -> nn.Conv:
    """Returns a convolution, [B, H, W, inputs] -> [B, H', W', outputs].

    `kernel` and `strides` are along height and width, `padding` is as for `flax.linen.Conv`, and
    `lowered` is the name of a lowering, see `lowerings.conv`.
    """
    initializer = uniform(inputs * math.prod(kernel))
    return nn.Conv(
        outputs,
        kernel,
        strides=strides,
        padding=padding,
        use_bias=bias,
        kernel_init=initializer,
        bias_init=initializer,
        conv_general_dilated=lowering(lowered),
        name=name,
    )


class ConvReluPool(nn.Module):
    """A convolution with bias, ReLU and 2x2 max pooling in one GPU kernel, see `lowerings.fused`.

    Its parameters and their initial values are as in `conv`.

    Args:
      outputs: Number of kernels.
      kernel_size: Height and width of a kernel.
      padding: VALID or SAME.
    """

    outputs: int
    kernel_size: tuple[int, int]
    padding: str = "VALID"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, H, W, C] to [B, H', W', outputs]."""
        shape = (*self.kernel_size, x.shape[-1], self.outputs)
        initializer = uniform(math.prod(shape[:3]))
        kernel = self.param("kernel", initializer, shape)
        bias = self.param("bias", initializer, shape[3:])
        pads = lax.padtype_to_pads(x.shape[1:3], self.kernel_size, (1, 1), self.padding)
        x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
        fused.require(x.shape, shape)
        return fused.conv_relu_pool(x, kernel, bias)
