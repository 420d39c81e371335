"""Smaller uploads around any algorithm: sparsified, quantised, with error feedback.

What is compressed is the change of each array against the one that came down under the same path
(an array that did not come down is compressed as it is). Sparsification keeps the largest changes
(Aji and Heafield, 2017); quantisation rounds at random between 2^(b-1)-1 levels a side, unbiased
(QSGD, Alistarh et al., 2017); what got lost is added to the next upload (Seide et al., 2014).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Algorithm, Federation, PyTree, State, Traffic
from fedjax_pfl.core.examples import FederatedData, client_data
from fedjax_pfl.core.groups import members

_ROUNDING = 1 << 30  # apart from the small numbers that training splits its key by
_SCALE_BITS = _INDEX_BITS = _FLOAT_BITS = 32


class Client(NamedTuple):
    """A client's own state and what its compression has lost so far."""

    own: PyTree
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


def compressed(
    algorithm: Algorithm,
    federation: Federation,
    data: FederatedData,
    *,
    bits: int | None = None,
    top_k: float | None = None,
    feedback: bool = True,
) -> Algorithm:
    """The same algorithm with smaller uploads.

    Args:
      data: only its shapes matter; they tell those of an upload.
      bits: of each quantised value, 2 to 16; None: not quantised.
      top_k: share of the values of each array that is sent; None: all.
      feedback: whether a client adds what was lost to its next upload.
    """

    def exact(leaf: Any) -> bool:  # masks and counters travel as they are
        return not jnp.issubdtype(leaf.dtype, jnp.floating)

    def wrap(member: Algorithm) -> tuple[Callable[..., Any], ...]:
        def train(payload: PyTree, client: Client, data: Any, t: Any, key: jax.Array) -> Any:
            # The same key as without compression, so that both runs draw the same batches.
            upload, trained, own, metrics = member.train(payload, client.own, data, t, key)
            round_key = jax.random.fold_in(key, _ROUNDING)
            new, shape = jax.tree.flatten(upload)
            old = jax.tree.leaves(trees.came_down(payload, upload))
            lost = jax.tree.leaves(client.lost) if feedback else [jnp.zeros(())] * len(new)
            for i, leaf in enumerate(new):
                if not exact(leaf):
                    wanted = leaf - old[i] + lost[i]
                    sent = encode(wanted, jax.random.fold_in(round_key, i), bits, top_k)
                    new[i], lost[i] = old[i] + sent, wanted - sent
            kept = jax.tree.unflatten(shape, lost) if feedback else ()
            return jax.tree.unflatten(shape, new), trained, Client(own, kept), metrics

        def personal(server: PyTree, rows: PyTree, client: Client, *rest: Any) -> PyTree:
            return member.personal(server, rows, client.own, *rest)

        def traffic(payload: PyTree, upload: PyTree) -> Traffic:
            bill = member.traffic(payload, upload)
            up: dict[str, Any] = {}
            for layer, leaves in trees.layers(upload).items():
                full = sum(map(trees.leaf_bytes, leaves))
                packed = sum(
                    trees.leaf_bytes(x) if exact(x) else leaf_bytes(x.size, bits, top_k)
                    for x in leaves
                )
                share = bill.up.get(layer, 0)
                if isinstance(share, int):
                    up[layer] = -(-share * packed // full)
                else:  # a part that depends on the round: whole, none, or a share of the layer
                    part = jnp.ceil(share.astype(jnp.float32) * (packed / full)).astype(jnp.int32)
                    up[layer] = jnp.where(share == full, packed, part)
            return Traffic(bill.down, up)

        return train, personal, traffic

    parts = members(algorithm)
    wrapped = tuple(zip(*map(wrap, parts), strict=True))
    alone = len(parts) == 1
    train, personal, traffic = (f[0] if alone else f for f in wrapped)

    def init(key: jax.Array, start: State | None = None) -> State:
        state = algorithm.init(key, start and bare(start))
        owned = (state.clients,) if alone else state.clients

        def upload_of(member: Algorithm, clients: PyTree) -> PyTree:
            payload = member.send(state.server, state.rows, 0, 0, key)
            own = trees.row(clients, 0)
            return member.train(payload, own, client_data(data, jnp.asarray(0)), 0, key)[0]

        def with_lost(member: Algorithm, clients: PyTree) -> Client:
            if not feedback:
                return Client(clients, ())
            shapes = jax.eval_shape(lambda: upload_of(member, clients))
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            return Client(clients, trees.repeat(zeros, federation.clients))

        stacked = tuple(map(with_lost, parts, owned))
        return state._replace(clients=stacked[0] if alone else stacked)

    return algorithm._replace(
        init=init,
        train=train,
        personal=personal,
        traffic=traffic,
        observe=lambda state: algorithm.observe(bare(state)),
    )


def bare(state: State) -> State:
    """The state without what compression adds to it."""
    wrapped = lambda part: isinstance(part, Client)
    own = lambda part: part.own if wrapped(part) else part
    return state._replace(clients=jax.tree.map(own, state.clients, is_leaf=wrapped))
