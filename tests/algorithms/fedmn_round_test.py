"""One round of FedMN, from gates to aggregation, against NumPy in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import ClientContext, State
from fedjax_pfl.core.examples import client_data
from fedjax_pfl.networks import MLP
from tests import tiny
from tests.algorithms import linear

LAYOUT, RATE, TAU = (2, 2, 2), 0.5, 10**-0.5
SIZES = {"layout": LAYOUT, "width": 4, "hidden": 5, "x_size": 3, "y_size": 2, "dropout": 0.0}
BLOCKS = ("block2_1", "block2_2", "block3_1", "block3_2")
CLIENTS = np.array([0, 3, 5])


def dense(layer: Any, x: np.ndarray) -> np.ndarray:
    return x @ layer["kernel"] + layer["bias"]


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


def logits(params: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Computes logit π by equation (9)."""
    image = dense(params["router_encoder"]["fc1"], x)
    joint = np.concatenate([image, dense(params["router_labels"], np.eye(tiny.CLASSES)[y])], 1)
    joint /= np.linalg.norm(joint, axis=1, keepdims=True)
    return dense(params["router_gates"], joint).mean(0)


def active_blocks(opened: np.ndarray) -> np.ndarray:
    """Returns the active blocks of a 2 x 2 x 2 layout, section II-E."""
    second = [opened[0] or opened[1], opened[2] or opened[3]]
    third = [
        any(opened[4 + 2 * j + i] and second[i] for i in range(2))  # i feeds j
        for j in range(2)
    ]
    return np.array([*second, *third], bool)


def loss(params: Any, gates: np.ndarray, active: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    """Computes the mean cross-entropy of a client's network, with (13) weighted by gates."""

    def mean(row: np.ndarray, values: list[Any]) -> np.ndarray:
        pairs = [(c, u) for c, u in zip(row, values, strict=True) if u is not None]
        return np.sum([c * u for c, u in pairs], 0) / sum(c for c, _ in pairs)

    values: list[Any] = [np.maximum(dense(params[f"encoder{j}"]["fc1"], x), 0) for j in (1, 2)]
    for number, matrix in ((2, gates[:4].reshape(2, 2)), (3, gates[4:8].reshape(2, 2))):
        after: list[Any] = []
        for j, row in enumerate(matrix):
            is_held = active[2 * (number - 2) + j]
            out = dense(params[f"block{number}_{j + 1}"], mean(row, values)) if is_held else None
            after.append(np.maximum(out, 0) if is_held and number == 2 else out)
        values = after
    out = mean(gates[8:], values)
    peak = out.max(1)
    normaliser = np.log(np.exp(out - peak[:, None]).sum(1)) + peak
    return float(np.mean(normaliser - out[np.arange(len(y)), y]))


def local_round(server: Any, x: np.ndarray, y: np.ndarray, noise: np.ndarray, hard: bool) -> Any:
    """Computes a full-batch step. Returns the new parameters, a_m, and π before the step."""
    params = jax.tree.map(lambda p: np.array(p, np.float64), server)
    z = logits(params, x, y)
    soft = sigmoid((z + noise) / TAU)
    opened = soft > 0.5
    active = active_blocks(opened)
    assert (opened[8:] & active[2:]).any()  # a path is open without help
    gates = opened.astype(float) if hard else soft.copy()
    psi = {name: layer for name, layer in params.items() if name.startswith("router")}
    theta = {name: layer for name, layer in params.items() if name not in psi}
    d_theta = linear.central_differences(lambda: loss(params, gates, active, x, y), theta)
    d_gates = linear.central_differences(lambda: loss(params, gates, active, x, y), gates)
    pulled = d_gates * soft * (1 - soft) / TAU  # (5), in both readings
    d_psi = linear.central_differences(lambda: float(logits(params, x, y) @ pulled), psi)
    stepped = jax.tree.map(lambda p, g: p - RATE * g, params, {**d_theta, **d_psi})
    return stepped, active, sigmoid(z)


@pytest.mark.parametrize(
    "gates", ["soft", pytest.param("hard", marks=pytest.mark.slow("the same round"))]
)
def test_a_round_equals_numpy(gates):
    data, federation = tiny.federated()
    training = local_training.sgd(learning_rate=RATE, batch_size=16, epochs=1)
    settings = {**SIZES, "gates": gates, "rounds": 5, "first_round": 20}
    algorithm = algorithms.fedmn(MLP(hidden=()), training, federation, **settings)
    state = jax.jit(algorithm.init)(jax.random.key(1))
    server, keys = state.server, jax.random.split(jax.random.key(40), len(CLIENTS))

    def train(i: jax.Array, client: Any, key: jax.Array) -> Any:
        return algorithm.train(
            server, client, ClientContext(i, client_data(data, i), jnp.int32(22), key)
        )

    clients = jax.tree.map(lambda leaf: leaf[CLIENTS], state.clients)
    done = jax.jit(jax.vmap(train))(jnp.asarray(CLIENTS), clients, keys)
    cohort = tiny.cohort(
        tiny.TRAIN, jnp.asarray(CLIENTS), jnp.ones(3, bool), server, done.upload, 22
    )
    new, _ = jax.jit(lambda c: algorithm.receive(State(server, (), ()), c))(cohort)

    expected, numpy_data = [], jax.device_get(data)
    for i, key in zip(CLIENTS, keys, strict=True):
        noise = jax.random.logistic(jax.random.split(key)[0], (10,))
        rows = numpy_data.train.rows[i][: tiny.TRAIN[i]]
        x, y = numpy_data.x[rows].astype(np.float64), numpy_data.y[rows]
        expected.append(local_round(server["params"], x, y, np.asarray(noise), gates == "hard"))
    active = np.stack([a for _, a, _ in expected])
    assert not active.all()
    np.testing.assert_array_equal(done.upload["active"], active)
    np.testing.assert_allclose(done.client.pi, [pi for _, _, pi in expected], rtol=1e-5)
    n = tiny.TRAIN[CLIENTS].astype(float)
    for name, layer in new["params"].items():
        used = active[:, BLOCKS.index(name)] if name in BLOCKS else np.ones(3)
        if not used.any():
            jax.tree.map(np.testing.assert_array_equal, layer, server["params"][name])
            continue
        share = n * used / np.sum(n * used)
        stacked = [params[name] for params, _, _ in expected]
        mean = jax.tree.map(lambda *layers, w=share: np.tensordot(w, np.stack(layers), 1), *stacked)
        jax.tree.map(
            lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5),
            layer,
            mean,
        )
    moved = np.abs(
        np.asarray(new["params"]["router_gates"]["bias"] - server["params"]["router_gates"]["bias"])
    )
    assert moved.max() > 1e-3  # the router learns, or the comparison above shows nothing
