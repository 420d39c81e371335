"""Maps a function over clients: sharded over devices, in chunks, vmapped within a chunk.

Values that are computed from the rows of all clients, such as mixtures of models, are computed for
a larger block of clients at once, so that a block reads the rows once.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import PyTree

Work = Callable[[PyTree, PyTree], PyTree]  # (shared, item) -> result
# Largest block, in clients and in bytes of what they read: more do not make products faster.
_BLOCK_CLIENTS = 128
_BLOCK_BYTES = 1 << 25


class Layout(NamedTuple):
    """Layout of items: on each device, blocks of `chunks` chunks of `width` items, in sequence."""

    devices: int  # number of devices
    blocks: int  # number of blocks on each device
    chunks: int  # number of chunks in a block
    width: int  # number of items in a chunk, which are vmapped together

    @property
    def per_block(self) -> int:
        """Returns the number of items in a block of one device."""
        return self.chunks * self.width

    @property
    def per_device(self) -> int:
        """Returns the number of items on each device."""
        return self.blocks * self.per_block


def layout(n: int, chunk: int, mesh: Mesh | None, block: int | None = None) -> Layout:
    """Returns a layout for at least n items on a mesh, or on one device if the mesh is None.

    All chunks have the same width, at most `chunk`, and all blocks the same number of chunks: at
    most `block` items, or one chunk. Without `block` there is one block.
    """
    devices = mesh.size if mesh else 1
    per_device = -(-n // devices)
    chunks = -(-per_device // max(1, min(chunk, per_device)))
    width = -(-per_device // chunks)
    blocks = 1 if block is None else -(-chunks // max(1, block // width))
    return Layout(devices, blocks, -(-chunks // blocks), width)


def map_clients(
    f: Work,
    shared: PyTree,
    items: PyTree,
    use: jax.Array,
    chunk: int,
    mesh: Mesh | None,
    before: Work | None = None,
    read: PyTree = (),
    *,
    block: int | None = None,
    is_spread: bool = False,
) -> PyTree:
    """Computes f(shared, item) for every item. Returns the results stacked on axis 0, [n, ...].

    Args:
      f: Function of the shared inputs and one item that returns a tree.
      shared: Inputs that are the same for all items.
      items: Tree with leaves [n, ...] that holds an item for each client.
      use: bool [n]. Chunks without a used item are not computed; their results are zero.
      chunk: Number of clients that are vmapped together; 1 maps without vmap.
      mesh: Devices over which the items are spread; None: one device.
      before: Function of `read` and one item, vmapped over a block of clients, which can be many
        chunks. The result is f(shared, (item, before(read, item))). Default: f gets the item alone.
      read: Arrays that `before` reads, the same for all items.
      block: Most clients in a block, if they are more than in a chunk. Default: 128.
      is_spread: Whether `read` is spread over the mesh. Then XLA computes `before`.
    """
    f = jax.jit(f, inline=True)  # traced once, for result shapes and for the computation
    n = use.shape[0]
    if before is None:
        shape = layout(n, chunk, mesh)
    else:
        before = jax.jit(before, inline=True)
        result = jax.eval_shape(before, read, trees.row(items, 0))
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(result))
        shape = layout(n, chunk, mesh, min(block or _BLOCK_CLIENTS, _BLOCK_BYTES // max(1, size)))
    padding = shape.devices * shape.per_device - n
    items, use = jax.tree.map(
        lambda a: jnp.pad(a, ((0, padding), *((0, 0),) * (a.ndim - 1))), (items, use)
    )
    on_device = partial(_blocks, f, before, shape)
    if mesh is None:
        out = on_device((shared, read), items, use)
    elif before is not None and is_spread:
        out = _spread_blocks(f, before, shape, mesh, (shared, read), items, use)
    else:
        out = _on_mesh(on_device, shape, mesh)((shared, read), items, use)
    return jax.tree.map(lambda a: a[:n], out)


def _on_mesh(on_device: Callable[..., PyTree], shape: Layout, mesh: Mesh) -> Callable[..., PyTree]:
    """Returns a function of (inputs, items, use) whose items each device computes itself.

    Its results are those of all items, on every device. `on_device` takes the same arguments, for
    the items of one device.
    """
    axis = mesh.axis_names[0]

    def gathered(inputs: PyTree, items: PyTree, use: jax.Array) -> PyTree:
        """Computes the items of this device and gathers those of the others."""
        first = jax.lax.axis_index(axis) * shape.per_device
        part = jax.tree.map(
            lambda a: jax.lax.dynamic_slice_in_dim(a, first, shape.per_device), (items, use)
        )
        return jax.lax.all_gather(on_device(inputs, *part), axis, tiled=True)

    # Inputs are declared as replicated: if items were declared sharded, XLA would shard what they
    # are computed from and communicate that. Replication is not checked, because random keys and
    # loop carries mix values that are replicated with values that are not.
    return jax.shard_map(gathered, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


def _spread_blocks(
    f: Work,
    before: Work,
    shape: Layout,
    mesh: Mesh,
    inputs: tuple[PyTree, PyTree],
    items: PyTree,
    use: jax.Array,
) -> PyTree:
    """Like `_blocks` for the items of all devices, with arrays to read spread over the mesh.

    Goes block by block over all devices, so that few results of `before` exist at a time.
    """
    axis, (shared, read) = mesh.axis_names[0], inputs

    def on_device(shared: PyTree, items: PyTree, use: jax.Array) -> PyTree:
        return jax.lax.all_gather(_chunks(f, shape, shared, (items, use)), axis, tiled=True)

    specs = (P(), P(axis), P(axis))
    on_mesh = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)

    def block(items_use: tuple[PyTree, jax.Array]) -> PyTree:
        items, use = items_use
        return on_mesh(shared, (items, jax.vmap(partial(before, read))(items)), use)

    return _in_sequence(block, shape.blocks, (items, use))


def _blocks(
    f: Work,
    before: Work | None,
    shape: Layout,
    inputs: tuple[PyTree, PyTree],
    items: PyTree,
    use: jax.Array,
) -> PyTree:
    """Computes the items of one device, block by block. `inputs` are those of f and of `before`."""
    shared, read = inputs

    def block(items_use: tuple[PyTree, jax.Array]) -> PyTree:
        items, use = items_use
        if before is not None:
            items = items, jax.vmap(partial(before, read))(items)
        return _chunks(f, shape, shared, (items, use))

    return _in_sequence(block, shape.blocks, (items, use))


def _chunks(f: Work, shape: Layout, shared: PyTree, items_use: tuple[PyTree, jax.Array]) -> PyTree:
    """Computes f(shared, item) of the items of a block, chunk by chunk."""
    return _in_sequence(partial(_chunk, f, shape, shared), shape.chunks, items_use)


def _in_sequence(f: Callable[[PyTree], PyTree], parts: int, tree: PyTree) -> PyTree:
    """Computes f of equal parts of axis 0 of a tree, one after another. Joins the results."""
    if parts == 1:
        return f(tree)
    tree = jax.tree.map(lambda a: a.reshape(parts, len(a) // parts, *a.shape[1:]), tree)
    out = jax.lax.map(f, tree)
    return jax.tree.map(lambda a: a.reshape(parts * a.shape[1], *a.shape[2:]), out)


def _chunk(f: Work, shape: Layout, shared: PyTree, items_use: tuple[PyTree, jax.Array]) -> PyTree:
    """Computes f(shared, item) of the items of a chunk, or zeros if none of them is used.

    `items_use` has the items, leaves [width, ...], and bool [width], True for used items.
    """
    items, use = items_use

    def compute(items: PyTree) -> PyTree:
        if shape.width == 1:  # vmap is slower for some operations
            return trees.repeat(f(shared, trees.row(items, 0)), 1)
        return jax.vmap(partial(f, shared))(items)

    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(compute, items))
    return jax.lax.cond(use.any(), compute, lambda _: zeros, items)
