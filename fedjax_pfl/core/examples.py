"""A federation's data: one flat array of examples and, for each client, the rows that are its own.

Images stay as they are stored (uint8); `take` normalises what it gathers, and maps the labels.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

Array = Any  # of JAX in compiled code, of NumPy where a federation is put together


class Split(NamedTuple):
    """Rows of the flat arrays; in FederatedData with a leading client axis."""

    rows: Array  # int32 [N, longest]; what lies behind `size` is padding
    size: Array  # int32 [N]


class FederatedData(NamedTuple):
    """All clients' examples. A pytree: passed into compiled functions, never closed over."""

    x: Array  # [examples, ...]: uint8, float32, or int32, which stays as it is
    y: Array  # [examples] int32 classes, [examples, ...] int32, or float32 targets, or bool
    train: Split
    validation: Split
    test: Split
    scale: Array | None = None  # an example becomes x * scale + shift, in float32
    shift: Array | None = None
    label_map: Array | None = None  # int32 [N, stored classes] -> the label that this client uses
    classes: Array | None = None  # bool [N, outputs]: outputs that this client uses


class ClientData(NamedTuple):
    """What one client's own code sees: everything of it but the test examples."""

    x: Array
    y: Array
    train: Split
    validation: Split
    scale: Array | None
    shift: Array | None
    label_map: Array | None
    classes: Array | None


class Batch(NamedTuple):
    """Examples ready for a model, some of which may be padding."""

    x: Array
    y: Array
    mask: Array  # bool [B]: false where there is no example


def client_data(data: FederatedData, i: Array) -> ClientData:
    """The data of client i."""

    def row(table: Array | None) -> Array | None:
        return None if table is None else table[i]

    def split(whole: Split) -> Split:
        return Split(whole.rows[i], whole.size[i])

    return ClientData(
        data.x,
        data.y,
        split(data.train),
        split(data.validation),
        data.scale,
        data.shift,
        row(data.label_map),
        row(data.classes),
    )


def take(data: ClientData | FederatedData, rows: Array, mask: Array) -> Batch:
    """Gather and normalise examples.

    Args:
      data: a client's data. (FederatedData works where there is no label map.)
      rows: int32 [B], rows of the flat arrays; anything where `mask` is false.
      mask: bool [B].

    Where the mask is false the example is zero and its label the first: padding has no value.
    """
    x = data.x[jnp.where(mask, rows, 0)]
    if data.scale is not None and data.shift is not None:
        x = x.astype(jnp.float32) * data.scale + data.shift
    y = data.y[jnp.where(mask, rows, 0)]
    if data.label_map is not None:
        y = data.label_map[y]

    def spread(leaf: Array) -> Array:
        return mask.reshape(mask.shape + (1,) * (leaf.ndim - mask.ndim))

    def real(leaf: Array) -> Array:
        return jnp.where(spread(leaf), leaf, jnp.zeros_like(leaf))

    return Batch(real(x), real(y), mask)
