"""Convolutions as matrix products, which stay fast with one kernel per client.

Under `vmap` over kernels XLA turns a convolution into a grouped convolution, which is slow. On CPU
it also runs ordinary convolutions slowly inside loops. The lowerings here are matrix products, and
`vmap` turns them into batched products. They replace `jax.lax.conv_general_dilated` in
`flax.linen.Conv(conv_general_dilated=...)`. Parameters are the same. Images are NHWC, kernels HWIO.

    xla      XLA's convolution; the only one with groups, dilation and forward-mode derivatives
    patches  every window as one row, then one product
    rows     windows along the width only, then one product per kernel row; less memory
    blocks   like patches, but a row yields 2x2 outputs: fewer and larger products, less copying
    winograd at most half of the multiplications for 3x3 and 5x5 kernels; patches for others
    auto     one of these, chosen by backend and shape; `fused`, of `fused.py`, is not among them

Depthwise convolutions (one kernel per channel) are shifted multiply-adds in all lowerings except
xla.

Deviations: the custom gradients exclude forward mode (`jax.jvp`), not reverse over reverse.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks.lowerings import fused, winograd
from fedjax_pfl.networks.lowerings.windows import shifts, space_to_depth, widen

Convolution = Callable[..., jax.Array]
_TILE = 2  # outputs per side that one row of `blocks` yields
_LAYOUT = ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))  # NHWC, HWIO, NHWC in the numbering of lax


def _with_gradient(convolve: Callable[..., jax.Array], backward: Callable[..., Any]) -> Convolution:
    """Returns a convolution with its own gradient.

    Args:
      convolve: (images, kernel, options) -> images.
      backward: (options, (images, kernel), gradient of the output) -> gradients of both.
    """
    function = jax.custom_vjp(convolve, nondiff_argnums=(2,))
    # Keeps the images: computing their windows again is cheaper than storing them.
    function.defvjp(lambda x, k, options: (convolve(x, k, options), (x, k)), backward)
    return function


class _Spec(NamedTuple):
    """Static options of a convolution; hashable."""

    strides: tuple[int, int]
    precision: Any


def lowering(name: str) -> Convolution:
    """Returns a lowering by name, with the signature of `jax.lax.conv_general_dilated`."""
    choices = ("auto", "xla", *_LOWERINGS)
    if name not in choices:
        raise UsageError(f"conv = {name!r} is not a lowering; choose from {', '.join(choices)}")
    return lax.conv_general_dilated if name == "xla" else partial(_convolve, name)


class _Options(NamedTuple):
    """Remaining arguments of `jax.lax.conv_general_dilated`, in order."""

    lhs_dilation: Sequence[int] | None = None
    rhs_dilation: Sequence[int] | None = None
    dimension_numbers: Any = None
    feature_group_count: int = 1
    batch_group_count: int = 1
    precision: Any = None
    preferred_element_type: Any = None
    out_sharding: Any = None


def _convolve(
    name: str,
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    *arguments: Any,
    **keywords: Any,
) -> jax.Array:
    """Implements `jax.lax.conv_general_dilated` by the lowering `name`.

    Raises UsageError for arguments that the lowering does not support.
    """
    options = _Options(*arguments, **keywords)
    depthwise = options.feature_group_count == lhs.shape[-1] == rhs.shape[-1] > 1
    unsupported = _unsupported(lhs, rhs, options, depthwise)
    if name == "auto" and not unsupported:
        name = "depthwise" if depthwise else _auto(rhs.shape, tuple(window_strides))
    if name == "auto":
        return lax.conv_general_dilated(lhs, rhs, window_strides, padding, **options._asdict())
    if unsupported:
        raise UsageError(f"conv = {name!r} does not do {unsupported}; use conv = 'xla' or 'auto'")
    sh, sw = window_strides
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(lhs.shape[1:3], rhs.shape[:2], (sh, sw), padding)
    (top, bottom), (left, right) = padding
    x = _pad(lhs, (top, bottom, 0), (left, right, 0))
    if x.shape[1] < rhs.shape[0] or x.shape[2] < rhs.shape[1]:
        raise UsageError(f"a kernel of {rhs.shape[:2]} does not fit an image of {x.shape[1:3]}")
    if depthwise:
        return _depthwise(x, rhs, (sh, sw))
    return _LOWERINGS[name](x, rhs, _Spec((sh, sw), options.precision))


def _unsupported(lhs: jax.Array, rhs: jax.Array, options: _Options, depthwise: bool) -> str:
    """Returns the name of an option of a convolution that no lowering here has, or ""."""
    if lhs.ndim != 4:
        return f"{lhs.ndim - 2} spatial dimensions"
    layout = lax.conv_dimension_numbers(lhs.shape, rhs.shape, options.dimension_numbers)
    if tuple(layout) != _LAYOUT:
        return "other layouts than NHWC and HWIO"
    if options.batch_group_count != 1 or (options.feature_group_count != 1 and not depthwise):
        return "groups"
    if any(d != 1 for d in (*(options.lhs_dilation or ()), *(options.rhs_dilation or ()))):
        return "dilation"
    return "preferred_element_type" if options.preferred_element_type is not None else ""


def _auto(kernel: tuple[int, ...], strides: tuple[int, ...]) -> str:
    """Returns the fastest lowering for a kernel [h, w, C, O] on this backend."""
    # Times relative to `patches`. TPU: not measured; `patches` is one batched product.
    # GPU: training step of LeNet with 100 clients on an H100 (5x5: 3→16 and 16→32).
    #   `blocks` 0.59, `rows` 1.21, `winograd` 1.31, `xla` 2.66. Copying windows dominates.
    # CPU: forward and backward on two cores, batch size 32.
    #   `blocks`    5x5: 3→16 0.62, 1→32 0.88, 8→16 0.56, 16→32 0.64, 32→64 0.61
    #               3x3: 1→16 0.6, 3→64 1.3, 16→32 0.9, 128→128 1.2; stride 2 1.2; 1x1 2.7
    #   `winograd`  5x5: 8→16 0.62, 16→32 0.44, 32→64 0.33, 64→128 with stride 2 0.56
    #               3x3: 8→16 1.05, 16→32 0.81, 32→32 0.4, 64→64 0.36, 128→128 0.5, 256→256 0.44
    #   `rows`      0.6 to 4
    #   `auto`      0.54 for a training step of ResNet9
    side, channels = min(kernel[:2]), kernel[2]
    backend = jax.default_backend()
    if backend != "cpu":
        few_windows = backend == "gpu" and side >= 5 and channels <= 32 and max(strides) == 1
        return "blocks" if few_windows else "patches"
    if winograd.suits(kernel[:2], strides) and min(kernel[2:]) >= 16:
        return "winograd"
    few_channels = (side >= 5 and channels <= 32) or (side >= 3 and channels == 1)
    return "blocks" if few_channels and max(strides) == 1 else "patches"


def _pad(x: jax.Array, height: tuple[int, int, int], width: tuple[int, int, int]) -> jax.Array:
    """Pads axes 1 and 2 with (low, high, interior) zeros. Negative numbers crop."""
    no_padding = ((0, 0, 0),) * (x.ndim - 3)
    return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), height, width, *no_padding))


def _outputs(x: jax.Array, k: jax.Array, strides: tuple[int, int]) -> tuple[int, int]:
    """Returns (H', W') for x [B, H, W, ...] and k [h, w, ...], without padding."""
    return tuple((x.shape[1 + a] - k.shape[a]) // strides[a] + 1 for a in (0, 1))  # type: ignore[return-value]


def _unshift(parts: list[jax.Array], axis: int, length: int, stride: int) -> jax.Array:
    """Adds `parts` to strided slices of zeros of this `length`; the transpose of `shifts`."""
    span = (parts[0].shape[axis] - 1) * stride + 1
    no_padding = (0, 0, 0)
    paddings = [(i, length - i - span, stride - 1) for i in range(len(parts))]
    return sum(  # type: ignore[return-value]
        _pad(part, padding, no_padding) if axis == 1 else _pad(part, no_padding, padding)
        for part, padding in zip(parts, paddings, strict=True)
    )


def _product(a: jax.Array, b: jax.Array, axes: tuple[int, int], spec: _Spec) -> jax.Array:
    """Multiplies matrices, summing over axis axes[0] of a and axes[1] of b in at least float32."""
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    wide = jnp.float32 if a.dtype.itemsize < 4 else a.dtype
    return lax.dot_general(a, b, dimensions, precision=spec.precision, preferred_element_type=wide)


# Patches: all windows, one product.


def _patches_forward(x: jax.Array, k: jax.Array, spec: _Spec) -> jax.Array:
    """Convolves x [B, H, W, C] with k [h, w, C, O] without padding: [B, H', W', O]."""
    size = (x.shape[0], *_outputs(x, k, spec.strides), k.shape[3])
    windows = _windows(x, k, spec.strides)
    return _product(windows, k.reshape(-1, k.shape[3]), (1, 0), spec).astype(x.dtype).reshape(size)


def _windows(x: jax.Array, k: jax.Array, strides: tuple[int, int]) -> jax.Array:
    """Returns the windows of x [B, H, W, C] under k [h, w, C, O], as [B·H'·W', h·w·C]."""
    oh, ow = _outputs(x, k, strides)
    rows = shifts(x, 1, k.shape[0], strides[0], oh)
    views = [view for row in rows for view in shifts(row, 2, k.shape[1], strides[1], ow)]
    return jnp.concatenate(views, -1).reshape(-1, k[..., 0].size)


def _patches_backward(spec: _Spec, residuals: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of (x, k) = `residuals`, given g, the gradient of the output."""
    x, k = residuals
    (h, w, c, o), (sh, sw) = k.shape, spec.strides
    flat = g.reshape(-1, o)
    dk = _product(_windows(x, k, spec.strides), flat, (0, 0), spec)
    spread = _product(flat, k.reshape(-1, o), (1, 1), spec)
    spread = spread.reshape(*g.shape[:3], h, w, c)
    # First along the width, then along the height: h + w additions instead of h·w.
    rows = _unshift([spread[:, :, :, :, j] for j in range(w)], 2, x.shape[2], sw)
    dx = _unshift([rows[:, :, :, i] for i in range(h)], 1, x.shape[1], sh)
    return dx.astype(x.dtype), dk.astype(k.dtype).reshape(k.shape)


_patches = _with_gradient(_patches_forward, _patches_backward)


# Rows: windows along the width, one product per kernel row.


def _rows_forward(x: jax.Array, k: jax.Array, spec: _Spec) -> jax.Array:
    """Convolves x [B, H, W, C] with k [h, w, C, O] without padding, by a product per kernel row."""
    h, w, c, o = k.shape
    size = (x.shape[0], *_outputs(x, k, spec.strides), o)
    rows = _row_windows(x, k, spec.strides)
    parts = [_product(rows[i], k[i].reshape(w * c, o), (1, 0), spec) for i in range(h)]
    return sum(parts).astype(x.dtype).reshape(size)  # type: ignore[union-attr]


def _row_windows(x: jax.Array, k: jax.Array, strides: tuple[int, int]) -> list[jax.Array]:
    """Returns the windows along the width for every row of k, [B·H'·W', w·C] each."""
    oh, ow = _outputs(x, k, strides)
    wide = jnp.concatenate(shifts(x, 2, k.shape[1], strides[1], ow), -1)
    rows = shifts(wide, 1, k.shape[0], strides[0], oh)
    return [row.reshape(-1, k.shape[1] * k.shape[2]) for row in rows]


def _rows_backward(spec: _Spec, residuals: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of (x, k) = `residuals`, given g, the gradient of the output."""
    x, k = residuals
    (h, w, c, o), (sh, sw) = k.shape, spec.strides
    flat = g.reshape(-1, o)
    dk = jnp.stack([_product(row, flat, (0, 0), spec) for row in _row_windows(x, k, spec.strides)])
    parts = [_product(flat, k[i].reshape(w * c, o), (1, 1), spec) for i in range(h)]
    spread = [part.reshape(*g.shape[:3], w * c) for part in parts]
    tall = _unshift(spread, 1, x.shape[1], sh).reshape(*g.shape[:1], x.shape[1], g.shape[2], w, c)
    dx = _unshift([tall[:, :, :, j] for j in range(w)], 2, x.shape[2], sw)
    return dx.astype(x.dtype), dk.astype(k.dtype).reshape(k.shape)


_rows = _with_gradient(_rows_forward, _rows_backward)


# Blocks: space to depth, then patches.


def _blocks(x: jax.Array, k: jax.Array, spec: _Spec) -> jax.Array:
    """Convolves like `_patches`, but a row of the product is the window of 2x2 outputs.

    With few channels, copying windows takes longer than multiplying them. Neighbouring windows
    overlap: for 5x5 kernels one 6x6 window replaces four 5x5 windows. This needs a third of the
    memory, and the product is 4x as wide, for 44 % more multiplications (78 % for 3x3 kernels).
    """
    b, o, (oh, ow) = x.shape[0], k.shape[3], _outputs(x, k, spec.strides)
    (nh, bh), (nw, bw) = (_block(k.shape[a], spec.strides[a]) for a in (0, 1))
    th, tw = -(-oh // _TILE), -(-ow // _TILE)
    height, width = (th + nh - 1) * bh, (tw + nw - 1) * bw
    deep = _pad(x, (0, height - x.shape[1], 0), (0, width - x.shape[2], 0))
    y = _patches(
        space_to_depth(deep, (bh, bw)),
        _spread_kernel(k, spec.strides),
        _Spec((1, 1), spec.precision),
    )
    y = y.reshape(b, th, tw, _TILE, _TILE, o).transpose(0, 1, 3, 2, 4, 5)
    return y.reshape(b, th * _TILE, tw * _TILE, o)[:, :oh, :ow]


def _block(size: int, stride: int) -> tuple[int, int]:
    """Returns the number of blocks in a tile's window along an axis, and the length of a block."""
    length = _TILE * stride
    return -(-(size + (_TILE - 1) * stride) // length), length


def _spread_kernel(k: jax.Array, strides: tuple[int, int]) -> jax.Array:
    """Returns k shifted to every output of a tile, [n, n, block·block·C, tile·tile·O]."""
    h, w, c, o = k.shape
    (nh, bh), (nw, bw) = (_block(k.shape[a], strides[a]) for a in (0, 1))

    def at(i: int, j: int) -> jax.Array:
        top, left = i * strides[0], j * strides[1]
        return jnp.pad(k, ((top, nh * bh - h - top), (left, nw * bw - w - left), (0, 0), (0, 0)))

    positions = jnp.stack([at(i, j) for i in range(_TILE) for j in range(_TILE)], 3)
    positions = positions.reshape(nh, bh, nw, bw, c, _TILE * _TILE * o).transpose(0, 2, 1, 3, 4, 5)
    return positions.reshape(nh, nw, bh * bw * c, _TILE * _TILE * o)


# Depthwise: shifted multiply-adds.


def _depthwise_forward(x: jax.Array, k: jax.Array, strides: tuple[int, int]) -> jax.Array:
    """Convolves x [B, H, W, C] with k [h, w, 1, C] without padding: [B, H', W', C]."""
    views, k = _views(widen(x), k, strides), widen(k)
    return sum(view * k[i : i + 1, j : j + 1] for i, j, view in views).astype(x.dtype)  # type: ignore[union-attr]


def _views(
    x: jax.Array, k: jax.Array, strides: tuple[int, int]
) -> Iterator[tuple[int, int, jax.Array]]:
    """Yields (i, j, the inputs [B, h, w, C] that kernel position (i, j) is multiplied with)."""
    oh, ow = _outputs(x, k, strides)
    for i, row in enumerate(shifts(x, 1, k.shape[0], strides[0], oh)):
        for j, view in enumerate(shifts(row, 2, k.shape[1], strides[1], ow)):
            yield i, j, view


def _depthwise_backward(strides: tuple[int, int], residuals: Any, g: jax.Array) -> Any:
    """Returns the gradients of (x, k) = `residuals`, given g, the gradient of the output."""
    # Reading shifted views of g is several times faster than adding to slices of dx.
    x, k = residuals
    dk = jnp.stack([jnp.sum(view * g, (0, 1, 2)) for _, _, view in _views(x, k, strides)])
    (h, w), (sh, sw) = k.shape[:2], strides
    over = [x.shape[1 + a] - k.shape[a] - (g.shape[1 + a] - 1) * strides[a] for a in (0, 1)]
    wide = _pad(g, (h - 1, h - 1 + over[0], sh - 1), (w - 1, w - 1 + over[1], sw - 1))
    return _depthwise(wide, k[::-1, ::-1], (1, 1)), dk.reshape(k.shape)


_depthwise = _with_gradient(_depthwise_forward, _depthwise_backward)


# Winograd: fewer products.


def _winograd(x: jax.Array, k: jax.Array, spec: _Spec) -> jax.Array:
    """Convolves like `_patches`, by Winograd's method if it suits the kernel and strides."""
    if not winograd.suits(k.shape[:2], spec.strides):
        return _patches(x, k, spec)
    return winograd.strided(x, k, spec.strides, spec.precision)


_LOWERINGS: dict[str, Convolution] = {
    "blocks": _blocks,
    "fused": fused.refuse,
    "patches": _patches,
    "rows": _rows,
    "winograd": _winograd,
}


# Pooling.


@jax.named_scope("max_pool")
def max_pool(
    x: jax.Array, window: tuple[int, int], strides: tuple[int, int] | None = None
) -> jax.Array:
    """Computes the maximum over windows without padding: [B, H, W, C] -> [B, H', W', C].

    The gradient of equal maxima goes to the first of them, as in PyTorch. Windows that do not
    overlap are pooled by a reshape, others by `flax.linen.max_pool`.

    Args:
      x: Images [B, H, W, C].
      window: Height and width of a window.
      strides: Default: the window, unlike in `flax.linen.max_pool`.
    """
    strides = strides or window
    if tuple(strides) != tuple(window):
        return nn.max_pool(x, tuple(window), tuple(strides))
    h, w = x.shape[1] // window[0] * window[0], x.shape[2] // window[1] * window[1]
    return _pool(x[:, :h, :w], tuple(window))


def _split(x: jax.Array, window: tuple[int, int]) -> jax.Array:
    b, h, w, c = x.shape
    return x.reshape(b, h // window[0], window[0], w // window[1], window[1], c)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _pool(x: jax.Array, window: tuple[int, int]) -> jax.Array:
    return _split(x, window).max((2, 4))


def _pool_forward(x: jax.Array, window: tuple[int, int]) -> tuple[jax.Array, Any]:
    return _pool(x, window), x


def _pool_backward(window: tuple[int, int], x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    """Returns a tuple with the gradient of x."""
    # Compares the entries of a window with each other, not with their maximum: XLA may compute x
    # twice, with other roundings, and then no entry would equal the maximum.
    split, (h, w) = _split(x, window), window
    entries = [split[:, :, i, :, j] for i in range(h) for j in range(w)]
    largest, index = entries[0], jnp.zeros(g.shape, jnp.int32)
    for i, entry in enumerate(entries[1:], 1):
        larger = entry > largest
        largest, index = jnp.where(larger, entry, largest), jnp.where(larger, i, index)
    parts = [jnp.where(index == i, g, jnp.zeros((), g.dtype)) for i in range(h * w)]
    dx = jnp.stack(parts, 2).reshape(*g.shape[:2], *window, *g.shape[2:])
    return (dx.transpose(0, 1, 2, 4, 3, 5).reshape(x.shape),)


_pool.defvjp(_pool_forward, _pool_backward)
