"""Compressed uploads around any algorithm: sparsified, quantised, with error feedback.

The change of each array against the downloaded array of the same path is compressed; an array that
was not downloaded is compressed whole. Sparsification keeps the largest changes (Aji and Heafield,
2017). Quantisation rounds at random, without bias, to 2^(b-1)-1 levels on each side of 0, as in
QSGD (Alistarh et al., 2017), which scales by the norm of the array, here by its largest change.
bfloat16 has 8 significant bits, so its arrays are rounded to these first.
Error feedback adds the compression error to the client's next upload (Seide et al., 2014), for
arrays whose changes add up over rounds: those of a model (params, batch_stats), and those whose
first name ends with change or gradient. Other arrays, such as means of classes, are computed anew
in each round, where an added error would only falsify the next value. Where a client trains on from
its own model, the share `Algorithm.kept_change` of the error is in its next change anyway and is
not added; for FedFomo's clients, who start from a mixture, this share varies. The error of rounding
to 2 bits is never added: it can be larger than the change, and would grow. A layer without upload
traffic in a round, such as a block that the client does not hold, keeps its error. A later phase
starts without errors.
With FedALA a part of the error of the last layers, which depends on the learned weights, is in the
next change too, and is added all the same. With IFCA the error of a client that changes its cluster
is added to the model of the new cluster.
Variances of BatchNorm are not sent below 0: their compressed change is at least −(downloaded
variance).
"""

import math
from collections.abc import Callable, Mapping
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
from fedjax_pfl.core.errors import require
from fedjax_pfl.core.examples import FederatedData, client_data
from fedjax_pfl.core.setting import Limits, Setting
from fedjax_pfl.transforms.wrapping import (
    Selectable,
    Transform,
    TransformContext,
    is_variance,
    with_client_state,
)

_ROUNDING = 1 << 30  # folded into the key; training splits its key by small numbers
_SCALE_BITS = _INDEX_BITS = 32
_LEAST_CARRIED_BITS = 3  # of numbers whose rounding error is added to the next upload


class Client(NamedTuple):
    """Client-side state of the method, and the compression error of the last upload."""

    method: PyTree  # client-side state of the method
    lost: PyTree  # compression error, in the structure of the upload, or ()


def sent_values(size: int, top_k: float) -> int:
    """Returns how many of `size` values are sent: the fraction `top_k`, rounded up."""
    return max(1, math.ceil(round(top_k * size, 6)))  # 0.07 * 100 is 7.000000000000001


def leaf_bytes(size: int, bits: int | None, top_k: float | None, full_bits: int = 32) -> int:
    """Returns the bytes of a compressed array: values, their indices, and a scale if quantised.

    Args:
      size: Number of values.
      bits: Bits per value; None: not quantised.
      top_k: Fraction of values that are sent; None: all.
      full_bits: Bits per value before compression.
    """
    sent = size if top_k is None else sent_values(size, top_k)
    bits_per_value = (bits or full_bits) + (0 if top_k is None else _INDEX_BITS)
    return -(-(sent * bits_per_value + (_SCALE_BITS if bits else 0)) // 8)


def sparsify(x: jax.Array, top_k: float | None) -> jax.Array:
    """Returns an array with its largest values, zeros elsewhere, in the shape of `x`.

    Args:
      x: The array to compress.
      top_k: Fraction of values that are kept; None: all.
    """
    if top_k is None:
        return x
    flat = x.ravel()
    _, indices = jax.lax.top_k(jnp.abs(flat), sent_values(flat.size, top_k))
    return jnp.zeros_like(flat).at[indices].set(flat[indices]).reshape(x.shape)


def encode(x: jax.Array, key: jax.Array, bits: int | None, top_k: float | None) -> jax.Array:
    """Returns an array after compression and decompression, in the shape of `x`.

    Args:
      x: The array to compress: the change that a client uploads.
      key: Random key of the rounding.
      bits: Bits per value; None: not quantised.
      top_k: Fraction of values that are sent; None: all.
    """
    flat = sparsify(x, top_k).ravel()
    if bits is not None:
        levels = 2 ** (bits - 1) - 1
        scale = jnp.max(jnp.abs(flat)) / levels
        divisor = jnp.where(scale == 0, 1.0, scale)
        # Comparing a uniform number, instead of adding it, keeps values on the grid at 16 bits.
        exact = jnp.clip(flat / divisor, -levels, levels)
        floor = jnp.floor(exact)
        rounds_up = jax.random.uniform(key, flat.shape) < (exact - floor).astype(jnp.float32)
        flat = jnp.where(rounds_up, floor + 1, floor) * scale
    return flat.reshape(x.shape)


def compression(
    federation: Federation,
    data: FederatedData,
    *,
    bits: int | None = None,
    top_k: float | None = None,
    feedback: bool = True,
) -> Transform:
    """Returns a transform that compresses uploads.

    Args:
      federation: Tells the number of clients.
      data: Examples; only their shapes matter, which determine those of an upload.
      bits: Bits per value, 2 to 16; None: not quantised.
      top_k: Fraction of the values of each array that are sent; None: all.
      feedback: Whether a client adds the compression error to its next upload, see above.
    """
    require(bits is None or 2 <= bits <= 16, f"bits is {bits}; it must be 2 to 16")
    require(top_k is None or 0 < top_k <= 1, f"top_k is {top_k}; it is a fraction, above 0, to 1")

    def has_errors(member: Algorithm) -> bool:
        """Returns True if clients store compression errors, False if none would be added."""
        return feedback and not _is_one(member.kept_change)

    def wrap(member: Algorithm) -> Algorithm:
        def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
            # With the unchanged key, training samples the same batches as without compression.
            result = member.train(payload, client.method, ctx)
            key = jax.random.fold_in(ctx.key, _ROUNDING)
            paths, structure = jax.tree_util.tree_flatten_with_path(result.upload)
            new = [leaf for _, leaf in paths]
            old = jax.tree.leaves(trees.matching_download(payload, result.upload))
            lost = jax.tree.leaves(client.lost)
            up, share = member.traffic(payload, result.upload).up, member.kept_change
            share = share(payload, client.method, ctx) if callable(share) else share
            for i, (path, leaf) in enumerate(paths):
                if not _is_exact(leaf):
                    layer_share = _of_layer(share, path)
                    adds_up = has_errors(member) and _adds_up(path) and not _is_one(layer_share)
                    change = leaf - old[i]
                    if adds_up:
                        change += jnp.asarray(1 - layer_share, leaf.dtype) * lost[i]
                    sent = encode(change, jax.random.fold_in(key, i), bits, top_k)
                    sent = jnp.maximum(sent, -old[i]) if is_variance(path) else sent
                    is_sent = jnp.asarray(up.get(trees.layer_name(path), 1)) > 0
                    new[i] = jnp.where(is_sent, old[i] + sent, leaf)
                    if adds_up:
                        # `new` includes the rounding of the sum, which is large in bfloat16.
                        adds_rounding = bits is None or bits >= _LEAST_CARRIED_BITS
                        arrived = new[i] - old[i] if adds_rounding else sparsify(change, top_k)
                        lost[i] = jnp.where(is_sent, change - arrived, lost[i])
            new_lost = jax.tree.unflatten(structure, lost) if has_errors(member) else ()
            upload = jax.tree.unflatten(structure, new)
            return result._replace(upload=upload, client=Client(result.client, new_lost))

        def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
            return member.personalize(state, client.method, ctx)

        def traffic(payload: PyTree, upload: PyTree) -> Traffic:
            return _compressed_traffic(member.traffic(payload, upload), upload, bits, top_k)

        return member._replace(train=train, personalize=personalize, traffic=traffic)

    def first(member: Algorithm, key: jax.Array, state: State, start: State | None) -> PyTree:
        if not has_errors(member):
            return ()

        def run(data: FederatedData) -> PyTree:
            payload = member.send(
                state._replace(clients=()), ClientContext(i=0, data=None, t=0, key=key)
            )
            ctx = ClientContext(i=0, data=client_data(data, jnp.asarray(0)), t=0, key=key)
            return member.train(payload, trees.row(state.clients, 0), ctx).upload

        shapes = jax.eval_shape(run, data)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return trees.repeat(zeros, federation.clients)

    return partial(with_client_state, record=Client, first=first, wrap=wrap)


def _adds_up(path: tuple[Any, ...]) -> bool:
    """Returns True for an array of an upload whose changes add up over rounds."""
    names = [str(getattr(entry, "key", getattr(entry, "name", ""))) for entry in path]
    in_model = "params" in names or "batch_stats" in names
    return in_model or (bool(names) and names[0].endswith(("change", "gradient")))


def _of_layer(kept_change: Any, path: tuple[Any, ...]) -> Any:
    """Returns the share `Algorithm.kept_change` of an array of an upload."""
    if isinstance(kept_change, Mapping):
        return kept_change.get(trees.layer_name(path), 0.0)
    return kept_change


def _is_one(share: Any) -> bool:
    """Returns True if a share is 1 in all runs of a program; a swept share is not."""
    return isinstance(share, int | float) and share == 1


def _is_exact(leaf: Any) -> bool:
    """Returns True for masks, counters and arrays without elements, which are not compressed."""
    return not leaf.size or not jnp.issubdtype(leaf.dtype, jnp.floating)


def _compressed_traffic(
    traffic: Traffic, upload: PyTree, bits: int | None, top_k: float | None
) -> Traffic:
    """Returns the traffic of an upload after compression.

    Args:
      traffic: Traffic without compression.
      upload: The upload.
      bits: Bits per value; None: not quantised.
      top_k: Fraction of values that are sent; None: all.
    """
    layers = trees.layers(upload)
    # A method may count a part of its upload under a name that is no layer; it counts in full.
    up: dict[str, Any] = {name: n for name, n in traffic.up.items() if name not in layers}
    for layer, leaves in layers.items():
        full = max(1, sum(map(trees.leaf_bytes, leaves)))
        compressed = sum(
            trees.leaf_bytes(x)
            if _is_exact(x)
            else leaf_bytes(x.size, bits, top_k, 8 * x.dtype.itemsize)
            for x in leaves
        )
        count = traffic.up.get(layer, 0)
        if isinstance(count, int):
            up[layer] = -(-count * compressed // full)
        else:  # depends on the round: all, part or nothing of the layer
            part = jnp.ceil(count.astype(jnp.float32) * (compressed / full)).astype(jnp.int32)
            up[layer] = jnp.where(count == full, compressed, part)
    return Traffic(traffic.down, up)


def _make(value_of: Callable[[str], Any], context: TransformContext) -> Transform | None:
    """Returns the transform, or None if upload_bits and upload_top_k are unset.

    `value_of` returns the value of a setting by its name.
    """
    bits, top_k = value_of("upload_bits"), value_of("upload_top_k")
    if bits is None and top_k is None:
        return None
    return compression(context.federation, context.data, bits=bits, top_k=top_k)


COMPRESSION = Selectable(
    "Uploads and the server",
    {
        "upload_bits": Setting(
            int,
            "Bits per uploaded number, 2 to 16; unset: 32.",
            limits=Limits(low=2, high=16),
        ),
        "upload_top_k": Setting(
            float,
            "Fraction of an upload's numbers to send, those with the largest changes; unset: all.",
            limits=Limits(above=0, high=1),
        ),
    },
    _make,
)
