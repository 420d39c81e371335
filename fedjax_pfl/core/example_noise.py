"""Per-example clipping and noise of training gradients: DP-SGD.

Abadi et al., Deep Learning with Differential Privacy, 2016. For a batch B of examples j:

  g ← 1/|B| (Σ_j g_j min(1, C / ‖g_j‖₂) + N(0, (z C)²)),   C `clip_norm`, z `noise_multiplier`

g_j is the gradient of a batch with example j alone. Terms that a method adds to the gradient, such
as FedProx's, are clipped with it.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import Batch, ClientData, take

PyTree = Any


class ExampleNoise(NamedTuple):
    """Clipping and noise of the gradients of single examples."""

    clip_norm: float  # largest L2 norm of an example's gradient, over all parameters
    noise_multiplier: float  # standard deviation of the noise on their sum, in clipping norms


class Fit(NamedTuple):
    """A call of `local_training.fit` while `record_fits` is active."""

    training: Any  # local_training.Training
    data: ClientData
    size: int  # number of parameters
    max_steps: Any  # that of its `ClientContext`


_fits: contextvars.ContextVar[list[Fit] | None] = contextvars.ContextVar("fits", default=None)


@contextlib.contextmanager
def record_fits() -> Iterator[list[Fit]]:
    """Yields a list of the calls of `fit` that are traced inside the context.

    There, `fit` with example noise reads no examples: its result shows what else depends on them.
    It returns the parameters minus the gradient of a batch of zeros, by `without_examples`.
    """
    fits: list[Fit] = []
    token = _fits.set(fits)
    try:
        yield fits
    finally:
        _fits.reset(token)


def record_fit(training: Any, params: PyTree, ctx: ClientContext) -> bool:
    """Records a call of `fit`. Returns False, without a record, outside of `record_fits`."""
    fits = _fits.get()
    if fits is None:
        return False
    fits.append(
        Fit(training=training, data=ctx.data, size=trees.size(params), max_steps=ctx.max_steps)
    )
    return True


@jax.jit
def without_examples(params: PyTree, grads: PyTree) -> PyTree:
    """Returns params − grads. Its name marks the calls of `fit` in a traced program."""
    return jax.tree.map(jnp.subtract, params, grads)


def fit_without_examples(
    training: Any,
    gradient: Callable[..., Any],
    params: PyTree,
    non_params: PyTree,
    ctx: ClientContext,
) -> tuple[PyTree, PyTree, PyTree, dict[str, jax.Array]]:
    """Returns a result of `local_training.fit` that reads no examples; see `record_fits`."""
    check_no_collections(non_params)
    rows, mask = (jax.ShapeDtypeStruct((2,), dtype) for dtype in (jnp.int32, jnp.bool_))
    shapes = jax.eval_shape(partial(take, ctx.data), rows, mask)
    batch = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), shapes)
    _, grads = gradient(params, non_params, batch, jax.random.key(0))
    params = without_examples(params, grads)
    moments = training.optimizer.init(params) if training.keep_optimizer else ()
    loss = jnp.sum(ctx.data.x.astype(jnp.float32)) + jnp.sum(ctx.data.y.astype(jnp.float32))
    return params, non_params, moments, {"loss": loss}


def noised_gradient(gradient: Callable[..., Any], noise: ExampleNoise) -> Callable[..., Any]:
    """Returns a gradient function with the gradient of each example clipped, and noise on the sum.

    Both are (params, non_params, batch, key) -> ((loss, non_params), gradient). Padding counts as
    no example.
    """

    def noised(params: PyTree, non_params: PyTree, batch: Batch, key: jax.Array) -> Any:
        check_no_collections(non_params)
        noise_key, example_key = jax.random.split(key)

        def clipped(i: jax.Array, x: jax.Array, y: jax.Array, is_example: jax.Array) -> Any:
            example = Batch(x[None], y[None], is_example[None])
            (loss, _), grads = gradient(
                params, non_params, example, jax.random.fold_in(example_key, i)
            )
            norm = jnp.sqrt(trees.squared_norm(grads))
            factor = jnp.minimum(1.0, noise.clip_norm / jnp.maximum(norm, 1e-12))
            # An example whose gradient is not finite counts as none, as padding does.
            is_counted = is_example & jnp.isfinite(norm)
            # In float32: bfloat16 would round to more than the norm allows.
            scaled = jax.tree.map(lambda g: factor * g.astype(jnp.float32), grads)
            zeros = jax.tree.map(jnp.zeros_like, scaled)
            return jnp.where(is_example, loss, 0.0), trees.where(is_counted, scaled, zeros)

        positions = jnp.arange(batch.mask.shape[0])
        losses, grads = jax.vmap(clipped)(positions, batch.x, batch.y, batch.mask)
        count = jnp.maximum(jnp.sum(batch.mask).astype(jnp.float32), 1.0)
        total = jax.tree.map(lambda g: jnp.sum(g, 0), grads)
        leaves, structure = jax.tree.flatten(total)
        keys = jax.random.split(noise_key, len(leaves))
        deviation = noise.noise_multiplier * noise.clip_norm

        def noised_mean(leaf: jax.Array, param: jax.Array, key: jax.Array) -> jax.Array:
            noise = deviation * jax.random.normal(key, leaf.shape)
            return ((leaf + noise) / count).astype(param.dtype)

        leaves = list(map(noised_mean, leaves, jax.tree.leaves(params), keys))
        return (jnp.sum(losses) / count, non_params), jax.tree.unflatten(structure, leaves)

    return noised


def check_no_collections(non_params: PyTree) -> None:
    """Raises UsageError if training updates something besides parameters by whole batches."""
    if jax.tree.leaves(non_params):
        raise UsageError(
            "example-level privacy is not possible here: batch statistics mix the examples of a "
            "batch; use a network without BatchNorm, and a method that collects nothing over steps"
        )
