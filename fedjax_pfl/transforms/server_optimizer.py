"""An optimiser at the server, around any method whose server makes one model of clients' models.

Reddi et al., Adaptive Federated Optimization, 2021, Algorithm 2. With w what all download, Δ = the
model that the method would go on with, minus w, and −Δ in the place of a gradient:

  m ← β1 m + (1 − β1) Δ;   w ← w + η m / (√v + τ);   v is τ² at first
  adagrad:  v ← v + Δ²
  yogi:     v ← v − (1 − β2) Δ² sign(v − Δ²)
  adam:     v ← β2 v + (1 − β2) Δ²
  sgd:      m ← β m + Δ;   w ← w + η m        with β above 0 it is FedAvgM (Hsu et al., 2019)

There is no correction of the bias of m and v, and τ stands outside of the root, as in the paper;
optax's own optimisers have the correction. Where nobody arrived nothing moves.

Deviations: the mean is the method's own, weighted by examples in FedAvg. BatchNorm statistics are
no parameters: they are averaged. The paper asks of the first v only that it is at least τ².
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Cohort, PyTree, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, client_data
from fedjax_pfl.core.groups import has_groups
from fedjax_pfl.core.setting import Setting
from fedjax_pfl.transforms.wrapping import Around, Selectable, Transform


class Server(NamedTuple):
    """What the server keeps: what the method does, and the optimiser's state."""

    method: PyTree
    optimizer: PyTree


class Moments(NamedTuple):
    """Of the changes Δ."""

    m: PyTree
    v: PyTree


def adaptive(
    second: Callable[[jax.Array, jax.Array], jax.Array], *, rate: Any, b1: Any, tau: Any
) -> optax.GradientTransformation:
    """Algorithm 2 of the paper, for −Δ as the gradient.

    Args:
      second: (v, Δ²) -> the new v.
    """

    def init(params: PyTree) -> Moments:
        first = jax.tree.map(lambda x: jnp.full_like(x, jnp.square(tau)), params)
        return Moments(jax.tree.map(jnp.zeros_like, params), first)

    def update(gradient: PyTree, state: Moments, params: PyTree = None) -> tuple[PyTree, Moments]:
        m = jax.tree.map(lambda m, g: b1 * m - (1 - b1) * g, state.m, gradient)
        v = jax.tree.map(lambda v, g: second(v, jnp.square(g)), state.v, gradient)
        return jax.tree.map(lambda m, v: rate * m / (jnp.sqrt(v) + tau), m, v), Moments(m, v)

    return optax.GradientTransformation(init, update)


def server_optimizer(data: FederatedData, optimizer: optax.GradientTransformation) -> Transform:
    """The server moves by `optimizer`, to which −Δ is the gradient.

    Its state lies with the server. It is for a method whose clients download the server's model and
    upload one of the same form, which is looked at by shapes: whatever the server then makes of the
    uploads is the model that it would go on with.

    Args:
      data: only its shapes matter.
    """

    def transform(algorithm: Algorithm) -> Algorithm:
        _check(algorithm, data)

        def init(key: jax.Array, start: State | None = None) -> State:
            state = algorithm.init(key, start and _inner(start))
            return state._replace(
                server=Server(state.server, optimizer.init(state.server["params"]))
            )

        def send(state: State, ctx: ClientContext) -> PyTree:
            return algorithm.send(_inner(state), ctx)

        def receive(state: State, cohort: Cohort) -> tuple[Server, PyTree]:
            mean, rows = algorithm.receive(_inner(state), cohort)
            old = state.server.method["params"]
            delta = jax.tree.map(jnp.subtract, mean["params"], old)
            gradient = jax.tree.map(jnp.negative, delta)
            steps, kept = optimizer.update(gradient, state.server.optimizer, old)
            new = jax.tree.map(_moved, old, steps, delta, mean["params"])
            return Server({**mean, "params": new}, kept), rows

        def personalize(state: State, client: PyTree, ctx: ClientContext) -> PyTree:
            return algorithm.personalize(_inner(state), client, ctx)

        def observe(state: State) -> dict[str, jax.Array]:
            return algorithm.observe(_inner(state))

        return algorithm._replace(
            init=init, send=send, receive=receive, personalize=personalize, observe=observe
        )

    return transform


def _inner(state: State) -> State:
    """As the method has it."""
    server = state.server
    return state._replace(server=server.method if isinstance(server, Server) else server)


def _moved(old: jax.Array, step: jax.Array, delta: jax.Array, mean: jax.Array) -> jax.Array:
    """old + step; where the step is Δ, the mean itself: old + Δ may differ in its last bit."""
    return jnp.where(step == delta, mean, old + step)


def _check(algorithm: Algorithm, data: FederatedData) -> None:
    """UsageError where the server's model is not of the form of what clients upload."""
    if has_groups(algorithm):
        raise UsageError("server_optimizer is for one architecture; use it without groups")
    key, i = jax.eval_shape(jax.random.key, 0), jax.ShapeDtypeStruct((), jnp.int32)

    def visited(key: jax.Array, i: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        state = algorithm.init(key)
        payload = algorithm.send(state._replace(clients=()), ClientContext(i, None, i, key))
        here = ClientContext(i, client_data(data, i), i, key)
        trained = algorithm.train(payload, trees.row(state.clients, i), here)
        return state.server, payload, trained.upload

    server, payload, upload = jax.eval_shape(visited, key, i)
    is_model = isinstance(server, Mapping) and "params" in server
    if not (is_model and trees.same_shapes(server, payload) and trees.same_shapes(server, upload)):
        raise UsageError(
            "server_optimizer is for methods whose server makes one model of the models that "
            "clients upload, as fedavg's mean is; the method chosen is none of them; leave it off"
        )


def _sgd(value_of: Callable[[str], Any]) -> optax.GradientTransformation | None:
    rate, momentum = value_of("server_learning_rate"), value_of("server_momentum")
    return optax.chain(optax.trace(momentum), optax.scale(-rate))


def _adaptive(
    value_of: Callable[[str], Any], second: Callable[..., jax.Array], b1: float
) -> optax.GradientTransformation:
    own = value_of("server_b1")
    return adaptive(
        second,
        rate=value_of("server_learning_rate"),
        b1=b1 if own is None else own,
        tau=value_of("server_eps"),
    )


def _adagrad(value_of: Callable[[str], Any]) -> optax.GradientTransformation | None:
    return _adaptive(value_of, jnp.add, 0.0)


def _yogi(value_of: Callable[[str], Any]) -> optax.GradientTransformation | None:
    b2 = value_of("server_b2")

    def second(v: jax.Array, squared: jax.Array) -> jax.Array:
        return v - (1 - b2) * squared * jnp.sign(v - squared)

    return _adaptive(value_of, second, 0.9)


def _adam(value_of: Callable[[str], Any]) -> optax.GradientTransformation | None:
    b2 = value_of("server_b2")

    def second(v: jax.Array, squared: jax.Array) -> jax.Array:
        return b2 * v + (1 - b2) * squared

    return _adaptive(value_of, second, 0.9)


def _mean(value_of: Callable[[str], Any]) -> optax.GradientTransformation | None:
    return None


SERVER_OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation | None]] = {
    "mean": _mean,
    "sgd": _sgd,
    "adam": _adam,
    "yogi": _yogi,
    "adagrad": _adagrad,
}
_ADAPTIVE = ("adam", "yogi", "adagrad")


def _asked_for(value_of: Callable[[str], Any], around: Around) -> Transform | None:
    made = around.words["server_optimizer"][value_of("server_optimizer")](value_of)
    return None if made is None else server_optimizer(around.data, made)


SERVER_OPTIMIZER = Selectable(
    "Uploads and the server",
    {
        "server_optimizer": Setting(
            "mean",
            "Update of the server model: mean takes the mean of the uploads; sgd, adam, yogi or "
            "adagrad treat the step from the mean to the model as a gradient.",
            per_phase=True,
            tunable=True,
        ),
        "server_learning_rate": Setting(
            1.0,
            "Learning rate of the server optimiser.",
            above=0,
            per_phase=True,
            sweepable=True,
            tunable=True,
            used_with=("server_optimizer", ("sgd", *_ADAPTIVE)),
        ),
        "server_momentum": Setting(
            0.0,
            "Momentum of the server's sgd.",
            low=0,
            below=1,
            per_phase=True,
            sweepable=True,
            tunable=True,
            used_with=("server_optimizer", ("sgd",)),
        ),
        "server_b1": Setting(
            float,
            "Decay rate of the server's first moment; unset: 0.9, or 0 with adagrad.",
            low=0,
            below=1,
            per_phase=True,
            tunable=True,
            used_with=("server_optimizer", _ADAPTIVE),
        ),
        "server_b2": Setting(
            0.99,
            "Decay rate of the server's second moment.",
            low=0,
            below=1,
            per_phase=True,
            tunable=True,
            used_with=("server_optimizer", ("adam", "yogi")),
        ),
        "server_eps": Setting(
            1e-3,
            "Constant added to the root of the server's second moment.",
            above=0,
            per_phase=True,
            tunable=True,
            used_with=("server_optimizer", _ADAPTIVE),
        ),
    },
    _asked_for,
)
