"""One function over many clients: sharded over devices, in chunks, vmapped within a chunk."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import PyTree


def map_clients(
    f: Callable[[PyTree, PyTree], PyTree],
    shared: PyTree,
    items: PyTree,
    use: jax.Array,
    chunk: int,
    mesh: Mesh | None,
) -> PyTree:
    """f(shared, item) for every item on axis 0: sharded, then chunk by chunk, vmapped in a chunk.

    Args:
      use: bool [n]; a chunk in which none is used is not computed, its results are zero.
      chunk: how many clients are vmapped together; 1 maps without vmap.
      mesh: over which the items are spread, or None.
    """
    f = jax.jit(f, inline=True)  # traced once, for its results' shapes and for its work
    n = use.shape[0]
    devices = mesh.size if mesh else 1
    per_device = -(-n // devices)
    chunks = -(-per_device // max(1, min(chunk, per_device)))
    width = -(-per_device // chunks)
    padded = devices * chunks * width
    items, use = jax.tree.map(
        lambda a: jnp.pad(a, ((0, padded - n), *((0, 0),) * (a.ndim - 1))), (items, use)
    )

    def on_device(shared: PyTree, items: PyTree, use: jax.Array) -> PyTree:
        whole = (lambda item: jax.vmap(partial(f, shared))(item)) if width > 1 else None

        def one_chunk(item_use: tuple[PyTree, jax.Array]) -> PyTree:
            item, use = item_use
            if whole is None:
                work = lambda item: trees.repeat(f(shared, trees.row(item, 0)), 1)
            else:
                work = whole
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(work, item))
            return jax.lax.cond(use.any(), work, lambda _: zeros, item)

        if chunks == 1:
            return one_chunk((items, use))
        cut = jax.tree.map(lambda a: a.reshape(chunks, width, *a.shape[1:]), (items, use))
        out = jax.lax.map(one_chunk, cut)
        return jax.tree.map(lambda a: a.reshape(chunks * width, *a.shape[2:]), out)

    if mesh is None:
        out = on_device(shared, items, use)
    else:
        axis, share = mesh.axis_names[0], chunks * width

        def gathered(shared: PyTree, items: PyTree, use: jax.Array) -> PyTree:
            first = jax.lax.axis_index(axis) * share
            own = jax.tree.map(
                lambda a: jax.lax.dynamic_slice_in_dim(a, first, share), (items, use)
            )
            return jax.lax.all_gather(on_device(shared, *own), axis, tiled=True)

        # All of it comes in whole: told that items are sharded, XLA would shard what they are made
        # of, and send that around. Random keys and loop carries mix both kinds freely in here.
        out = jax.shard_map(gathered, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(
            shared, items, use
        )
    return jax.tree.map(lambda a: a[:n], out)
