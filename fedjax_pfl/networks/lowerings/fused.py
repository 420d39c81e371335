"""Convolution, bias, ReLU and 2x2 max pooling in one GPU kernel: when it applies, and the call.

The kernels are in `fused_kernels.py`. JAX 0.11 deprecates Pallas's Triton backend, which they need.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

import jax

from fedjax_pfl.core.errors import UsageError

MAX_CHANNELS = 128  # a program keeps the sums of all channels in registers


def require(image: Sequence[int], kernel: Sequence[int]) -> None:
    """Raises UsageError unless a block can run on this backend.

    Args:
      image: Shape [B, H, W, C] after padding.
      kernel: Shape [h, w, C, O].
    """
    backend = jax.default_backend()
    if backend != "gpu":
        raise UsageError(f"conv = 'fused' needs a GPU, and this is a {backend}; use conv = 'auto'")
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        raise UsageError(
            f"conv = 'fused' needs the Triton backend of Pallas, which JAX {jax.__version__} does "
            "not have; use conv = 'auto'"
        )
    if max(kernel[2:]) > MAX_CHANNELS:
        raise UsageError(
            f"conv = 'fused' has at most {MAX_CHANNELS} channels, got {max(kernel[2:])}; "
            "use conv = 'auto'"
        )
    if image[1] <= kernel[0] or image[2] <= kernel[1]:
        raise UsageError(
            f"a kernel of {tuple(kernel[:2])} with 2x2 pooling does not fit an image of "
            f"{tuple(image[1:3])}"
        )


def refuse(*arguments: Any) -> jax.Array:
    """Raises UsageError: the lowering `fused` of a convolution outside of such a block."""
    del arguments
    raise UsageError(
        "conv = 'fused' is for networks with ReLU and 2x2 pooling after each convolution: lenet, "
        "cnn and small without batch_norm; use conv = 'auto'"
    )


def conv_relu_pool(
    x: jax.Array, kernel: jax.Array, bias: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Convolves with stride 1 and without padding, adds a bias, and applies ReLU and 2x2 pooling.

    Gradients of equal maxima go to the first of them, as in `lowerings.conv.max_pool`.

    Args:
      x: Images [B, H, W, C].
      kernel: Kernels [h, w, C, O].
      bias: Biases [O].
      interpret: Run the kernels as JAX operations, on any device.

    Returns:
      Images [B, (H - h + 1) // 2, (W - w + 1) // 2, O].
    """
    # Imported here because Pallas takes 0.1 s, and later releases of JAX will not have this part.
    from fedjax_pfl.networks.lowerings import fused_kernels

    return fused_kernels.block(x, kernel, bias, interpret)
