"""Arrays of a federation: all examples in one flat array, and the rows of each client.

Images are stored as uint8. `take` gathers examples, normalises them and maps their labels.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

Array = Any  # a JAX array in compiled code, a NumPy array while a federation is built


class Split(NamedTuple):
    """Rows of the flat arrays `x` and `y` that belong to one split of a client.

    In `FederatedData` both fields have a leading client axis [N].
    """

    rows: Array  # int32 [longest]; entries from `size` on are padding
    size: Array  # int32 []: number of examples


class FederatedData(NamedTuple):
    """Examples of all clients. A pytree: passed into compiled functions, never closed over.

    With `label_map`, int32 [N, stored classes], client i uses label_map[i, y] instead of y.
    """

    x: Array  # [examples, ...]: uint8, float32, or int32 tokens
    y: Array  # [examples, ...]: int32 classes, float32 targets, or bool labels
    train: Split
    validation: Split
    test: Split
    scale: Array | None = None  # [...] or []: float32 x * scale + shift is used instead of x
    shift: Array | None = None  # None, like scale: x is used as stored
    label_map: Array | None = None  # None: labels as stored in y
    classes: Array | None = None  # bool [N, outputs]: outputs that a client uses; None: all


class ClientData(NamedTuple):
    """The fields of `FederatedData` for one client, without its test examples.

    Code of a client reads only its own rows of `x` and `y`, which hold the examples of all clients.
    """

    x: Array  # [examples, ...]: the examples of all clients
    y: Array  # [examples, ...]: the labels of all clients
    train: Split  # the client's rows of x and y
    validation: Split  # rows for validation
    scale: Array | None  # as in `FederatedData`, the same for all clients
    shift: Array | None  # as in `FederatedData`
    label_map: Array | None  # int32 [stored classes]: the client's row
    classes: Array | None  # bool [outputs]: outputs that the client uses; None: all


class Batch(NamedTuple):
    """Examples that are ready for a model."""

    x: Array  # [B, ...]: float32, or int32 tokens
    y: Array  # [B, ...]
    mask: Array  # bool [B]: False for padding


def client_data(data: FederatedData, i: Array) -> ClientData:
    """Returns the data of client `i`: its rows of all fields but `x` and `y`, without `test`."""

    def row(table: Array | None) -> Array | None:
        return None if table is None else table[i]

    return ClientData(
        x=data.x,
        y=data.y,
        train=Split(data.train.rows[i], data.train.size[i]),
        validation=Split(data.validation.rows[i], data.validation.size[i]),
        scale=data.scale,
        shift=data.shift,
        label_map=row(data.label_map),
        classes=row(data.classes),
    )


def take(data: ClientData | FederatedData, rows: Array, mask: Array) -> Batch:
    """Gathers examples, normalises `x` and maps `y`.

    Args:
      data: Data of one client. `FederatedData` also works if it has no label map.
      rows: int32 [B], rows of the flat arrays; ignored where `mask` is False.
      mask: bool [B].

    Returns:
      A batch whose padding has zero examples and zero labels.
    """
    x, y = _gather(data, jnp.where(mask, rows, 0))

    def zero_padding(leaf: Array) -> Array:
        leaf_mask = mask.reshape(mask.shape + (1,) * (leaf.ndim - mask.ndim))
        return jnp.where(leaf_mask, leaf, jnp.zeros_like(leaf))

    return Batch(zero_padding(x), zero_padding(y), mask)


def take_repeating(data: ClientData, rows: Array, mask: Array) -> Batch:
    """Gathers examples as `take` does; padding repeats the first real example, if there is one.

    For gradients and sums. A network or loss without a value or gradient at 0, such as x / ‖x‖,
    would return NaN for zeros, and 0 times NaN would reach the result.
    """
    has_examples = jnp.any(mask)
    rows = jnp.where(mask, rows, rows[jnp.argmax(mask)])
    x, y = _gather(data, jnp.where(has_examples, rows, 0))
    x, y = (jnp.where(has_examples, leaf, jnp.zeros_like(leaf)) for leaf in (x, y))
    return Batch(x, y, mask)


def _gather(data: ClientData | FederatedData, rows: Array) -> tuple[Array, Array]:
    """Returns normalised examples x and mapped labels y of rows, int32 [B], of the flat arrays."""
    x = data.x[rows]
    if data.scale is not None and data.shift is not None:
        x = x.astype(jnp.float32) * data.scale + data.shift
    y = data.y[rows]
    return x, y if data.label_map is None else data.label_map[y]
