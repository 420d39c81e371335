"""Layers that start as PyTorch's do: weights and biases from U(-1/√fan_in, 1/√fan_in).

References: `torch.nn.Linear` and `torch.nn.Conv2d`, whose kaiming_uniform_ with a = √5 comes to the
same bound. An initialiser in Flax sees its own shape only, and a bias has no fan-in in it, so
`dense` and `conv` take what comes in.
"""

import math
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.networks.lowerings.conv import lowering


def uniform(fan_in: int) -> nn.initializers.Initializer:
    """U(-1/√fan_in, 1/√fan_in), whatever the shape."""
    bound = 1 / math.sqrt(fan_in)

    def draw(key: jax.Array, shape: Sequence[int], dtype: jnp.dtype = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return draw


def dense(inputs: int, outputs: int, name: str) -> nn.Dense:
    """A fully connected layer, [..., inputs] -> [..., outputs]."""
    start = uniform(inputs)
    return nn.Dense(outputs, kernel_init=start, bias_init=start, name=name)


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
    """A convolution, [B, H, W, inputs] -> [B, H', W', outputs]; `lowered` names its lowering."""
    start = uniform(inputs * math.prod(kernel))
    return nn.Conv(
        outputs,
        kernel,
        strides=strides,
        padding=padding,
        use_bias=bias,
        kernel_init=start,
        bias_init=start,
        conv_general_dilated=lowering(lowered),
        name=name,
    )
