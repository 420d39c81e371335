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

from fedjax_pfl.networks.lowerings.conv import lowering

Mask = jax.Array | None  # bool [B], False for padding; None: a batch without padding


def uniform(fan_in: int) -> nn.initializers.Initializer:
    """Returns an initialiser that samples from U(-1/√fan_in, 1/√fan_in)."""
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
