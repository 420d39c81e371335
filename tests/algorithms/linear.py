"""Linear regression without a bias, where every gradient is known: f(w) = mean ½ (x·w − y)²."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core.algorithm import Algorithm, ClientContext, ClientResult, Federation, State
from fedjax_pfl.core.examples import ClientData, FederatedData, Split, client_data
from tests.tiny import HALF_SQUARES
from tests.tiny import cohort as tiny_cohort

TASK = HALF_SQUARES
KEY = jax.random.key(3)
T = jnp.int32(0)


class Linear(nn.Module):
    """x·w."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        return nn.Dense(1, use_bias=False, name="fc")(x)


class Deep(nn.Module):
    """(x A) B: a body and a head, without biases."""

    outputs: int = 1
    width: int = 1
    head = "head"
    layers = ("body", "head")

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        z = nn.Dense(self.width, use_bias=False, name="body")(x)
        return nn.Dense(self.outputs, use_bias=False, name="head")(z)


def deep(a: Any, b: Any) -> dict[str, Any]:
    """`Deep` with kernels A and B."""
    kernels = {"body": jnp.asarray(a, jnp.float32), "head": jnp.asarray(b, jnp.float32)}
    return {"params": {name: {"kernel": kernel} for name, kernel in kernels.items()}}


def kernels(variables: Any) -> tuple[np.ndarray, ...]:
    """Those of `Deep`, or those of its layers that there are."""
    return tuple(np.asarray(one["kernel"]) for _, one in sorted(variables["params"].items()))


def work(
    made: Algorithm, payload: Any, client: Any, data: FederatedData, i: int = 0
) -> ClientResult:
    """Client i's local work."""
    own = client_data(data, jnp.int32(i))
    return jax.jit(made.train)(payload, client, ClientContext(jnp.int32(i), own, T, KEY))


def met(made: Algorithm, state: State, counts: Any, uploads: list[Any], arrived: Any) -> State:
    """The state after these uploads of clients 0, 1, ..., some of which did not arrive."""
    n, here = len(counts), jnp.asarray(arrived)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *uploads)
    cohort = tiny_cohort(counts, jnp.where(here, jnp.arange(n), n), here, (), stacked, T)
    server, rows = made.receive(state._replace(clients=()), cohort)
    return state._replace(server=server, rows=rows)


def play(made: Algorithm, state: State, data: FederatedData, counts: Any, n: int) -> State:
    """n rounds in which all take part."""
    ids = jnp.arange(len(counts))

    def ctx(state: State, client: Any, i: jax.Array) -> Any:
        payload = made.send(state, ClientContext(i, None, T, KEY))
        return payload, made.train(payload, client, ClientContext(i, client_data(data, i), T, KEY))

    @jax.jit
    def one(state: State) -> State:
        seen = state._replace(clients=())
        payloads, done = jax.vmap(ctx, (None, 0, 0))(seen, state.clients, ids)
        here = jnp.ones(len(counts), bool)
        cohort = tiny_cohort(counts, ids, here, payloads, done.upload, T)
        return State(*made.receive(seen, cohort), done.client)

    for _ in range(n):
        state = one(state)
    return state


def variables(w: Any) -> dict[str, Any]:
    """The network with weights w."""
    return {"params": {"fc": {"kernel": jnp.asarray(w, jnp.float32).reshape(-1, 1)}}}


def weights(variables: Any) -> np.ndarray:
    """The weights of a network."""
    return np.asarray(variables["params"]["fc"]["kernel"])[..., 0]


def _split(lists: list[Any], first: int) -> Split:
    sizes = np.array([len(one) for one in lists], np.int32)
    starts = first + np.cumsum(sizes) - sizes
    places = np.arange(max(1, sizes.max()), dtype=np.int32)
    rows = np.where(places < sizes[:, None], starts[:, None] + places, 0)
    return Split(rows.astype(np.int32), sizes)


def federated(
    xs: list[Any], ys: list[Any], validation: tuple[list[Any], list[Any]] | None = None
) -> tuple[FederatedData, Federation]:
    """Each client's examples for training and, if given, for validation."""
    none = [np.zeros((0, len(xs[0][0]))) for _ in xs], [np.zeros(0) for _ in xs]
    x_more, y_more = none if validation is None else validation
    x = np.concatenate([*map(np.asarray, xs), *map(np.asarray, x_more)]).astype(np.float32)
    y = np.concatenate([*map(np.asarray, ys), *map(np.asarray, y_more)]).astype(np.float32)
    train = _split(xs, 0)
    more = _split(x_more, int(train.size.sum()))
    data = FederatedData(x, y[:, None], train, more, more)
    clients = len(xs)
    federation = Federation(
        counts=np.asarray(train.size),
        input_shape=(x.shape[1],),
        outputs=1,
        active=np.ones(clients, bool),
        groups=np.zeros(clients, np.int32),
        validation_counts=np.asarray(more.size),
        task=TASK,
    )
    return jax.tree.map(jnp.asarray, data), federation


def client(data: FederatedData, i: int) -> ClientData:
    """The data of client i."""
    return client_data(data, i)
