"""Server optimiser around any method whose server averages the models of its clients.

Reddi et al., Adaptive Federated Optimization, 2021, Algorithm 2. Let w be the model that clients
download and Δ the method's new model minus w. The optimiser gets −Δ as the gradient:

  m ← β1 m + (1 − β1) Δ;   w ← w + η m / (√v + τ);   v starts at τ²
  adagrad:  v ← v + Δ²
  yogi:     v ← v − (1 − β2) Δ² sign(v − Δ²)
  adam:     v ← β2 v + (1 − β2) Δ²
  sgd:      m ← β m + Δ;   w ← w + η m        (FedAvgM, Hsu et al., 2019, if β > 0)

As in the paper, m and v have no bias correction and τ is outside the root; the optimisers of optax
correct the bias. If no client returns an update, nothing changes.

Deviations: the mean is the method's own, weighted by examples in FedAvg. BatchNorm statistics are
averaged, because they are no parameters. The paper only requires the first v to be at least τ².

Moments of bfloat16 parameters are float32: with 8 bits, v + (1 − β2) Δ² would often equal v.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Algorithm, Cohort, PyTree, State
from fedjax_pfl.core.examples import FederatedData
from fedjax_pfl.core.setting import Limits, Role, Setting, UsedWith
from fedjax_pfl.transforms.wrapping import (
    Selectable,
    Transform,
    TransformContext,
    check_single_model,
    with_method_state,
    with_server_state,
    without_records,
)


class Server(NamedTuple):
    """Server-side state of the method, and the state of the optimiser."""

    method: PyTree  # server-side state of the method, in records of inner transforms
    optimizer: PyTree  # state of the optimiser of the model's parameters


class Moments(NamedTuple):
    """Running moments of Δ, the method's new parameters minus the old ones, in their structure."""

    m: PyTree  # first moment: running mean of Δ
    v: PyTree  # second moment: running mean of Δ², or a variant of it


def adaptive(
    second_moment: Callable[[jax.Array, jax.Array], jax.Array], *, rate: Any, b1: Any, tau: Any
) -> optax.GradientTransformation:
    """Returns the server optimiser of Reddi et al. (2021), whose update is η m / (√v + τ).

    Its gradient is −Δ, where Δ is the method's new parameters minus the old ones.

    Args:
      second_moment: (v, Δ²) -> the new v, for each array. The first v is τ².
      rate: Learning rate η.
      b1: Decay rate β1 of the first moment.
      tau: Constant τ > 0.
    """

    def init(params: PyTree) -> Moments:
        v = jax.tree.map(lambda x: jnp.full_like(x, jnp.square(tau)), params)
        return Moments(jax.tree.map(jnp.zeros_like, params), v)

    def update(gradient: PyTree, state: Moments, params: PyTree = None) -> tuple[PyTree, Moments]:
        m = jax.tree.map(lambda m, g: b1 * m - (1 - b1) * g, state.m, gradient)
        v = jax.tree.map(lambda v, g: second_moment(v, jnp.square(g)), state.v, gradient)
        return jax.tree.map(lambda m, v: rate * m / (jnp.sqrt(v) + tau), m, v), Moments(m, v)

    return optax.GradientTransformation(init, update)


def server_optimizer(data: FederatedData, optimizer: optax.GradientTransformation) -> Transform:
    """Returns a transform that updates the server's parameters by an optimiser.

    The gradient is −Δ, where Δ is the method's new parameters minus the old ones.

    It suits methods whose clients download the server's model and upload a model of the same
    shapes, and whose server keeps nothing for each client; other methods raise UsageError.

    Args:
      data: Examples; only their shapes matter.
      optimizer: An optax optimiser that needs only gradients and parameters.
    """

    def transform(algorithm: Algorithm) -> Algorithm:
        check_single_model("server_optimizer", algorithm, data)

        def first(server: PyTree) -> Server:
            params = without_records(server)["params"]
            return Server(server, optimizer.init(trees.at_least_float32(params)))

        def receive(record: Server, state: State, cohort: Cohort) -> tuple[Server, PyTree]:
            # Inner transforms, such as adaptive clipping, may keep records around the model.
            inner, rows = algorithm.receive(state, cohort)
            mean, old = without_records(inner), without_records(state.server)["params"]
            wide_mean, wide_old = trees.at_least_float32((mean["params"], old))
            delta = jax.tree.map(jnp.subtract, wide_mean, wide_old)
            gradient = jax.tree.map(jnp.negative, delta)
            steps, optimizer_state = optimizer.update(gradient, record.optimizer, wide_old)
            wide_new = jax.tree.map(_apply_step, wide_old, steps, delta, wide_mean)
            new = jax.tree.map(lambda wide, old: wide.astype(old.dtype), wide_new, old)
            server = with_method_state(inner, {**mean, "params": new})
            return Server(server, optimizer_state), rows

        return with_server_state(algorithm, Server, first, receive)

    return transform


def _apply_step(old: jax.Array, step: jax.Array, delta: jax.Array, mean: jax.Array) -> jax.Array:
    """Returns old + step, or exactly the mean where step = Δ: old + Δ may differ in the last bit.

    Args:
      old: Parameters before the round, of the shape of all arguments.
      step: The optimiser's update.
      delta: Mean minus old parameters.
      mean: The method's new parameters.
    """
    return jnp.where(step == delta, mean, old + step)


def _sgd(value_of: Callable[[str], Any]) -> optax.GradientTransformation:
    """Returns SGD with the learning rate and momentum of the settings."""
    rate, momentum = value_of("server_learning_rate"), value_of("server_momentum")
    return optax.chain(optax.trace(momentum), optax.scale(-rate))


def _adaptive(
    second_moment: Callable[..., jax.Array], default_b1: float = 0.9
) -> Callable[..., optax.GradientTransformation]:
    """Returns a function value_of -> adaptive optimiser of the server.

    `value_of` returns the value of a setting, given its name, such as server_learning_rate.

    Args:
      second_moment: (v, Δ², β2) -> the new second moment v; β2 is the setting server_b2.
      default_b1: Decay rate of the first moment if server_b1 is unset.
    """

    def create(value_of: Callable[[str], Any]) -> optax.GradientTransformation:
        b1, b2 = value_of("server_b1"), value_of("server_b2")
        return adaptive(
            lambda v, square: second_moment(v, square, b2),
            rate=value_of("server_learning_rate"),
            b1=default_b1 if b1 is None else b1,
            tau=value_of("server_eps"),
        )

    return create


# Functions from the value of a setting by name to an optimiser, or None for the mean.
SERVER_OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation | None]] = {
    "mean": lambda value_of: None,
    "sgd": _sgd,
    "adam": _adaptive(lambda v, square, b2: b2 * v + (1 - b2) * square),
    "yogi": _adaptive(lambda v, square, b2: v - (1 - b2) * square * jnp.sign(v - square)),
    "adagrad": _adaptive(lambda v, square, b2: v + square, default_b1=0.0),
}
_ADAPTIVE = ("adam", "yogi", "adagrad")
_HYPERPARAMETER: frozenset[Role] = frozenset({"per_phase", "tunable"})
_setting = partial(Setting, roles=_HYPERPARAMETER)


def _make(value_of: Callable[[str], Any], context: TransformContext) -> Transform | None:
    """Returns the transform, or None if the setting server_optimizer is mean.

    `value_of` returns the value of a setting by its name.
    """
    create = context.registry["server_optimizer"][value_of("server_optimizer")]
    optimizer = create(value_of)
    return None if optimizer is None else server_optimizer(context.data, optimizer)


SERVER_OPTIMIZER = Selectable(
    "Uploads and the server",
    {
        "server_optimizer": _setting(
            "mean",
            "Update of the server model: mean takes the mean of the uploads; sgd, adam, yogi or "
            "adagrad treat the step from the mean to the model as a gradient.",
        ),
        "server_learning_rate": _setting(
            1.0,
            "Learning rate of the server optimiser.",
            limits=Limits(above=0),
            roles={*_HYPERPARAMETER, "sweepable"},
            used_with=UsedWith("server_optimizer", ("sgd", *_ADAPTIVE)),
        ),
        "server_momentum": _setting(
            0.0,
            "Momentum of the server's sgd.",
            limits=Limits(low=0, below=1),
            roles={*_HYPERPARAMETER, "sweepable"},
            used_with=UsedWith("server_optimizer", ("sgd",)),
        ),
        "server_b1": _setting(
            float,
            "Decay rate of the server's first moment; unset: 0.9, or 0 with adagrad.",
            limits=Limits(low=0, below=1),
            used_with=UsedWith("server_optimizer", _ADAPTIVE),
        ),
        "server_b2": _setting(
            0.99,
            "Decay rate of the server's second moment.",
            limits=Limits(low=0, below=1),
            used_with=UsedWith("server_optimizer", ("adam", "yogi")),
        ),
        "server_eps": _setting(
            1e-3,
            "Constant added to the root of the server's second moment.",
            limits=Limits(above=0),
            used_with=UsedWith("server_optimizer", _ADAPTIVE),
        ),
    },
    _make,
)
