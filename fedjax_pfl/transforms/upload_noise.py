"""Uploads that each client clips and perturbs with Gaussian noise, around any method.

McMahan et al., Learning Differentially Private Recurrent Language Models, 2018. Let p be the
downloaded value at an upload's path, or 0 if nothing was downloaded there, and Δ = upload − p over
all floating-point numbers:

  Δ ← Δ · min(1, S / ‖Δ‖₂);   upload ← p + Δ + N(0, (z S)²)

with S `upload_clip_norm` and z `upload_noise`. Each client samples its noise by (seed, stage,
round, client), so the server never sees an upload without noise. The mean of m uploads has noise
z S / √m. That is √m times the noise of the paper, whose server adds it once to the sum.

Deviations: in methods that weight clients by examples, such as FedAvg, one client can move the mean
by more than S / m. BatchNorm variances are kept at 0 or above. Masks, counters and the logged loss
are sent without noise. The library claims no ε: nothing accounts for sampling, rounds or weights.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, ClientResult, PyTree
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.groups import group_algorithms, has_groups
from fedjax_pfl.core.setting import Limits, Setting
from fedjax_pfl.transforms.wrapping import (
    Selectable,
    Transform,
    TransformContext,
    is_variance,
)

# Folded into the key; differs from compression's number and from those of training.
_NOISE = (1 << 30) + 1


def upload_noise(clip_norm: float, multiplier: float) -> Transform:
    """Returns a transform with which each client clips its upload and adds Gaussian noise.

    Args:
      clip_norm: Largest L2 norm, over the whole tree, of the upload minus the download.
      multiplier: Standard deviation of the noise, in multiples of `clip_norm`.
    """

    def perturb(payload: PyTree, upload: PyTree, key: jax.Array) -> PyTree:
        norm = jnp.sqrt(trees.squared_norm(trees.change(payload, upload)))
        factor = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
        leaves, structure = jax.tree_util.tree_flatten_with_path(upload)
        old_leaves, new = jax.tree.leaves(trees.matching_download(payload, upload)), []
        for i, ((path, leaf), old) in enumerate(zip(leaves, old_leaves, strict=True)):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                noise = jax.random.normal(jax.random.fold_in(key, i), leaf.shape, leaf.dtype)
                clipped = old + factor.astype(leaf.dtype) * (leaf - old)
                leaf = clipped + clip_norm * multiplier * noise
                leaf = jnp.maximum(leaf, 0.0) if is_variance(path) else leaf
            new.append(leaf)
        return jax.tree.unflatten(structure, new)

    def wrap(member: Algorithm) -> Callable[..., ClientResult]:
        def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
            result = member.train(payload, client, ctx)
            key = jax.random.fold_in(ctx.key, _NOISE)
            return result._replace(upload=perturb(payload, result.upload, key))

        return train

    def transform(algorithm: Algorithm) -> Algorithm:
        trains = tuple(map(wrap, group_algorithms(algorithm)))
        return algorithm._replace(train=trains if has_groups(algorithm) else trains[0])

    return transform


def _make(value_of: Callable[[str], Any], context: TransformContext) -> Transform | None:
    """Returns the transform, or None if upload_clip_norm is unset and there is no noise.

    `value_of` returns the value of a setting by its name. Raises UsageError for noise without a
    clip norm.
    """
    clip_norm, multiplier = value_of("upload_clip_norm"), value_of("upload_noise")
    if clip_norm is None and multiplier:
        raise UsageError(
            f"upload_noise is {multiplier} times upload_clip_norm, which is unset; set it, such as "
            "to 1"
        )
    return None if clip_norm is None else upload_noise(clip_norm, multiplier)


NOISE = Selectable(
    "Uploads and the server",
    {
        "upload_clip_norm": Setting(
            float,
            "Largest norm of an upload's change. The client scales larger changes down. "
            "Unset: unlimited.",
            limits=Limits(above=0),
        ),
        "upload_noise": Setting(
            0.0,
            "Standard deviation of the Gaussian noise that each client adds to its upload, as"
            " a multiple of upload_clip_norm.",
            limits=Limits(low=0),
        ),
    },
    _make,
)
