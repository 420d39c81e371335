"""GPU kernels of the block of `fused.py`, written in Pallas for Triton, with their gradients.

Other lowerings write the windows of an image to the memory of the device, which takes several times
the bytes of their inputs and outputs. Here a program reads the entries of windows as it multiplies
them, and writes pooled outputs only. The gradients of kernels and of images are one GPU kernel
each; nothing uses that of a network's input, so XLA removes it. They read which of four outputs was
the largest, one byte per pooled output, instead of computing the convolution again.

Triton multiplies matrices whose sides are powers of two and at least 16: the sides of a matrix are
pixels, entries of a window, or channels, and a mask excludes numbers beyond the last. Sums have a
fixed order, without atomic additions, so equal inputs give equal bits.

All functions are written for one client; `vmap` adds an axis to the grid of programs.

Deviations: there is no forward mode, as in other lowerings, and there are no second derivatives.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from fedjax_pfl.core.errors import UsageError

_INACTIVE = 4  # follows the numbers of four outputs; marks a maximum that ReLU sets to zero
_DEPTH = 32  # entries of a window in one product
_STEPS = 16  # most products in a sum over pixels; longer sums are divided among programs


class _Size(NamedTuple):
    """Static sizes of a block; hashable."""

    batch: int
    height: int
    width: int
    channels: int
    window_height: int
    window_width: int
    outputs: int
    interpret: bool  # runs the kernels as JAX operations, for tests without a GPU

    @property
    def pooled(self) -> tuple[int, int]:
        """Height and width of the output."""
        height, width = self.height - self.window_height + 1, self.width - self.window_width + 1
        return height // 2, width // 2

    @property
    def pixels(self) -> int:
        """Number of pooled pixels in the batch."""
        return self.batch * self.pooled[0] * self.pooled[1]

    @property
    def sums(self) -> tuple[int, int]:
        """Number of programs that share a sum over pooled pixels, and products of each."""
        products = pl.cdiv(self.pixels, _sides(self.outputs)[0])
        programs = pl.cdiv(products, _STEPS)
        return programs, pl.cdiv(products, programs)

    @property
    def entries(self) -> int:
        """Number of entries of a window."""
        return self.window_height * self.window_width * self.channels

    @property
    def phases(self) -> list[tuple[int, int]]:
        """Number and offset in the images of the four outputs of a pooling window, in order."""
        row = self.width * self.channels
        return [(2 * i + j, i * row + j * self.channels) for i in (0, 1) for j in (0, 1)]


def _sides(channels: int) -> tuple[int, int]:
    """Returns the numbers of pixels and channels that a program computes."""
    columns = max(16, pl.next_power_of_2(channels))
    return max(16, min(64, 2048 // columns)), columns  # four sums are 64 registers per thread


def block(x: jax.Array, kernel: jax.Array, bias: jax.Array, interpret: bool) -> jax.Array:
    """Computes `fused.conv_relu_pool`, with the same arguments."""
    (b, h, w, c), (kh, kw, _, outputs) = x.shape, kernel.shape
    return _block(_Size(b, h, w, c, kh, kw, outputs, interpret), x, kernel, bias)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _block(size: _Size, x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    return _forward(size, x, kernel, bias)[0]


def _forward(size: _Size, x: jax.Array, kernel: jax.Array, bias: jax.Array) -> tuple[Any, Any]:
    """Returns the output and what the gradients need."""
    shape = (size.batch, *size.pooled, size.outputs)
    outputs = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (x.dtype, jnp.int8)]
    grid = (pl.cdiv(size.pixels, _sides(size.outputs)[0]),)
    y, winners = _call(_forward_program, size, grid, outputs, (x, kernel, bias))
    return y, (x, kernel, winners)


def _backward(size: _Size, residuals: Any, g: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the gradients of images, kernels and biases, given g for the output."""
    x, kernel, winners = residuals
    grid = (pl.cdiv(size.batch * size.height * size.width, _sides(size.channels)[0]),)
    images = jax.ShapeDtypeStruct(x.shape, x.dtype)
    (dx,) = _call(_image_program, size, grid, [images], (kernel, winners, g))
    sums = jax.ShapeDtypeStruct((size.sums[0], *kernel.shape), jnp.float32)
    parts = (pl.cdiv(size.entries, _DEPTH), size.sums[0])
    (dk,) = _call(_kernel_program, size, parts, [sums], (x, winners, g))
    db = jnp.sum(jnp.where(winners < _INACTIVE, g, jnp.zeros_like(g)), (0, 1, 2))
    return dx, jnp.sum(dk, 0).astype(kernel.dtype), db


_block.defvjp(_forward, _backward)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _call(
    program: Any, size: _Size, grid: tuple[int, ...], outputs: Sequence[Any], arrays: Sequence[Any]
) -> list[jax.Array]:
    """Runs `program` for each point of the grid. It reads and writes flat arrays.

    `outputs` have the shapes and dtypes of the results.
    """
    flat = pl.pallas_call(
        partial(program, size),
        grid=grid,
        out_shape=[jax.ShapeDtypeStruct((out.size,), out.dtype) for out in outputs],
        interpret=size.interpret,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
    )(*(array.reshape(-1) for array in arrays))
    return [part.reshape(out.shape) for part, out in zip(flat, outputs, strict=True)]


@_call.defjvp
def _second_derivative(*arguments: Any) -> Any:
    del arguments
    raise UsageError("conv = 'fused' has no second derivatives; use conv = 'auto'")


# Programs. Rows and columns of a matrix are each a vector of offsets in a flat array, and a mask.

_Axis = tuple[jax.Array, jax.Array]


def _axis(start: Any, length: int, end: int) -> _Axis:
    """Returns the numbers from `start` and a mask of those below `end`."""
    numbers = start + jnp.arange(length, dtype=jnp.int32)
    return numbers, numbers < end


def _offsets(rows: _Axis, columns: _Axis) -> _Axis:
    """Returns the offsets of a matrix, and their mask."""
    return rows[0][:, None] + columns[0][None, :], rows[1][:, None] & columns[1][None, :]


def _read(ref: Any, offsets: jax.Array, mask: jax.Array) -> jax.Array:
    """Reads a flat array at `offsets`; zeros where the mask is False."""
    return triton.load(ref.at[offsets], mask=mask, other=0)


def _write(ref: Any, offsets: jax.Array, mask: jax.Array, values: jax.Array) -> None:
    """Writes `values` to a flat array where the mask is True."""
    # An offset outside the mask can be that of another row.
    offsets = jnp.where(mask, offsets, ref.size)
    triton.store(ref.at[offsets], values.astype(ref.dtype), mask=mask)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies matrices with sums in float32."""
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _split(numbers: jax.Array, height: int, width: int) -> tuple[jax.Array, ...]:
    """Returns image, row and column of pixels that are numbered through a batch."""
    line = lax.div(numbers, width)
    return lax.div(line, height), lax.rem(line, height), lax.rem(numbers, width)


def _corners(pixels: jax.Array, size: _Size) -> jax.Array:
    """Returns the offset in the images of the first entry that a pooled pixel depends on."""
    image, row, column = _split(pixels, *size.pooled)
    return ((image * size.height + 2 * row) * size.width + 2 * column) * size.channels


def _in_window(entries: jax.Array, size: _Size) -> jax.Array:
    """Returns the offset in the images of an entry of a window from its first entry."""
    # Columns and channels of a window are neighbours in the images, too.
    row = size.window_width * size.channels
    return lax.div(entries, row) * (size.width * size.channels) + lax.rem(entries, row)


def _forward_program(
    size: _Size, x_ref: Any, kernel_ref: Any, bias_ref: Any, y_ref: Any, winner_ref: Any
) -> None:
    """Computes all outputs of some pooled pixels, and which of four outputs is the maximum."""
    rows, columns = _sides(size.outputs)
    pixels, is_pixel = _axis(pl.program_id(0) * rows, rows, size.pixels)
    outputs, is_output = _axis(0, columns, size.outputs)

    def add_products(step: Any, sums: Any) -> Any:
        entries, is_entry = _axis(step * _DEPTH, _DEPTH, size.entries)
        places = _offsets((entries * size.outputs, is_entry), (outputs, is_output))
        kernel = _read(kernel_ref, *places)
        at, mask = _offsets(
            (_corners(pixels, size), is_pixel), (_in_window(entries, size), is_entry)
        )
        return tuple(
            total + _product(_read(x_ref, at + offset, mask), kernel)
            for total, (_, offset) in zip(sums, size.phases, strict=True)
        )

    zeros = jnp.zeros((rows, columns), jnp.float32)
    sums = lax.fori_loop(0, pl.cdiv(size.entries, _DEPTH), add_products, (zeros,) * 4)
    bias = _read(bias_ref, outputs, is_output).astype(y_ref.dtype)[None, :]
    values = [total.astype(y_ref.dtype) + bias for total in sums]
    largest = values[0]
    for value in values[1:]:
        # `maximum` ignores NaN on a GPU, and a run that diverges would not be seen.
        largest = jnp.where((largest >= value) | (largest != largest), largest, value)
    winner = jnp.full(largest.shape, _INACTIVE, jnp.int32)
    for (phase, _), value in zip(size.phases[::-1], values[::-1], strict=True):
        winner = jnp.where((value == largest) & (largest > 0), phase, winner)
    places = _offsets((pixels * size.outputs, is_pixel), (outputs, is_output))
    _write(y_ref, *places, jnp.where(largest <= 0, jnp.zeros_like(largest), largest))
    _write(winner_ref, *places, winner)


def _kernel_program(size: _Size, x_ref: Any, winner_ref: Any, g_ref: Any, dk_ref: Any) -> None:
    """Computes the gradients of some entries of the kernels, summed over some pooled pixels."""
    rows, columns = _sides(size.outputs)
    entries, is_entry = _axis(pl.program_id(0) * _DEPTH, _DEPTH, size.entries)
    outputs, is_output = _axis(0, columns, size.outputs)
    part_of_sum, steps = pl.program_id(1), size.sums[1]

    def add_products(step: Any, total: Any) -> Any:
        pixels, is_pixel = _axis((part_of_sum * steps + step) * rows, rows, size.pixels)
        places = _offsets((pixels * size.outputs, is_pixel), (outputs, is_output))
        g, winner = _read(g_ref, *places), _read(winner_ref, *places).astype(jnp.int32)
        at, mask = _offsets(
            (_in_window(entries, size), is_entry), (_corners(pixels, size), is_pixel)
        )
        for phase, offset in size.phases:
            part = jnp.where(winner == phase, g, jnp.zeros_like(g))
            total = total + _product(_read(x_ref, at + offset, mask), part)
        return total

    total = lax.fori_loop(0, steps, add_products, jnp.zeros((_DEPTH, columns), jnp.float32))
    first = part_of_sum * (size.entries * size.outputs)
    places = _offsets((first + entries * size.outputs, is_entry), (outputs, is_output))
    _write(dk_ref, *places, total)


def _image_program(size: _Size, kernel_ref: Any, winner_ref: Any, g_ref: Any, dx_ref: Any) -> None:
    """Computes the gradients of some pixels of the images."""
    rows, columns = _sides(size.channels)
    end = size.batch * size.height * size.width
    pixels, is_pixel = _axis(pl.program_id(0) * rows, rows, end)
    channels, is_channel = _axis(0, columns, size.channels)
    image, row, column = _split(pixels, size.height, size.width)
    taps = size.window_height * size.window_width * size.outputs

    def add_products(step: Any, total: Any) -> Any:
        numbers, is_tap = _axis(step * _DEPTH, _DEPTH, taps)
        _, i, j = _split(lax.div(numbers, size.outputs), size.window_height, size.window_width)
        output = lax.rem(numbers, size.outputs)
        tap = (numbers - output) * size.channels + output
        places = _offsets((tap, is_tap), (channels * size.outputs, is_channel))
        kernel = _read(kernel_ref, *places)
        # The output before pooling that multiplied this pixel with this entry of the kernel.
        y, x = row[:, None] - i[None, :], column[:, None] - j[None, :]
        mask = (y >= 0) & (y < 2 * size.pooled[0]) & (x >= 0) & (x < 2 * size.pooled[1])
        mask &= is_pixel[:, None] & is_tap[None, :]
        at = ((image * size.pooled[0])[:, None] + (y >> 1)) * size.pooled[1] + (x >> 1)
        at = at * size.outputs + output[None, :]
        g, winner = _read(g_ref, at, mask), _read(winner_ref, at, mask).astype(jnp.int32)
        part = jnp.where(winner == 2 * (y & 1) + (x & 1), g, jnp.zeros_like(g))
        return total + _product(part, kernel)

    zeros = jnp.zeros((rows, columns), jnp.float32)
    total = lax.fori_loop(0, pl.cdiv(taps, _DEPTH), add_products, zeros)
    places = _offsets((pixels * size.channels, is_pixel), (channels, is_channel))
    _write(dx_ref, *places, total)
