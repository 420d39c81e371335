"""Smaller uploads around any algorithm: sparsified, quantised, with error feedback.

What is compressed is the change of each array against the one that came down under the same path
(an array that did not come down is compressed as it is). Sparsification keeps the largest changes
(Aji and Heafield, 2017); quantisation rounds at random between 2^(b-1)-1 levels a side, unbiased
(QSGD, Alistarh et al., 2017); what got lost is added to the next upload (Seide et al., 2014).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Federation,
    PyTree,
    State,
    Traffic,
)
from fedjax_pfl.core.examples import FederatedData, client_data
from fedjax_pfl.core.setting import Setting
from fedjax_pfl.transforms.wrapping import Around, Selectable, Transform, keeping

_ROUNDING = 1 << 30  # apart from the small numbers that training splits its key by
_SCALE_BITS = _INDEX_BITS = _FLOAT_BITS = 32


class Client(NamedTuple):
    """What stays with a client: what the method leaves there, and what compression has lost."""

    method: PyTree
    lost: PyTree


def leaf_bytes(size: int, bits: int | None, top_k: float | None) -> int:
    """Bytes of one compressed array: kept values, their places, and a scale where quantised."""
    kept = size if top_k is None else math.ceil(top_k * size)
    each = (bits or _FLOAT_BITS) + (0 if top_k is None else _INDEX_BITS)
    return -(-(kept * each + (_SCALE_BITS if bits else 0)) // 8)


def encode(x: jax.Array, key: jax.Array, bits: int | None, top_k: float | None) -> jax.Array:
    """What the receiver reconstructs of x."""
    flat = x.ravel()
    if top_k is not None:
        _, places = jax.lax.top_k(jnp.abs(flat), math.ceil(top_k * flat.size))
        flat = jnp.zeros_like(flat).at[places].set(flat[places])
    if bits is not None:
        levels = 2 ** (bits - 1) - 1
        scale = jnp.max(jnp.abs(flat)) / levels
        safe = jnp.where(scale == 0, 1.0, scale)
        # The draw is compared, not added: at 16 bits a sum would round off the grid.
        exact = jnp.clip(flat / safe, -levels, levels)
        below = jnp.floor(exact)
        up = jax.random.uniform(key, flat.shape) < exact - below
        flat = jnp.where(up, below + 1, below) * scale
    return flat.reshape(x.shape)


def compression(
    federation: Federation,
    data: FederatedData,
    *,
    bits: int | None = None,
    top_k: float | None = None,
    feedback: bool = True,
) -> Transform:
    """Smaller uploads.

    Args:
      data: only its shapes matter; they tell those of an upload.
      bits: of each quantised value, 2 to 16; None: not quantised.
      top_k: share of the values of each array that is sent; None: all.
      feedback: whether a client adds what was lost to its next upload.
    """

    def wrap(member: Algorithm) -> Algorithm:
        def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
            # The same key as without compression, so that both runs draw the same batches.
            trained = member.train(payload, client.method, ctx)
            key = jax.random.fold_in(ctx.key, _ROUNDING)
            new, shape = jax.tree.flatten(trained.upload)
            old = jax.tree.leaves(trees.matching_download(payload, trained.upload))
            lost = jax.tree.leaves(client.lost) if feedback else [jnp.zeros(())] * len(new)
            for i, leaf in enumerate(new):
                if not _exact(leaf):
                    wanted = leaf - old[i] + lost[i]
                    sent = encode(wanted, jax.random.fold_in(key, i), bits, top_k)
                    new[i], lost[i] = old[i] + sent, wanted - sent
            kept = jax.tree.unflatten(shape, lost) if feedback else ()
            upload = jax.tree.unflatten(shape, new)
            return trained._replace(upload=upload, client=Client(trained.client, kept))

        def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
            return member.personalize(state, client.method, ctx)

        def traffic(payload: PyTree, upload: PyTree) -> Traffic:
            return _packed(member.traffic(payload, upload), upload, bits, top_k)

        return member._replace(train=train, personalize=personalize, traffic=traffic)

    def first(member: Algorithm, key: jax.Array, state: State, start: State | None) -> PyTree:
        if not feedback:
            return ()

        def upload_of() -> PyTree:
            payload = member.send(state._replace(clients=()), ClientContext(0, None, 0, key))
            ctx = ClientContext(0, client_data(data, jnp.asarray(0)), 0, key)
            return member.train(payload, trees.row(state.clients, 0), ctx).upload

        shapes = jax.eval_shape(upload_of)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return trees.repeat(zeros, federation.clients)

    return partial(keeping, record=Client, first=first, wrap=wrap)


def _asked_for(value_of: Callable[[str], Any], around: Around) -> Transform | None:
    bits, top_k = value_of("upload_bits"), value_of("upload_top_k")
    if bits is None and top_k is None:
        return None
    return compression(around.federation, around.data, bits=bits, top_k=top_k)


COMPRESSION = Selectable(
    "Uploads and the server",
    {
        "upload_bits": Setting(
            int, "Bits per uploaded number, 2 to 16; unset: 32.", low=2, high=16
        ),
        "upload_top_k": Setting(
            float,
            "Fraction of an upload's numbers to send, those with the largest changes; unset: all.",
            above=0,
            high=1,
        ),
    },
    _asked_for,
)


def _exact(leaf: Any) -> bool:
    """Masks and counters travel as they are."""
    return not jnp.issubdtype(leaf.dtype, jnp.floating)


def _packed(bill: Traffic, upload: PyTree, bits: int | None, top_k: float | None) -> Traffic:
    """The bill of an upload after compression."""
    up: dict[str, Any] = {}
    for layer, leaves in trees.layers(upload).items():
        full = sum(map(trees.leaf_bytes, leaves))
        packed = sum(
            trees.leaf_bytes(x) if _exact(x) else leaf_bytes(x.size, bits, top_k) for x in leaves
        )
        share = bill.up.get(layer, 0)
        if isinstance(share, int):
            up[layer] = -(-share * packed // full)
        else:  # a part that depends on the round: whole, none, or a share of the layer
            part = jnp.ceil(share.astype(jnp.float32) * (packed / full)).astype(jnp.int32)
            up[layer] = jnp.where(share == full, packed, part)
    return Traffic(bill.down, up)
