"""Maps a function over clients: sharded over devices, in chunks, vmapped within a chunk."""

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


class Layout(NamedTuple):
    """Layout of items: on each device, `chunks` chunks of `width` items, in sequence."""

    devices: int  # number of devices
    chunks: int  # number of chunks on each device
    width: int  # number of items in a chunk, which are vmapped together

    @property
    def per_device(self) -> int:
        """Returns the number of items on each device."""
        return self.chunks * self.width


def layout(n: int, chunk: int, mesh: Mesh | None) -> Layout:
    """Returns a layout for at least n items on a mesh, or on one device if the mesh is None.

    All chunks have the same width, at most `chunk`.
    """
    devices = mesh.size if mesh else 1
    per_device = -(-n // devices)
    chunks = -(-per_device // max(1, min(chunk, per_device)))
    return Layout(devices, chunks, -(-per_device // chunks))


def map_clients(
    f: Work,
    shared: PyTree,
    items: PyTree,
    use: jax.Array,
    chunk: int,
    mesh: Mesh | None,
    before: Callable[[PyTree], PyTree] | None = None,
) -> PyTree:
    """Computes f(shared, item) for every item. Returns the results stacked on axis 0, [n, ...].

    Args:
      f: Function of the shared inputs and one item that returns a tree.
      shared: Inputs that are the same for all items.
      items: Tree with leaves [n, ...] that holds an item for each client.
      use: bool [n]. Chunks without a used item are not computed; their results are zero.
      chunk: Number of clients that are vmapped together; 1 maps without vmap.
      mesh: Devices over which the items are spread; None: one device.
      before: Function of an item that reads arrays spread over the mesh. XLA computes it first;
        then each device computes f(shared, (item, before(item))) of its items. Default: f gets the
        item alone.
    """
    f = jax.jit(f, inline=True)  # traced once, for result shapes and for the computation
    n, shape = use.shape[0], layout(use.shape[0], chunk, mesh)
    padding = shape.devices * shape.per_device - n
    items, use = jax.tree.map(
        lambda a: jnp.pad(a, ((0, padding), *((0, 0),) * (a.ndim - 1))), (items, use)
    )
    if before is not None and mesh is not None:
        out = _after(before, f, shape, mesh, shared, items, use)
        return jax.tree.map(lambda a: a[:n], out)
    on_device = partial(_on_device, f, shape)
    out = (_on_mesh(on_device, shape, mesh) if mesh else on_device)(shared, items, use)
    return jax.tree.map(lambda a: a[:n], out)


def _on_mesh(on_device: Callable[..., PyTree], shape: Layout, mesh: Mesh) -> Callable[..., PyTree]:
    """Returns a function of (shared, items, use) whose items each device computes itself.

    Its results are those of all items, on every device. `on_device` takes the same arguments, for
    the items of one device.
    """
    axis = mesh.axis_names[0]

    def gathered(shared: PyTree, items: PyTree, use: jax.Array) -> PyTree:
        """Computes the items of this device and gathers those of the others."""
        first = jax.lax.axis_index(axis) * shape.per_device
        part = jax.tree.map(
            lambda a: jax.lax.dynamic_slice_in_dim(a, first, shape.per_device), (items, use)
        )
        return jax.lax.all_gather(on_device(shared, *part), axis, tiled=True)

    # Inputs are declared as replicated: if items were declared sharded, XLA would shard what they
    # are computed from and communicate that. Replication is not checked, because random keys and
    # loop carries mix values that are replicated with values that are not.
    return jax.shard_map(gathered, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


def _after(
    before: Callable[[PyTree], PyTree],
    f: Work,
    shape: Layout,
    mesh: Mesh,
    shared: PyTree,
    items: PyTree,
    use: jax.Array,
) -> PyTree:
    """Computes `map_clients` with `before` for items that are padded to the layout `shape`.

    Goes chunk by chunk over all devices, so that few results of `before` exist at a time.
    """
    axis = mesh.axis_names[0]

    def on_device(shared: PyTree, items: PyTree, use: jax.Array) -> PyTree:
        return jax.lax.all_gather(_chunk(f, shape, shared, (items, use)), axis, tiled=True)

    specs = (P(), P(axis), P(axis))
    on_mesh = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)

    def chunk(items_use: tuple[PyTree, jax.Array]) -> PyTree:
        items, use = items_use
        return on_mesh(shared, (items, jax.vmap(before)(items)), use)

    size = shape.devices * shape.width
    chunks = jax.tree.map(lambda a: a.reshape(shape.chunks, size, *a.shape[1:]), (items, use))
    out = jax.lax.map(chunk, chunks)
    return jax.tree.map(lambda a: a.reshape(shape.chunks * size, *a.shape[2:]), out)


def _on_device(f: Work, shape: Layout, shared: PyTree, items: PyTree, use: jax.Array) -> PyTree:
    """Computes f(shared, item) of the items of one device, chunk by chunk."""
    chunk = partial(_chunk, f, shape, shared)
    if shape.chunks == 1:
        return chunk((items, use))
    chunks = jax.tree.map(
        lambda a: a.reshape(shape.chunks, shape.width, *a.shape[1:]), (items, use)
    )
    out = jax.lax.map(chunk, chunks)
    return jax.tree.map(lambda a: a.reshape(shape.per_device, *a.shape[2:]), out)


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
