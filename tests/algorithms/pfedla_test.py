"""pFedLA and HeurpFedLA against an independent computation in NumPy."""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.pfedla.layer_weights import normalised
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Federation, State
from fedjax_pfl.core.examples import FederatedData, Split
from fedjax_pfl.core.randomness import INIT, stage_key
from fedjax_pfl.networks import LeNet
from fedjax_pfl.networks.mlp import MLP
from fedjax_pfl.simulation.rounds import make_rounds
from tests import cases, tiny

KEY, N = jax.random.key(3), tiny.CLIENTS


def make(name: str = "pfedla", changes: dict[str, Any] | None = None, **settings: Any) -> Algorithm:
    training = cases.training(**(changes or {"keep_optimizer": False}))
    return getattr(algorithms, name)(tiny.Net(), training, tiny.federated()[1], **settings)


def with_noise(leaf, rng, scale=1.0):
    return leaf + scale * jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)


def scattered(algorithm: Algorithm) -> State:
    """Returns an initial state whose stored models differ."""
    state = algorithm.init(KEY)
    rng = np.random.default_rng(0)
    theta = jax.tree.map(lambda leaf: with_noise(leaf, rng), state.rows.theta)
    return state._replace(rows=state.rows._replace(theta=theta))


def test_rows_of_alpha_sum_to_one_without_disallowed_models():
    raw = jax.random.normal(KEY, (4, 7))
    allowed = jnp.arange(7) != 2
    for normalise in ("relu", "softmax"):
        rows = normalised(raw, jnp.int32(1), allowed, normalise)
        np.testing.assert_allclose(rows.sum(1), 1, atol=1e-5)
        assert not rows[:, 2].any()
    positive = np.maximum(np.asarray(raw) * np.asarray(allowed), 0)
    expected = positive / positive.sum(1, keepdims=True)
    np.testing.assert_allclose(normalised(raw, jnp.int32(1), allowed, "relu"), expected, rtol=1e-6)


def test_a_row_without_a_positive_weight_is_one_hot_with_a_finite_gradient():
    def f(raw):
        return jnp.sum(normalised(raw, jnp.int32(1), jnp.ones(3, bool), "relu") ** 2)

    raw = jnp.array([[-1.0, -2.0, 0.0], [1.0, 1.0, 2.0]])
    np.testing.assert_array_equal(
        normalised(raw, jnp.int32(1), jnp.ones(3, bool), "relu")[0], [0.0, 1.0, 0.0]
    )
    gradient = jax.grad(f)(raw)
    assert np.isfinite(gradient).all()
    assert not gradient[0].any()


def test_initial_alpha():
    """relu starts near uniform, with a relative spread of about 0.1; softmax at exactly 1/N."""
    relu = make(normalise="relu")
    a = relu.observe(relu.init(KEY))["alpha"]
    chex.assert_shape(a, (N, 3, N))
    np.testing.assert_allclose(a.sum(-1), 1, atol=1e-5)
    assert 0.03 < float(np.std(N * np.asarray(a))) < 0.25
    softmax = make()
    np.testing.assert_allclose(softmax.observe(softmax.init(KEY))["alpha"], 1 / N, atol=1e-7)


@pytest.mark.slow("a program for each step")
@pytest.mark.parametrize("normalise", ["relu", "softmax"])
def test_a_tiny_step_brings_the_mixed_model_closer_to_the_trained_one(normalise: str):
    algorithm = make(normalise=normalise, rate=1e-5)
    state = scattered(algorithm)
    ids, t = jnp.arange(N), jnp.int32(0)
    send = jax.jit(
        jax.vmap(
            lambda rows, i: algorithm.send(State((), rows, ()), ClientContext(i, None, t, KEY)),
            (None, 0),
        )
    )
    payloads = send(state.rows, ids)
    rng = np.random.default_rng(1)
    uploads = {
        "params": jax.tree.map(
            lambda p: p + jnp.asarray(rng.normal(size=p.shape), p.dtype), payloads["params"]
        )
    }
    active = jnp.ones(N, bool)
    _, rows = algorithm.receive(
        State((), state.rows, ()), tiny.cohort(tiny.TRAIN, ids, active, payloads, uploads, t)
    )
    # With the old stored models only the step of the hypernetwork shows.
    closer = send(rows._replace(theta=state.rows.theta), ids)

    def flat(tree):
        leaves = [x.reshape(N, -1) for x in jax.tree.leaves(tree["params"])]
        return np.concatenate(leaves, 1).astype(np.float64)

    before, after, target = map(flat, (payloads, closer, uploads))
    assert (((after - before) * (target - before)).sum(1) > 0).all()
    assert (((after - target) ** 2).sum(1) < ((before - target) ** 2).sum(1)).all()


def one_hot_psi(algorithm: Algorithm, state: State) -> State:
    """Returns a state whose alpha is one-hot on the client itself, for normalise=relu."""

    def force(path: Any, leaf: jax.Array) -> jax.Array:
        if "head" not in str(path[0]):
            return leaf
        head = jnp.eye(N) if leaf.ndim == 2 else jnp.zeros(leaf.shape)
        return head if leaf.ndim == 2 else jnp.zeros_like(leaf)

    psi = jax.tree_util.tree_map_with_path(force, state.rows.psi)
    return state._replace(rows=state.rows._replace(psi=psi))


@pytest.mark.slow("three methods' runs")
def test_one_hot_alpha_equals_local():
    algorithm = make(normalise="relu", rate=1e-30)
    data, federation = tiny.federated()
    state = one_hot_psi(algorithm, scattered(algorithm))
    for i in range(N):
        payload = algorithm.send(
            State((), state.rows, ()), ClientContext(jnp.int32(i), None, jnp.int32(0), KEY)
        )
        chex.assert_trees_all_equal(payload["params"], trees.row(state.rows.theta, i))
    pfedla = make_rounds(algorithm, federation, cohort=N, max_rounds=3)
    local = make_rounds(make("local"), federation, cohort=N, max_rounds=3)
    start = local.init(KEY)
    start_state = one_hot_psi(algorithm, pfedla.init(KEY))
    chex.assert_trees_all_equal(start_state.rows.theta, start.clients.variables["params"])
    mixed, _ = pfedla.run(KEY, start_state, data, 0, 3)
    local_state, _ = local.run(KEY, start, data, 0, 3)
    chex.assert_trees_all_close(
        mixed.rows.theta, local_state.clients.variables["params"], rtol=1e-6, atol=1e-6
    )
    pfedla_scores, local_scores = (
        jax.device_get(r.evaluate(KEY, s, data, 3).before)
        for r, s in ((pfedla, mixed), (local, local_state))
    )
    chex.assert_trees_all_close(pfedla_scores, local_scores, rtol=1e-5, atol=1e-5)


def test_uniform_alpha_is_the_unweighted_mean():
    algorithm = make()
    state = scattered(algorithm)
    payload = algorithm.send(
        State((), state.rows, ()), ClientContext(jnp.int32(2), None, jnp.int32(0), KEY)
    )
    expected = trees.weighted_mean(state.rows.theta, jnp.ones(N))
    chex.assert_trees_all_close(payload["params"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow("three methods' runs")
def test_retaining_every_layer_equals_local():
    data, federation = tiny.federated()
    heur = make_rounds(make(k=3), federation, cohort=N, max_rounds=2)
    local = make_rounds(make("local"), federation, cohort=N, max_rounds=2)
    heur_state, logs = heur.run(KEY, heur.init(KEY), data, 0, 2)
    own, _ = local.run(KEY, local.init(KEY), data, 0, 2)
    scores = [
        jax.device_get(r.evaluate(KEY, s, data, 2)) for r, s in ((heur, heur_state), (local, own))
    ]
    chex.assert_trees_all_close(*scores, rtol=1e-5, atol=1e-5)
    assert not any(np.asarray(amount).any() for amount in logs[0].down.values())
    # From the second round on the stored models differ, and retained layers give a gradient.
    first = heur.init(KEY).rows.psi
    for head in ("head000", "head001", "head002"):
        assert (heur_state.rows.psi[head]["bias"] != first[head]["bias"]).any(1).all()


def test_the_largest_own_weights_are_retained():
    algorithm = make(k=2, normalise="relu")
    state = scattered(algorithm)
    weights = np.asarray(algorithm.observe(state)["alpha"])
    for i in range(N):
        payload = algorithm.send(
            State((), state.rows, ()), ClientContext(jnp.int32(i), None, jnp.int32(0), KEY)
        )
        retained = set(np.flatnonzero(payload["retained"]))
        assert retained == set(np.argsort(-weights[i, :, i])[:2])


@pytest.mark.parametrize(
    ("model", "first"),
    [
        (MLP(tiny.CLASSES, (2,) * 9), ["fc1", "fc2", "fc3"]),  # and not fc1, fc10, fc2
        (tiny.Net(), ["fc1", "norm1"]),  # and not fc1, fc2
    ],
)
def test_ties_retain_the_earlier_layers(model, first):
    """Ties occur in round 1 of every run, where all stored models are equal."""
    federation, training = tiny.federated()[1], cases.training()
    algorithm = algorithms.pfedla(model, training, federation, k=len(first))
    state = algorithm.init(KEY)
    equal = jax.tree.map(jnp.zeros_like, state.rows.psi)
    state = state._replace(rows=state.rows._replace(psi=equal))
    heur_state = algorithm.send(state, ClientContext(jnp.int32(2), None, jnp.int32(0), KEY))[
        "retained"
    ]
    names = np.array(list(trees.bytes_per_layer(state.rows.theta)))
    assert sorted(names[np.asarray(heur_state)]) == sorted(first)


def test_model_granularity_has_one_weight_per_client():
    algorithm = make(granularity="model")
    assert algorithm.observe(algorithm.init(KEY))["alpha"].shape == (N, 1, N)


def test_held_out_clients_do_not_contribute_to_others():
    federation = tiny.federated()[1]._replace(active=np.arange(N) < 4)
    algorithm = algorithms.pfedla(tiny.Net(), cases.training(), federation)
    a = np.asarray(algorithm.observe(algorithm.init(KEY))["alpha"])
    assert not a[:4, :, 4:].any()
    assert (a[5, :, 5] > 0).all()
    assert not a[5, :, 4].any()
    np.testing.assert_allclose(a.sum(-1), 1, atol=1e-5)


class Linear(nn.Module):
    """Two linear layers."""

    outputs: int = 1
    layers = ("fc1", "fc2")

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        return nn.Dense(self.outputs, name="fc2")(nn.Dense(2, name="fc1")(x))


def numpy_alpha(psi: dict[str, Any], normalise: str) -> np.ndarray:
    """Hypernetwork with two hidden layers in float64. Returns alpha of shape [2, N]."""
    x = psi["embedding"]
    for name in ("hidden1", "hidden2"):
        x = np.maximum(x @ psi[name]["kernel"] + psi[name]["bias"], 0)
    heads = np.stack([x @ psi[h]["kernel"] + psi[h]["bias"] for h in ("head000", "head001")])
    positive = np.exp(heads) if normalise == "softmax" else np.maximum(heads, 0)
    return positive / positive.sum(1, keepdims=True)


def numpy_mix(theta: Any, alpha: np.ndarray) -> Any:
    """Eq. (6): one row of alpha for each of the layers fc1 and fc2."""
    return {
        name: {leaf: np.tensordot(row, stored, 1) for leaf, stored in theta[name].items()}
        for name, row in zip(("fc1", "fc2"), alpha, strict=True)
    }


def numpy_gradient(model: Any, x: np.ndarray, y: np.ndarray) -> Any:
    """Gradient of half the mean squared error of `Linear`."""
    hidden = x @ model["fc1"]["kernel"] + model["fc1"]["bias"]
    error = (hidden @ model["fc2"]["kernel"] + model["fc2"]["bias"] - y) / len(x)
    back = error @ model["fc2"]["kernel"].T
    return {
        "fc1": {"kernel": x.T @ back, "bias": back.sum(0)},
        "fc2": {"kernel": hidden.T @ error, "bias": error.sum(0)},
    }


def numpy_derivative(f: Any, psi: Any) -> Any:
    """Central differences of the scalar f by every number in psi."""
    leaves, tree = jax.tree.flatten(psi)
    h, derivative = 1e-5, [np.zeros_like(leaf) for leaf in leaves]
    for slopes, leaf in zip(derivative, leaves, strict=True):
        for place in np.ndindex(leaf.shape):
            value, ends = leaf[place], []
            for step in (h, -h):
                leaf[place] = value + step
                ends.append(f(jax.tree.unflatten(tree, leaves)))
            leaf[place] = value
            slopes[place] = (ends[0] - ends[1]) / (2 * h)
    return jax.tree.unflatten(tree, derivative)


@pytest.mark.parametrize("clients", [2, 3])
@pytest.mark.parametrize(
    ("normalise", "k"), [("softmax", 0), ("relu", 0), ("softmax", 1), ("softmax", 2)]
)
def test_a_round_follows_equations_6_10_and_11(normalise: str, k: int, clients: int):
    """One round against NumPy in float64; the Jacobian by finite differences.

    A full batch and one step per client. With k > 0, the k layers with the largest self-weight
    start from the client's own stored layer. Updates (10) and (11) use all layers (Algorithm 2).
    """
    rng = np.random.default_rng(1)
    n = 4 * clients
    x, y = rng.normal(size=(n, 3)).astype(np.float32), rng.normal(size=(n, 1)).astype(np.float32)
    split = Split(np.arange(n, dtype=np.int32).reshape(clients, 4), np.full(clients, 4, np.int32))
    data = FederatedData(x, y, split, split, split)
    active = np.ones(clients, bool)
    federation = Federation(
        np.full(clients, 4), (3,), 1, active, np.zeros(clients, np.int32), task=tiny.HALF_SQUARES
    )
    learning_rate, eta = 0.1, 0.3
    training = local_training.sgd(learning_rate=learning_rate, batch_size=4, epochs=1)
    algorithm = algorithms.pfedla(
        Linear(),
        training,
        federation,
        k=k,
        rate=eta,
        embedding=4,
        hidden=5,
        depth=2,
        normalise=normalise,
    )
    rounds = make_rounds(algorithm, federation, cohort=clients)
    state = rounds.init(KEY)
    theta = jax.tree.map(lambda leaf: with_noise(leaf, rng), state.rows.theta)
    psi = jax.tree.map(lambda leaf: with_noise(leaf, rng, 0.4), state.rows.psi)
    state = state._replace(rows=state.rows._replace(theta=theta, psi=psi))
    theta, psi = jax.tree.map(
        lambda leaf: np.array(leaf, np.float64), (state.rows.theta, state.rows.psi)
    )
    after, _ = rounds.run(KEY, state, jax.tree.map(jnp.asarray, data), 0, 1)

    for i in range(clients):
        psi_i = jax.tree.map(lambda leaf, i=i: np.array(leaf[i]), psi)
        alpha_i = numpy_alpha(psi_i, normalise)
        retained = np.argsort(-alpha_i[:, i])[:k]
        used = alpha_i.copy()
        used[retained] = np.eye(clients)[i]
        downloaded = numpy_mix(theta, used)
        gradient = numpy_gradient(downloaded, x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4])
        delta = jax.tree.map(lambda g: -learning_rate * g, gradient)

        def agreement(psi_i: Any, delta: Any = delta) -> float:
            """Inner product of the mixed model with delta, whose derivative is J^T delta."""
            mixed = numpy_mix(theta, numpy_alpha(psi_i, normalise))
            return sum(jax.tree.leaves(jax.tree.map(np.vdot, mixed, delta)))

        direction = numpy_derivative(agreement, psi_i)
        new_psi = jax.tree.map(lambda p, d: p + eta * d, psi_i, direction)
        trained = jax.tree.map(np.add, downloaded, delta)
        for expected, rows in ((trained, after.rows.theta), (new_psi, after.rows.psi)):
            actual = jax.device_get(trees.row(rows, i))
            expected = jax.tree.map(np.float32, expected)
            chex.assert_trees_all_close(expected, actual, rtol=1e-5, atol=1e-5)
        head_steps = [direction[h]["bias"] for h in ("head000", "head001")]
        if normalise == "softmax":  # relu may close all columns of a row but one
            assert all(np.abs(step).max() > 1e-3 for step in head_steps)


def mebibytes(model: LeNet, shape: tuple[int, ...], stays: list[str]) -> float:
    """Returns MiB of 75 rounds of 10 clients in both directions, with retained layers."""
    federation = Federation(np.full(10, 4), shape, 10, np.ones(10, bool), np.zeros(10, np.int32))
    algorithm = algorithms.pfedla(model, cases.training(), federation)
    shapes = jax.eval_shape(algorithm.init, stage_key(KEY, INIT))
    names = list(trees.layers(shapes.rows.theta))
    payload = {"retained": jnp.array([name in stays for name in names])}
    bill = algorithm.traffic(payload, {})
    book = sum(int(x) for part in bill for x in part.values()) * 75 * 10
    return round(book / 2**20, 2)


def test_traffic_of_the_papers_table_3():
    """EMNIST exactly; CIFAR10 within 0.03, because no number of parameters gives all four."""
    lenet = LeNet(outputs=10)
    assert mebibytes(lenet, (28, 28, 1), []) == 491.08
    assert mebibytes(lenet, (28, 28, 1), ["fc3"]) == 488.65
    assert mebibytes(lenet, (28, 28, 1), ["fc3", "fc1"]) == 312.52
    normed, shape = LeNet(outputs=10, batch_norm=True), (32, 32, 3)
    row = [mebibytes(normed, shape, ["fc1", "conv2", "fc3"][:k]) for k in range(4)]
    np.testing.assert_allclose(row, [693.98, 418.97, 382.25, 379.82], atol=0.03)
