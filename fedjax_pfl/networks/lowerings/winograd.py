"""Winograd's convolution: fewer multiplications for 3x3 and 5x5 kernels.

Along each side, two outputs take kernel + 1 products instead of 2 x kernel. Four outputs of a 3x3
kernel take 16 products instead of 36, of a 5x5 kernel 36 instead of 100. In exchange, inputs,
kernels and outputs are transformed by sums, which pays off with many channels.

    Y = Aᵀ[(G k Gᵀ) ⊙ (Bᵀ x B)]A    for a tile x of (kernel + 1)² inputs and 2x2 outputs Y,

summed over channels: ⊙ is a matrix product for each of the (kernel + 1)² positions. A, G and B are
those of Toom and Cook, who multiply polynomials by their values at some points.

References: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks (2016).
Deviations: points for 5x5 are 0, ±1, ½ and −2, whose rounding is half that of 0, ±1 and ±2.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_pfl.networks.lowerings.windows import shifts, space_to_depth, widen

_POINTS = {3: (0, 1, -1), 5: (0, 1, -1, 0.5, -2)}  # by kernel side; infinity is a point, too


def suits(kernel: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns True if `strided` can convolve with these kernel and strides, (height, width) each.

    That is the case for 3x3 and 5x5 with stride 1, and for 5x5 with stride 2.
    """
    return (*kernel, *strides) in ((3, 3, 1, 1), (5, 5, 1, 1), (5, 5, 2, 2))


@cache
def _transforms(side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns Aᵀ [2, n], G [n, side] and Bᵀ [n, n] for n = side + 1 points, infinity last."""
    points, n = np.array(_POINTS[side], np.float64), side + 1
    g, b = np.zeros((n, side)), np.zeros((n, n))
    for i, point in enumerate(points):
        other_points = np.delete(points, i)
        g[i] = point ** np.arange(side) / np.prod(point - other_points)
        b[i, :side] = np.poly(other_points)[::-1]
    g[-1, -1] = 1
    b[-1] = np.poly(points)[::-1]
    a = np.stack([[*points**power, float(power)] for power in (0, 1)])
    return a, g, b


def strided(x: jax.Array, k: jax.Array, strides: tuple[int, int], precision: Any) -> jax.Array:
    """Convolves x [B, H, W, C] with k [side, side, C, O] without padding: [B, H', W', O].

    The kernel and `strides`, along height and width, must suit.
    """
    if strides == (2, 2):
        odd = [(0, size % 2) for size in x.shape[1:3]]
        x = space_to_depth(jnp.pad(x, ((0, 0), *odd, (0, 0))), (2, 2))
        k = jnp.pad(k, ((0, 1), (0, 1), (0, 0), (0, 0)))
        k = k.reshape(3, 2, 3, 2, *k.shape[2:]).transpose(0, 2, 1, 3, 4, 5)
        k = k.reshape(3, 3, -1, k.shape[5])
    return convolution(x, k, precision)


def _times(weight: float, part: jax.Array) -> jax.Array:
    """Returns weight · part; without a multiplication if the weight is 1 or -1."""
    if weight == 1:
        return part
    return -part if weight == -1 else float(weight) * part


def _combine(matrix: np.ndarray, parts: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns, for every row of `matrix` [m, n], the sum of n parts weighted by it."""
    sums = []
    for row in matrix:
        first, *terms = (_times(w, p) for w, p in zip(row, parts, strict=True) if w)
        sums.append(sum(terms, first))
    return sums


def _grid(x: jax.Array, side: int) -> tuple[int, int]:
    """Returns the numbers of tiles of 2x2 outputs along the height and the width of x."""
    return -(-(x.shape[1] - side + 1) // 2), -(-(x.shape[2] - side + 1) // 2)


def _inputs(x: jax.Array, side: int) -> list[jax.Array]:
    """Returns Bᵀ x B for every position along the width, [n, B·tiles, C] each."""
    (_, h, w, c), (_, _, b_t), n, (th, tw) = x.shape, _transforms(side), side + 1, _grid(x, side)
    x = jnp.pad(x, ((0, 0), (0, 2 * th + side - 1 - h), (0, 2 * tw + side - 1 - w), (0, 0)))
    # Positions along the height are an axis, those along the width separate arrays: n products of
    # batch n are as fast as n² products and compile in a third of the time.
    rows = jnp.stack(_combine(b_t, shifts(x, 1, n, 2, th)))  # [n, B, th, W, C]
    return [v.reshape(n, -1, c) for v in _combine(b_t, shifts(rows, 3, n, 2, tw))]


def _kernels(k: jax.Array) -> list[jax.Array]:
    """Returns G k Gᵀ for every position along the width, [n, C, O] each."""
    g = _transforms(k.shape[0])[1]
    tall = jnp.stack(_combine(g, list(k)))
    return _combine(g, [tall[:, j] for j in range(k.shape[0])])


def _product(a: jax.Array, b: jax.Array, axes: tuple[int, int], precision: Any) -> jax.Array:
    """Contracts `axes` of a and b, for every index of axis 0, which both share."""
    dimensions = (((axes[0],), (axes[1],)), ((0,), (0,)))
    return lax.dot_general(a, b, dimensions, precision=precision)


def _tiled(x: jax.Array, k: jax.Array, precision: Any) -> jax.Array:
    """Convolves x [B, H, W, C] with k like `convolution`, without a gradient rule."""
    (b, h, w, _), side, o = x.shape, k.shape[0], k.shape[3]
    a_t, (th, tw) = _transforms(side)[0], _grid(x, side)
    m = [
        _product(v, u, (2, 1), precision).reshape(-1, b, th, tw, o)
        for v, u in zip(_inputs(x, side), _kernels(k), strict=True)
    ]
    columns = [_combine(a_t, list(column)) for column in _combine(a_t, m)]
    y = jnp.stack([jnp.stack(row, 3) for row in zip(*columns, strict=True)], 2)
    return y.reshape(b, 2 * th, 2 * tw, o)[:, : h - side + 1, : w - side + 1]


def _transposed(
    x: jax.Array, k: jax.Array, g: jax.Array, precision: Any
) -> tuple[jax.Array, jax.Array]:
    """Computes the gradients of x and k from the gradient g of the output of `_tiled`.

    JAX's own gradient takes nearly twice as long: the transpose of a strided slice is a pad that is
    read several times.
    """
    (b, h, w, c), side, (oh, ow, o) = x.shape, k.shape[0], g.shape[1:]
    (a_t, to_k, b_t), n, (th, tw) = _transforms(side), side + 1, _grid(x, side)
    g = jnp.pad(g, ((0, 0), (0, 2 * th - oh), (0, 2 * tw - ow), (0, 0)))
    g = g.reshape(b, th, 2, tw, 2, o)
    rows = jnp.stack(_combine(a_t.T, [g[:, :, p] for p in (0, 1)]))  # [n, B, th, tw, 2, O]
    m = [part.reshape(n, -1, o) for part in _combine(a_t.T, [rows[..., q, :] for q in (0, 1)])]
    u = [_product(v, m, (1, 1), precision) for v, m in zip(_inputs(x, side), m, strict=True)]
    tall = jnp.stack(_combine(to_k.T, u), 1)  # [n, side, C, O]
    dk = jnp.stack(_combine(to_k.T, list(tall)))
    v = [
        _product(m, u, (2, 2), precision).reshape(n, b, th, tw, c)
        for m, u in zip(m, _kernels(k), strict=True)
    ]
    rows = _overlap(_combine(b_t.T, v), 3)  # [n, B, th, W, C]
    dx = _overlap(_combine(b_t.T, list(rows)), 1)
    return dx[:, :h, :w], dk


def _overlap(parts: Sequence[jax.Array], axis: int) -> jax.Array:
    """Adds overlapping tiles to one array; the transpose of `shifts` with stride 2 along `axis`."""
    half = len(parts) // 2

    def shift(part: jax.Array, by: int) -> jax.Array:
        padding = [(0, 0)] * part.ndim
        padding[axis] = (by, half - 1 - by)
        return jnp.pad(part, padding)

    sums = [sum(shift(parts[2 * i + p], i) for i in range(half)) for p in (0, 1)]
    pairs = jnp.stack(sums, axis + 1)
    return pairs.reshape(*pairs.shape[:axis], -1, *pairs.shape[axis + 2 :])


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolution(x: jax.Array, k: jax.Array, precision: Any) -> jax.Array:
    """Convolves x [B, H, W, C] with k [side, side, C, O] without padding, with stride 1."""
    return _tiled(widen(x), widen(k), precision).astype(x.dtype)


def _forward(x: jax.Array, k: jax.Array, precision: Any) -> tuple[jax.Array, Any]:
    # Transformed inputs take several times the memory of x and little time to compute again.
    return convolution(x, k, precision), (x, k)


def _backward(precision: Any, residuals: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, k = residuals
    dx, dk = _transposed(widen(x), widen(k), widen(g), precision)
    return dx.astype(x.dtype), dk.astype(k.dtype)


convolution.defvjp(_forward, _backward)
