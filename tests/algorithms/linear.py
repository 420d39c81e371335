"""Linear regression without a bias, where every gradient is known: f(w) = mean ½ (x·w − y)²."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.examples import ClientData, FederatedData, Split, client_data
from tests.tiny import HALF_SQUARES

TASK = HALF_SQUARES
KEY = jax.random.key(3)
T = jnp.int32(0)


class Linear(nn.Module):
    """x·w."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        return nn.Dense(1, use_bias=False, name="fc")(x)


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
    )
    return jax.tree.map(jnp.asarray, data), federation


def client(data: FederatedData, i: int) -> ClientData:
    """The data of client i."""
    return client_data(data, i)
