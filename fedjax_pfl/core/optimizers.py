"""Optimisers and learning rate schedules of clients.

An optimiser is an optax transformation without a learning rate. Local training subtracts its
updates times the learning rate, which may be traced and may depend on the round.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl.core import trees
from fedjax_pfl.core.errors import UsageError, first_line

PyTree = Any
ValueOf = Callable[[str], Any]  # value of a setting, by name


def sgd(
    momentum: Any = 0.0, weight_decay: Any = 0.0, mask: Any = None
) -> optax.GradientTransformation:
    """Returns SGD, without learning rate, that adds weight decay to the gradient before momentum.

    Args:
      momentum: Momentum. 0 leaves it out of the program.
      weight_decay: Weight decay. 0 leaves it out of the program.
      mask: params -> tree of bools, True for those that decay. Default: all.
    """
    parts = [optax.identity()]
    if _is_used(weight_decay):
        parts.append(optax.add_decayed_weights(weight_decay, mask))
    if _is_used(momentum):
        parts.append(optax.trace(momentum))
    return optax.chain(*parts)


def _is_used(number: Any) -> bool:
    return isinstance(number, jax.core.Tracer) or number != 0


def matrices(params: PyTree) -> PyTree:
    """Returns a tree of bools: False for vectors, such as biases and normalisation, else True."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _decay_mask(value_of: ValueOf) -> Any:
    return None if value_of("decay_vectors") else matrices


def _value_or(value_of: ValueOf, name: str, default: float) -> Any:
    """Returns the value of setting `name`, or the default if it is None."""
    value = value_of(name)
    return default if value is None else value


def _sgd(value_of: ValueOf) -> optax.GradientTransformation:
    return sgd(value_of("momentum"), value_of("weight_decay"), _decay_mask(value_of))


def _adam(value_of: ValueOf) -> optax.GradientTransformation:
    """Returns Adam without learning rate from settings; b2 is 0.999 and eps 1e-8 if unset."""
    b2, eps = _value_or(value_of, "b2", 0.999), _value_or(value_of, "eps", 1e-8)
    return in_float32(with_dtype_promotion(optax.scale_by_adam(value_of("b1"), b2, eps)))


def _adamw(value_of: ValueOf) -> optax.GradientTransformation:
    """Returns Adam with decoupled weight decay, without learning rate, from settings."""
    decay = optax.add_decayed_weights(value_of("weight_decay"), _decay_mask(value_of))
    return optax.chain(_adam(value_of), decay)


def _adagrad(value_of: ValueOf) -> optax.GradientTransformation:
    return in_float32(optax.scale_by_rss(eps=_value_or(value_of, "eps", 1e-7)))


def _rmsprop(value_of: ValueOf) -> optax.GradientTransformation:
    """Returns RMSProp with momentum before the learning rate, as in PyTorch but not in optax.

    `value_of` maps the name of a setting to its value.
    """
    scaled = optax.scale_by_rms(_value_or(value_of, "b2", 0.9), _value_or(value_of, "eps", 1e-8))
    return optax.chain(in_float32(scaled), sgd(value_of("momentum")))


OPTIMIZERS: dict[str, Callable[[ValueOf], optax.GradientTransformation]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
}


def with_rate(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Converts an optax optimiser, whose updates are added, to one whose updates are subtracted."""
    return optax.chain(in_float32(with_dtype_promotion(optimizer)), optax.scale(-1.0))


def with_dtype_promotion(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the optimiser with dtype promotion allowed in its update.

    optax raises floats to integer powers, which JAX refuses under strict promotion.
    """

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(updates, state, params)

    return optax.GradientTransformation(optimizer.init, update)


def in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the optimiser with its state in float32 if parameters are bfloat16.

    With 8 bits, β2 = 0.999 is 1, and v + (1 − β2) g² often equals v. Updates have the dtype of the
    gradients.
    """

    def init(params: PyTree) -> PyTree:
        return optimizer.init(trees.at_least_float32(params))

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        wide_updates, wide_params = trees.at_least_float32((updates, params))
        new_updates, state = optimizer.update(wide_updates, state, wide_params)
        return trees.with_dtypes(new_updates, updates), state

    return optax.GradientTransformation(init, update)


def per_entry(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimiser of a dict of trees that treats each entry separately.

    Clipping, for example, is by the norm of each entry.
    """

    def init(params: PyTree) -> PyTree:
        return {name: optimizer.init(part) for name, part in params.items()}

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        results = {n: optimizer.update(updates[n], state[n], params[n]) for n in updates}
        return {n: r[0] for n, r in results.items()}, {n: r[1] for n, r in results.items()}

    return optax.GradientTransformation(init, update)


def kept_state(state: PyTree, like: PyTree) -> PyTree:
    """Returns the optimiser state that a client kept; UsageError if it is not built like `like`."""
    structures: list[Any] = [jax.tree.structure(tree) for tree in (state, like)]
    if structures[0] != structures[1]:
        raise UsageError(
            "keep_optimizer is set, and the method does not pass on the optimiser's state of the "
            "previous round; leave keep_optimizer out, or keep that state on the client"
        )
    return state


def check(name: str, optimizer: Any) -> None:
    """Raises UsageError if an optax optimiser needs more than gradients and parameters.

    `name` is the argument that it was passed as.
    """
    params = {"layer": {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}}
    try:
        state = jax.eval_shape(optimizer.init, params)
        updates, new_state = jax.eval_shape(
            with_dtype_promotion(optimizer).update, params, state, params
        )
    except Exception as error:  # a user's optimiser may raise anything
        raise UsageError(
            f"{name} cannot be used: it must need gradients and parameters only, no loss, value "
            f"function or other argument ({first_line(error)})"
        ) from error
    if any(map(_is_random_key, jax.tree.leaves(state))):
        raise UsageError(
            f"{name} cannot be used: its state has a random key, and its noise would be equal in "
            "every round and at every client; see the settings of privacy"
        )
    if not (trees.same_shapes(updates, params) and trees.same_shapes(new_state, state)):
        raise UsageError(
            f"{name} cannot be used: its updates must have the shapes of the parameters, and its "
            "state must keep its shapes"
        )


def _is_random_key(leaf: Any) -> bool:
    """Returns True for a key of `jax.random`, and for uint32 [2], its form without a type."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return is_key or (leaf.dtype == jnp.uint32 and leaf.shape == (2,))


# Schedules: the factor of the learning rate as a function of progress, from 0 to 1.


def _exponential_decay(end: float, warmup: float) -> optax.Schedule:
    """Returns progress -> end ** progress; raises UsageError if `end` is 0. Ignores `warmup`."""
    if end == 0:
        raise UsageError(
            "schedule_end is 0, which exponential_decay never reaches; choose a larger value, or "
            "linear"
        )
    return optax.exponential_decay(1.0, 1, end)


SCHEDULES: dict[str, Callable[[float, float], optax.Schedule]] = {  # (end, warmup) -> schedule
    "linear": lambda end, _: optax.linear_schedule(1.0, end, 1),
    "cosine_decay": lambda end, _: optax.cosine_decay_schedule(1.0, 1, end),
    "exponential_decay": _exponential_decay,
    "warmup_constant": lambda end, warmup: (
        # optax keeps the initial value forever if there is no step to leave it in
        optax.warmup_constant_schedule(end, 1.0, warmup) if warmup else optax.constant_schedule(1.0)
    ),
    "warmup_cosine_decay": lambda end, warmup: optax.warmup_cosine_decay_schedule(
        end, 1.0, warmup, 1, end
    ),
}


def schedule(name: str, end: float, warmup: float) -> Callable[[Any, Any], jax.Array]:
    """Returns a schedule as a function (step, number of steps) -> factor of the learning rate.

    The number of steps may be traced, as it differs between clients. Beyond the last step the
    factor stays at its final value.

    Args:
      name: Key of `SCHEDULES`.
      end: Final factor; also the first one, for schedules with a warm-up.
      warmup: Fraction of the steps during which the factor rises to 1.
    """
    factor_of_progress = SCHEDULES[name](end, warmup)

    def factor(step: Any, steps: Any) -> jax.Array:
        progress = jnp.asarray(step, jnp.float32) / jnp.maximum(jnp.asarray(steps, jnp.float32), 1)
        return jnp.asarray(factor_of_progress(jnp.clip(progress, 0, 1)), jnp.float32)

    return factor


def descend(params: Any, updates: Any, rate: Any) -> Any:
    """Computes params − rate · updates, leaf by leaf."""
    return optax.apply_updates(params, jax.tree.map(lambda u: -(rate * u), updates))
