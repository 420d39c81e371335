"""Views of images, and their conversion, that several lowerings use."""

import jax
import jax.numpy as jnp
from jax import lax


def shifts(x: jax.Array, axis: int, size: int, stride: int, count: int) -> list[jax.Array]:
    """Returns `size` views of x along `axis`: `count` entries, `stride` apart, from 0, 1, 2, ..."""
    span = (count - 1) * stride + 1
    return [lax.slice_in_dim(x, i, i + span, stride, axis) for i in range(size)]


def space_to_depth(x: jax.Array, block: tuple[int, int]) -> jax.Array:
    """Moves blocks of h x w pixels to channels: [B, H, W, C] -> [B, H/h, W/w, h·w·C]."""
    (b, height, width, c), (h, w) = x.shape, block
    x = x.reshape(b, height // h, h, width // w, w, c).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(b, height // h, width // w, h * w * c)


def widen(x: jax.Array) -> jax.Array:
    """Converts to at least float32, for sums that would lose digits."""
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)
