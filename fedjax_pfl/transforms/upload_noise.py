"""Uploads that are clipped and noised at each client, around any method.

McMahan et al., Learning Differentially Private Recurrent Language Models, 2018. With p what came
down under an upload's path, or 0 where nothing did, and Δ = upload − p over all floating-point
numbers:

  Δ ← Δ · min(1, S / ‖Δ‖₂);   upload ← p + Δ + N(0, (z S)²)

with S `upload_clip_norm` and z `upload_noise`.
Each client draws its own noise, by (seed, stage, round, client), so that the server sees none of
the uploads bare. The mean of m of them has noise of z S / √m: √m times that of the paper's server,
which adds it once to the sum.

Deviations: in methods that weigh by examples, as FedAvg does, one client can move the mean by more
than S / m. Variances of BatchNorm stay at 0 or above. Masks and counters travel as they are, and so
do losses in a log. No ε is claimed: nothing accounts for sampling, rounds or these weights.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, ClientResult, PyTree
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.groups import group_algorithms, has_groups
from fedjax_pfl.core.setting import Setting
from fedjax_pfl.transforms.wrapping import Around, Selectable, Transform

_NOISE = (1 << 30) + 1  # apart from compression's number, and from what training splits its key by


def upload_noise(clip_norm: float, multiplier: float) -> Transform:
    """Each upload changes at most by `clip_norm`, and then by noise.

    Args:
      multiplier: deviation of the noise, in lengths of `clip_norm`.
    """

    def noised(payload: PyTree, upload: PyTree, key: jax.Array) -> PyTree:
        norm = jnp.sqrt(trees.squared_norm(trees.change(payload, upload)))
        share = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
        leaves, shape = jax.tree_util.tree_flatten_with_path(upload)
        before, new = jax.tree.leaves(trees.matching_download(payload, upload)), []
        for i, ((path, leaf), old) in enumerate(zip(leaves, before, strict=True)):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                draw = jax.random.normal(jax.random.fold_in(key, i), leaf.shape, leaf.dtype)
                clipped = old + share.astype(leaf.dtype) * (leaf - old)
                leaf = clipped + clip_norm * multiplier * draw
                leaf = jnp.maximum(leaf, 0.0) if _is_variance(path) else leaf
            new.append(leaf)
        return jax.tree.unflatten(shape, new)

    def wrap(member: Algorithm) -> Callable[..., ClientResult]:
        def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
            trained = member.train(payload, client, ctx)
            key = jax.random.fold_in(ctx.key, _NOISE)
            return trained._replace(upload=noised(payload, trained.upload, key))

        return train

    def transform(algorithm: Algorithm) -> Algorithm:
        each = tuple(map(wrap, group_algorithms(algorithm)))
        return algorithm._replace(train=each if has_groups(algorithm) else each[0])

    return transform


def _is_variance(path: tuple[Any, ...]) -> bool:
    """Of BatchNorm's statistics, below 0 there is no root."""
    words = [getattr(entry, "key", None) for entry in path]
    return "batch_stats" in words and words[-1] == "var"


def _asked_for(value_of: Callable[[str], Any], around: Around) -> Transform | None:
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
            above=0,
        ),
        "upload_noise": Setting(
            0.0,
            "Standard deviation of the Gaussian noise that each client adds to its upload, as"
            " a multiple of upload_clip_norm.",
            low=0,
        ),
    },
    _asked_for,
)
