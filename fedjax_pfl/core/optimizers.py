"""What makes steps of a client's gradients: by name or as a caller has it, and how rates change.

An optimiser here is an optax transformation without the learning rate, whose updates are taken off:
local training multiplies them by the rate, which may be traced and changes with the round.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl.core import trees
from fedjax_pfl.core.errors import UsageError

PyTree = Any
ValueOf = Callable[[str], Any]  # of a setting, by its name


def sgd(
    momentum: Any = 0.0, weight_decay: Any = 0.0, mask: Any = None
) -> optax.GradientTransformation:
    """Decay that is added to the gradient, then momentum; 0 leaves either out of the program.

    Args:
      mask: of parameters, what decays; None: all.
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
    """Of parameters, true for what is no vector: biases, and scale and shift of a normalisation."""
    return jax.tree.map(_is_matrix, params)


def _is_matrix(leaf: Any) -> bool:
    return leaf.ndim > 1


def _mask(value_of: ValueOf) -> Any:
    return None if value_of("decay_vectors") else matrices


def _own(value_of: ValueOf, name: str, usual: float) -> Any:
    value = value_of(name)
    return usual if value is None else value


def _sgd(value_of: ValueOf) -> optax.GradientTransformation:
    return sgd(value_of("momentum"), value_of("weight_decay"), _mask(value_of))


def _adam(value_of: ValueOf) -> optax.GradientTransformation:
    b2, eps = _own(value_of, "b2", 0.999), _own(value_of, "eps", 1e-8)
    return with_dtype_promotion(optax.scale_by_adam(value_of("b1"), b2, eps))


def _adamw(value_of: ValueOf) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(value_of("weight_decay"), _mask(value_of))
    return optax.chain(_adam(value_of), decay)


def _adagrad(value_of: ValueOf) -> optax.GradientTransformation:
    return optax.scale_by_rss(eps=_own(value_of, "eps", 1e-7))


def _rmsprop(value_of: ValueOf) -> optax.GradientTransformation:
    """With momentum before the rate, as PyTorch has it; optax has it behind."""
    scaled = optax.scale_by_rms(_own(value_of, "b2", 0.9), _own(value_of, "eps", 1e-8))
    return optax.chain(scaled, sgd(value_of("momentum")))


OPTIMIZERS: dict[str, Callable[[ValueOf], optax.GradientTransformation]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
}


def with_rate(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """A whole optax optimiser, whose updates are added, as one here, for a rate of 1."""
    return optax.chain(with_dtype_promotion(optimizer), optax.scale(-1.0))


def with_dtype_promotion(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same where JAX is told not to promote dtypes: optax raises floats to integer powers."""

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(updates, state, params)

    return optax.GradientTransformation(optimizer.init, update)


def per_entry(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same for each entry of a dict of trees by itself: clipping measures each alone."""

    def init(params: PyTree) -> PyTree:
        return {name: optimizer.init(part) for name, part in params.items()}

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        done = {n: optimizer.update(updates[n], state[n], params[n]) for n in updates}
        return {n: new for n, (new, _) in done.items()}, {n: kept for n, (_, kept) in done.items()}

    return optax.GradientTransformation(init, update)


def check(name: str, optimizer: Any, params: PyTree) -> None:
    """UsageError where an optimiser needs more than gradients and parameters.

    Args:
      name: of the argument that brought it.
      params: those of the network, of which only the shapes matter.
    """
    try:
        state = jax.eval_shape(optimizer.init, params)
        updates, after = jax.eval_shape(
            with_dtype_promotion(optimizer).update, params, state, params
        )
    except Exception as error:  # whatever it raises
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"{name} cannot be used: it must need gradients and parameters only, no loss, value "
            f"function or other argument ({line})"
        ) from error
    if not (trees.same_shapes(updates, params) and trees.same_shapes(after, state)):
        raise UsageError(
            f"{name} cannot be used: its updates must have the form of the parameters, and its "
            "state must keep its own"
        )


# How a rate changes: factors of it, by how much has passed, 0 to 1


def _linear(end: float, warmup: float) -> optax.Schedule:
    return optax.linear_schedule(1.0, end, 1)


def _cosine_decay(end: float, warmup: float) -> optax.Schedule:
    return optax.cosine_decay_schedule(1.0, 1, end)


def _exponential_decay(end: float, warmup: float) -> optax.Schedule:
    if end == 0:
        raise UsageError(
            "schedule_end is 0, where exponential_decay never comes; choose a larger one, or linear"
        )
    return optax.exponential_decay(1.0, 1, end)


def _warmup_constant(end: float, warmup: float) -> optax.Schedule:
    return optax.warmup_constant_schedule(end, 1.0, warmup)


def _warmup_cosine_decay(end: float, warmup: float) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(end, 1.0, warmup, 1, end)


SCHEDULES: dict[str, Callable[[float, float], optax.Schedule]] = {
    "linear": _linear,
    "cosine_decay": _cosine_decay,
    "exponential_decay": _exponential_decay,
    "warmup_constant": _warmup_constant,
    "warmup_cosine_decay": _warmup_cosine_decay,
}


def schedule(name: str, end: float, warmup: float) -> Callable[[Any, Any], jax.Array]:
    """(so many, of so many) -> the factor of the rate; beyond the end it is that of the end.

    The schedules are optax's, over the length 1: how many steps a client has is not known before.

    Args:
      end: the factor at the end and, where there is a warm-up, at the beginning.
      warmup: share of the length in which the factor rises to 1.
    """
    factor = SCHEDULES[name](end, warmup)

    def factor_at(now: Any, length: Any) -> jax.Array:
        passed = jnp.asarray(now, jnp.float32) / jnp.maximum(jnp.asarray(length, jnp.float32), 1)
        return jnp.asarray(factor(jnp.clip(passed, 0, 1)), jnp.float32)

    return factor_at
