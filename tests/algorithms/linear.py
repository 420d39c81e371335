"""Linear regression without a bias, with known gradients: f(w) = mean ½ (x·w − y)²."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, ClientResult, Federation, State
from fedjax_pfl.core.examples import FederatedData, Split, client_data
from fedjax_pfl.core.task import classification
from tests.tiny import HALF_SQUARES
from tests.tiny import cohort as tiny_cohort

TASK = HALF_SQUARES
KEY = jax.random.key(3)
T = jnp.int32(0)

# A client with three examples of class 0, none of class 1 and one of class 2; parameters of `Deep`.
X = np.array([[1.0, 0.5], [0.2, -1.0], [0.3, 2.0], [-1.0, 0.4]])
Y = np.array([0, 0, 2, 0])
A = np.array([[0.5, -0.3], [0.2, 0.7]])
HEAD = np.array([[0.1, 0.3, -0.2], [0.4, -0.5, 0.6]])
CLASSES = classification(3)


class Linear(nn.Module):
    """The network x·w."""

    outputs: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        return nn.Dense(self.outputs, use_bias=False, name="fc")(x)


class Deep(nn.Module):
    """The network (x A) B: a body and a head, without biases."""

    outputs: int = 1
    width: int = 1
    unit: bool = False  # whether features have length 1, which has no gradient at x = 0
    head = "head"
    layers = ("body", "head")

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        z = nn.Dense(self.width, use_bias=False, name="body")(x)
        z = z / jnp.linalg.norm(z, axis=-1, keepdims=True) if self.unit else z
        return nn.Dense(self.outputs, use_bias=False, name="head")(z)


class TwoLayers(nn.Module):
    """Two linear layers with biases; the second is the head."""

    head = "fc2"
    layers = ("fc1", "fc2")

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        return nn.Dense(1, name="fc2")(nn.Dense(2, name="fc1")(x))


def two_layer_gradient(model: Any, x: np.ndarray, y: np.ndarray) -> Any:
    """Returns the gradient of mean ½ (f(x) − y)² for `TwoLayers`, in NumPy."""
    hidden = x @ model["fc1"]["kernel"] + model["fc1"]["bias"]
    error = (hidden @ model["fc2"]["kernel"] + model["fc2"]["bias"] - y) / len(x)
    back = error @ model["fc2"]["kernel"].T
    return {
        "fc1": {"kernel": x.T @ back, "bias": back.sum(0)},
        "fc2": {"kernel": hidden.T @ error, "bias": error.sum(0)},
    }


def central_differences(f: Any, tree: Any, step: float = 1e-6) -> Any:
    """Returns the slopes of f() in every number of a tree of float64 arrays that f reads."""

    def differences(array: np.ndarray) -> np.ndarray:
        slopes = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            value = array[index]
            array[index] = value + step
            above = f()
            array[index] = value - step
            slopes[index] = (above - f()) / (2 * step)
            array[index] = value
        return slopes

    return jax.tree.map(differences, tree)


def deep(a: Any, b: Any) -> dict[str, Any]:
    """Returns the variables of `Deep` with kernels A and B."""
    kernels = {"body": jnp.asarray(a, jnp.float32), "head": jnp.asarray(b, jnp.float32)}
    return {"params": {name: {"kernel": kernel} for name, kernel in kernels.items()}}


def kernels(variables: Any) -> tuple[np.ndarray, ...]:
    """Returns the kernels of `Deep`, or of the layers that the variables have."""
    return tuple(np.asarray(layer["kernel"]) for _, layer in sorted(variables["params"].items()))


def context(data: FederatedData, i: int = 0, t: Any = T) -> ClientContext:
    """Returns the context of client i in round t."""
    return ClientContext(jnp.int32(i), client_data(data, jnp.int32(i)), t, KEY)


def train_client(
    algorithm: Algorithm, payload: Any, client: Any, data: FederatedData, i: int = 0
) -> ClientResult:
    """Returns the result of client i's local training."""
    return jax.jit(algorithm.train)(payload, client, context(data, i))


def receive(
    algorithm: Algorithm, state: State, counts: Any, uploads: list[Any], arrived: Any
) -> State:
    """Returns the state after a server update with the uploads of clients 0, 1, ...

    Args:
      algorithm: The method.
      state: State before the update.
      counts: Number of examples of each client.
      uploads: One upload for each client, also for absent ones.
      arrived: Bool for each client.
    """
    n, present = len(counts), jnp.asarray(arrived)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *uploads)
    cohort = tiny_cohort(counts, jnp.where(present, jnp.arange(n), n), present, (), stacked, T)
    server, rows = algorithm.receive(state._replace(clients=()), cohort)
    return state._replace(server=server, rows=rows)


def run_rounds(
    algorithm: Algorithm, state: State, data: FederatedData, counts: Any, n: int
) -> tuple[State, Any]:
    """Returns the state after n rounds with all clients, and the models of the last training."""
    ids = jnp.arange(len(counts))

    def train(state: State, client: Any, i: jax.Array) -> Any:
        payload = algorithm.send(state, ClientContext(i, None, T, KEY))
        return payload, algorithm.train(
            payload, client, ClientContext(i, client_data(data, i), T, KEY)
        )

    @jax.jit
    def run_round(state: State) -> tuple[State, Any]:
        without_clients = state._replace(clients=())
        payloads, results = jax.vmap(train, (None, 0, 0))(without_clients, state.clients, ids)
        present = jnp.ones(len(counts), bool)
        cohort = tiny_cohort(counts, ids, present, payloads, results.upload, T)
        new_state = State(*algorithm.receive(without_clients, cohort), results.client)
        return new_state, results.variables

    for _ in range(n):
        state, models = run_round(state)
    return state, models


def variables(w: Any) -> dict[str, Any]:
    """Returns the variables of `Linear` with weights w."""
    return {"params": {"fc": {"kernel": jnp.asarray(w, jnp.float32).reshape(-1, 1)}}}


def weights(variables: Any) -> np.ndarray:
    """Returns the weights w of `Linear`."""
    return np.asarray(variables["params"]["fc"]["kernel"])[..., 0]


def _split(lists: list[Any], first: int) -> Split:
    sizes = np.array([len(examples) for examples in lists], np.int32)
    starts = first + np.cumsum(sizes) - sizes
    places = np.arange(max(1, sizes.max()), dtype=np.int32)
    rows = np.where(places < sizes[:, None], starts[:, None] + places, 0)
    return Split(rows.astype(np.int32), sizes)


def federated(
    xs: list[Any], ys: list[Any], validation: tuple[list[Any], list[Any]] | None = None
) -> tuple[FederatedData, Federation]:
    """Returns a federation with the given examples of each client.

    Args:
      xs: Inputs of each client, a list of arrays of shape [n, features].
      ys: Targets of each client, a list of arrays of shape [n].
      validation: The same for validation, or None.
    """
    empty = [np.zeros((0, len(xs[0][0]))) for _ in xs], [np.zeros(0) for _ in xs]
    x_validation, y_validation = empty if validation is None else validation
    x = np.concatenate([*map(np.asarray, xs), *map(np.asarray, x_validation)]).astype(np.float32)
    y = np.concatenate([*map(np.asarray, ys), *map(np.asarray, y_validation)]).astype(np.float32)
    train = _split(xs, 0)
    held_out = _split(x_validation, int(train.size.sum()))
    data = FederatedData(x, y[:, None], train, held_out, held_out)
    clients = len(xs)
    federation = Federation(
        counts=np.asarray(train.size),
        input_shape=(x.shape[1],),
        outputs=1,
        active=np.ones(clients, bool),
        groups=np.zeros(clients, np.int32),
        validation_counts=np.asarray(held_out.size),
        task=TASK,
    )
    return jax.tree.map(jnp.asarray, data), federation


def make(name: str, xs: Any, ys: Any, training: Any, **settings: Any) -> tuple[Algorithm, Any]:
    """Returns a method on `Linear`, and its data."""
    data, federation = federated(xs, ys)
    return getattr(algorithms, name)(Linear(), training, federation, **settings), data


def make_classifier(
    name: str = "fedavg",
    xs: Any = (X,),
    ys: Any = (Y,),
    training: Any = None,
    **settings: Any,
) -> tuple[Algorithm, Any]:
    """Returns a method on `Deep` with three classes, and its data."""
    data, federation = federated(xs, ys)
    data = data._replace(y=jnp.asarray(np.concatenate(ys), jnp.int32))
    training = training or local_training.sgd(learning_rate=0.2, batch_size=4, epochs=3)
    federation = federation._replace(outputs=3, task=CLASSES)
    return getattr(algorithms, name)(Deep(3, 2), training, federation, **settings), data


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the probabilities of classes."""
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)
