"""One function over many clients: sharded over devices, in chunks, vmapped within a chunk."""

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
    """How items are laid out: on each device `chunks` chunks, one after the other, of `width`."""

    devices: int
    chunks: int
    width: int

    @property
    def on_each(self) -> int:
        return self.chunks * self.width


def layout(n: int, chunk: int, mesh: Mesh | None) -> Layout:
    """Chunks of equal width, `chunk` at most; there may be places for more than n items."""
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
    """f(shared, item) for every item on axis 0: sharded, then chunk by chunk, vmapped in a chunk.

    Args:
      use: bool [n]; a chunk in which none is used is not computed, its results are zero.
      chunk: how many clients are vmapped together; 1 maps without vmap.
      mesh: over which the items are spread, or None.
      before: of an item, what reads arrays that are spread over the mesh; XLA lays that out, before
        each device computes its own f(shared, (item, before(item))).
    """
    f = jax.jit(f, inline=True)  # traced once, for its results' shapes and for its work
    n, shape = use.shape[0], layout(use.shape[0], chunk, mesh)
    more = shape.devices * shape.on_each - n
    items, use = jax.tree.map(
        lambda a: jnp.pad(a, ((0, more), *((0, 0),) * (a.ndim - 1))), (items, use)
    )
    if before is not None and mesh is not None:
        out = _after(before, f, shape, mesh, shared, items, use)
        return jax.tree.map(lambda a: a[:n], out)
    own = partial(_on_device, f, shape)
    out = (_on_mesh(own, shape, mesh) if mesh else own)(shared, items, use)
    return jax.tree.map(lambda a: a[:n], out)


def _on_mesh(own: Callable[..., PyTree], shape: Layout, mesh: Mesh) -> Callable[..., PyTree]:
    """Every device computes its own items, and gets the results of all."""
    axis = mesh.axis_names[0]

    def gathered(shared: PyTree, items: PyTree, use: jax.Array) -> PyTree:
        first = jax.lax.axis_index(axis) * shape.on_each
        part = jax.tree.map(
            lambda a: jax.lax.dynamic_slice_in_dim(a, first, shape.on_each), (items, use)
        )
        return jax.lax.all_gather(own(shared, *part), axis, tiled=True)

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
    """Chunks of all devices one after the other, so that little of `before` is there at a time."""
    axis = mesh.axis_names[0]

    def own(shared: PyTree, items: PyTree, use: jax.Array) -> PyTree:
        return jax.lax.all_gather(_chunk(f, shape, shared, (items, use)), axis, tiled=True)

    specs = (P(), P(axis), P(axis))
    on_mesh = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)

    def chunk(items_use: tuple[PyTree, jax.Array]) -> PyTree:
        items, use = items_use
        return on_mesh(shared, (items, jax.vmap(before)(items)), use)

    each = shape.devices * shape.width
    cut = jax.tree.map(lambda a: a.reshape(shape.chunks, each, *a.shape[1:]), (items, use))
    out = jax.lax.map(chunk, cut)
    return jax.tree.map(lambda a: a.reshape(shape.chunks * each, *a.shape[2:]), out)


def _on_device(f: Work, shape: Layout, shared: PyTree, items: PyTree, use: jax.Array) -> PyTree:
    """f of a device's items, chunk by chunk."""
    chunk = partial(_chunk, f, shape, shared)
    if shape.chunks == 1:
        return chunk((items, use))
    cut = jax.tree.map(lambda a: a.reshape(shape.chunks, shape.width, *a.shape[1:]), (items, use))
    out = jax.lax.map(chunk, cut)
    return jax.tree.map(lambda a: a.reshape(shape.on_each, *a.shape[2:]), out)


def _chunk(f: Work, shape: Layout, shared: PyTree, items_use: tuple[PyTree, jax.Array]) -> PyTree:
    """f of the items in a chunk, or zeros where none of them is used."""
    items, use = items_use

    def work(items: PyTree) -> PyTree:
        if shape.width == 1:  # without vmap, which has slower ways for some operations
            return trees.repeat(f(shared, trees.row(items, 0)), 1)
        return jax.vmap(partial(f, shared))(items)

    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(work, items))
    return jax.lax.cond(use.any(), work, lambda _: zeros, items)
