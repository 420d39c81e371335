"""One round of Factorized-FL against NumPy in float64, on a dense and a convolutional network."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.simulation import rounds
from tests import tiny

KEY = jax.random.key(3)
N, OUT = tiny.CLIENTS, tiny.CLASSES
RATE, LAMBDA = 0.3, 0.05


class TwoLayers(nn.Module):
    """A convolution with F×F windows (dense if F = 0), ReLU, a mean over positions, and a head."""

    window: int = 0
    head = "fc2"
    layers = ("first", "fc2")

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        if self.window:
            x = nn.Conv(4, (self.window, self.window), padding="VALID", name="first")(x)
            return nn.Dense(OUT, name="fc2")(nn.relu(x).mean((1, 2)))
        return nn.Dense(OUT, name="fc2")(nn.relu(nn.Dense(4, name="first")(x)))


def windows(x: np.ndarray, f: int) -> np.ndarray:
    """Returns the patches of x, [B, Y, X, F, F, I]; for f = 0, x as one patch."""
    if not f:
        return x[:, None, None, None, None, :]
    patches = np.lib.stride_tricks.sliding_window_view(x, (f, f), axis=(1, 2))
    return np.moveaxis(patches, 3, -1)


def mixing_weights(v: np.ndarray, tau: float, scale: float, minimum: int) -> np.ndarray:
    """Computes ω [N, N] with loops, from (4) and (5)."""
    n = len(v)
    omega = np.zeros((n, n))
    for k in range(n):
        sigma = {
            i: v[k] @ v[i] / np.linalg.norm(v[k]) / np.linalg.norm(v[i]) for i in range(n) if i != k
        }
        peers = sorted(sigma, key=lambda i: -sigma[i])
        candidates_k = {i for i in peers if sigma[i] >= tau} | set(peers[: minimum - 1])
        scores = {k: 1.0, **{i: sigma[i] for i in candidates_k}}
        total = sum(np.exp(scale * s) for s in scores.values())
        for i, s in scores.items():
            omega[k, i] = np.exp(scale * s) / total
    return omega


def step(params: Any, x: np.ndarray, y: np.ndarray, f: int, penalty: float) -> Any:
    """Returns the parameters after a gradient step on cross-entropy + penalty ‖μ‖₁."""
    patches = windows(x, f)
    layer, head = params["first"], params["fc2"]
    w1 = (layer["u"] @ layer["v"].T + layer["mu"]).reshape(*patches.shape[3:], -1)
    w2 = head["u"] @ head["v"].T + head["mu"]
    a = np.einsum("nyxfgi,fgio->nyxo", patches, w1) + layer["bias"]
    z = np.maximum(a, 0).mean((1, 2))
    logits = z @ w2 + head["bias"]
    p = np.exp(logits - logits.max(1, keepdims=True))
    delta = (p / p.sum(1, keepdims=True) - np.eye(OUT)[y]) / len(y)
    back = (delta @ w2.T)[:, None, None, :] * (a > 0) / (a.shape[1] * a.shape[2])
    slopes = {
        "first": (np.einsum("nyxfgi,nyxo->fgio", patches, back), back.sum((0, 1, 2))),
        "fc2": (z.T @ delta, delta.sum(0)),
    }
    new = {}
    for layer, (by_kernel, by_bias) in slopes.items():
        old = params[layer]
        slope = by_kernel.reshape(old["mu"].shape)
        new[layer] = {
            "u": old["u"] - RATE * slope @ old["v"],
            "v": old["v"] - RATE * slope.T @ old["u"],
            "mu": old["mu"] - RATE * (slope + penalty * np.sign(old["mu"])),
            "bias": old["bias"] - RATE * by_bias,
        }
    return new


def stored(state: State, k: int) -> Any:
    """Returns all parameters of client k's last model, from the server and the client."""
    parts = (state.rows["params"], state.clients.personal["params"])
    params: Any = {}
    for part in parts:
        for layer, leaves in part.items():
            params.setdefault(layer, {}).update(
                {name: np.asarray(leaf[k], np.float64) for name, leaf in leaves.items()}
            )
    return params


def setting(f: int, **settings: Any) -> tuple[Any, Any, Any, State]:
    """Returns the method, its rounds, data, and a state whose clients differ in all parts."""
    rng = np.random.default_rng(2)
    data, federation = tiny.federated()
    if f:
        x = rng.normal(size=(len(data.x), 4, 4, 2)).astype(np.float32)
        data = data._replace(x=jnp.asarray(x))
        federation = federation._replace(input_shape=(4, 4, 2))
    training = local_training.sgd(learning_rate=RATE, batch_size=64, epochs=1)
    settings["sparsity"] = LAMBDA
    algorithm = algorithms.factorized_fl(TwoLayers(f), training, federation, **settings)
    rounds_functions = rounds.make_rounds(
        algorithm, federation, cohort=N, max_rounds=1, evaluate_after=False
    )
    state = rounds_functions.init(KEY)

    def scatter(leaf: jax.Array) -> jax.Array:
        return leaf + rng.normal(size=leaf.shape).astype(np.float32)

    state = jax.tree.map(scatter, state)
    if settings["share"] == "u":  # the server has a copy of each client's v
        copy = jnp.copy(state.clients.personal["params"]["first"]["v"])
        state.rows["params"]["first"]["v"] = copy
    return algorithm, rounds_functions, data, state


_SLOW = pytest.mark.slow("more programs of the same round")


@pytest.mark.parametrize(
    ("f", "share", "penalty", "tau", "scale", "minimum"),
    [
        (3, "u", True, 0.95, 5.0, 3),
        pytest.param(0, "u", False, 0.0, 1.0, 1, marks=_SLOW),
        pytest.param(0, "all", True, 0.1, 3.0, 2, marks=_SLOW),
        pytest.param(3, "all", False, -1.0, 1.0, N, marks=_SLOW),
    ],
)
def test_a_round_equals_numpy(f, share, penalty, tau, scale, minimum):
    settings = {"share": share, "penalty": penalty, "tau": tau, "scale": scale}
    algorithm, rounds_functions, data, before = setting(f, **settings, minimum=minimum)
    models = [stored(before, k) for k in range(N)]
    v = np.stack([model["first"]["v"].ravel() for model in models])
    omega = mixing_weights(v, tau, scale, minimum)
    assert tau != 0.1 or ((omega > 0).sum(1).min() < N and (omega > 0).sum(1).max() > minimum)
    np.testing.assert_allclose(algorithm.observe(before)["weights"], omega, atol=1e-6)
    # A copy, because the simulation may reuse the state's memory.
    copy = jax.tree.map(jnp.copy, before)
    after, _ = rounds_functions.run(KEY, copy, data, jnp.int32(0), jnp.int32(1))
    after = jax.device_get(after)
    for k in range(N):
        mixed = {name: dict(leaves) for name, leaves in models[k].items()}
        for leaf in ("u",) if share == "u" else ("u", "v", "mu", "bias"):
            mixed["first"][leaf] = sum(omega[k, i] * models[i]["first"][leaf] for i in range(N))
        rows = np.asarray(data.train.rows[k])[: int(data.train.size[k])]
        x, y = (np.asarray(part)[rows] for part in (data.x, data.y))
        expected = step(mixed, x.astype(np.float64), y, f, LAMBDA if penalty else 0.0)
        got = stored(after, k)
        assert set(got) == {"first", "fc2"}
        for layer, leaves in expected.items():
            for leaf, value in leaves.items():
                np.testing.assert_allclose(got[layer][leaf], value, atol=1e-5)
    # Alpha uploads u and v of the layer before the classifier, beta all of that layer.
    names = {"u", "v"} if share == "u" else {"u", "v", "mu", "bias"}
    assert {layer: set(part) for layer, part in after.rows["params"].items()} == {"first": names}
