"""Local differential privacy: each client clips and noises its upload before it leaves the client.

Let p be the downloaded value at an upload's path, or 0 if nothing was downloaded there, and
Δ = upload − p over the whole tree:

  Δ ← Δ min(1, C / ‖Δ‖₂);   upload ← p + Δ + N(0, (z C)²),   C `clip_norm`, z `noise_multiplier`

The server never sees an upload without noise, so all that it computes is a function of the noised
uploads, whatever the method. The mean of m uploads has noise z C / √m, √m times that of a trusted
server. The server knows who takes part, so ε counts every round and has no amplification.

Deviations: variances of BatchNorm are kept at 0 or above. Uploads with integers or masks are
refused.
"""

import math
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, ClientResult, PyTree
from fedjax_pfl.core.errors import UsageError, require, require_above, require_at_least
from fedjax_pfl.core.examples import FederatedData, client_data
from fedjax_pfl.core.groups import as_grouped, group_algorithms, has_groups
from fedjax_pfl.transforms.privacy import clip_and_noise
from fedjax_pfl.transforms.wrapping import Transform, keep_layers

# Folded into the key; differs from compression's number and from those of training.
_NOISE = (1 << 30) + 1


def local_privacy(
    data: FederatedData,
    *,
    clip_norm: float,
    noise_multiplier: float = 0.0,
    private: Collection[str] = (),
) -> Transform:
    """Returns a transform with differential privacy of clients towards everyone else.

    Do not combine it with `max_update_norm`.

    Args:
      data: Examples; only their shapes matter.
      clip_norm: Largest L2 norm, over the whole tree, of the upload minus the download.
      noise_multiplier: Standard deviation of the noise, in multiples of `clip_norm`.
      private: Layers that `private_layers` keeps on the client. They get no noise.
    """
    require_above("clip_norm", clip_norm, 0)
    require_at_least("noise_multiplier", noise_multiplier, 0)
    has_finite_noise = not noise_multiplier or clip_norm < math.inf
    require(has_finite_noise, "noise needs a finite clip_norm; set it, such as to 1")

    def wrap(member: Algorithm) -> Callable[..., ClientResult]:
        def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
            result = member.train(payload, client, ctx)
            result = clip_and_noise.accepted(payload, client, result)
            change = clip_and_noise.float32_change(payload, result.upload)
            change, _ = clip_and_noise.clip(change, clip_norm)
            if noise_multiplier:
                key = jax.random.fold_in(ctx.key, _NOISE)
                change = clip_and_noise.add_noise(change, clip_norm * noise_multiplier, key)
            old = trees.matching_download(payload, result.upload)
            upload = clip_and_noise.add_change(old, change)
            return result._replace(upload=keep_layers(result.upload, upload, private))

        return train

    def transform(algorithm: Algorithm) -> Algorithm:
        if reason := unsupported_reason(algorithm, data):
            raise UsageError(f"local privacy is not possible here: {reason}")
        trains = tuple(map(wrap, group_algorithms(algorithm)))
        return algorithm._replace(train=trains if has_groups(algorithm) else trains[0])

    return transform


def unsupported_reason(algorithm: Algorithm, data: FederatedData) -> str:
    """Returns why uploads of a method cannot have noise, or "" if they can.

    Nothing is compiled. `data` are examples; only their shapes matter.
    """
    grouped, members = as_grouped(algorithm), group_algorithms(algorithm)

    def uploads(key: jax.Array, i: jax.Array, data: FederatedData) -> list[PyTree]:
        state = grouped.init(key)
        shared = state._replace(clients=())
        ctx = ClientContext(i=i, data=None, t=i, key=key)
        train_ctx = ctx._replace(data=client_data(data, i))
        return [
            member.train(member.send(shared, ctx), trees.row(rows, i), train_ctx).upload
            for member, rows in zip(members, state.clients, strict=True)
        ]

    key, i = jax.eval_shape(jax.random.key, 0), jax.ShapeDtypeStruct((), jnp.int32)
    leaves = jax.tree.leaves(jax.eval_shape(uploads, key, i, data))
    return clip_and_noise.not_covered_reason(leaves)
