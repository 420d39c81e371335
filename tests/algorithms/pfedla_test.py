"""pFedLA and HeurpFedLA against numbers worked out apart from them."""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, Federation, State, Visit
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, Split
from fedjax_pfl.core.randomness import INIT, stage_key
from fedjax_pfl.core.task import classification
from fedjax_pfl.engine.rounds import make_rounds
from fedjax_pfl.networks import LeNet
from fedjax_pfl.networks.layer_weights import alpha
from fedjax_pfl.networks.mlp import MLP
from tests import cases, tiny

KEY, N = jax.random.key(3), tiny.CLIENTS


def make(name: str = "pfedla", changes: dict[str, Any] | None = None, **own: Any) -> Algorithm:
    training = cases.training(**(changes or {"keep_optimizer": False}))
    return getattr(algorithms, name)(tiny.Net(), cases.TASK, training, tiny.federated()[1], **own)


def with_noise(leaf, rng):
    return leaf + jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)


def scattered(algorithm: Algorithm) -> State:
    """A first state whose stored models differ."""
    state = algorithm.init(KEY)
    rng = np.random.default_rng(0)
    theta = jax.tree.map(lambda leaf: with_noise(leaf, rng), state.rows.theta)
    return state._replace(rows=state.rows._replace(theta=theta))


def test_alpha_rows_sum_to_one_and_close_what_is_not_allowed():
    raw = jax.random.normal(KEY, (4, 7))
    allowed = jnp.arange(7) != 2
    for normalise in ("relu", "softmax"):
        rows = alpha(raw, jnp.int32(1), allowed, normalise)
        np.testing.assert_allclose(rows.sum(1), 1, atol=1e-6)
        assert not rows[:, 2].any()
    positive = np.maximum(np.asarray(raw) * np.asarray(allowed), 0)
    wanted = positive / positive.sum(1, keepdims=True)
    np.testing.assert_allclose(alpha(raw, jnp.int32(1), allowed, "relu"), wanted, rtol=1e-6)


def test_a_dead_row_is_the_clients_own_and_has_no_nan():
    def f(raw):
        return jnp.sum(alpha(raw, jnp.int32(1), jnp.ones(3, bool), "relu") ** 2)

    raw = jnp.array([[-1.0, -2.0, 0.0], [1.0, 1.0, 2.0]])
    np.testing.assert_array_equal(
        alpha(raw, jnp.int32(1), jnp.ones(3, bool), "relu")[0], [0.0, 1.0, 0.0]
    )
    gradient = jax.grad(f)(raw)
    assert np.isfinite(gradient).all()
    assert not gradient[0].any()


def test_first_weights():
    """relu/sum starts near uniform, with a relative spread of about a tenth; softmax at 1/N."""
    rough = make(normalise="relu", step="plain")
    a = rough.observe(rough.init(KEY))["alpha"]
    chex.assert_shape(a, (N, 3, N))
    np.testing.assert_allclose(a.sum(-1), 1, atol=1e-6)
    assert 0.03 < float(np.std(N * np.asarray(a))) < 0.25
    soft = make()
    np.testing.assert_allclose(soft.observe(soft.init(KEY))["alpha"], 1 / N, atol=1e-7)


@pytest.mark.slow("a program for each step")
@pytest.mark.parametrize("normalise", ["relu", "softmax"])
def test_a_step_brings_the_mixed_model_closer_to_the_trained_one(normalise: str):
    algorithm = make(normalise=normalise, step="plain", rate=1e-6)
    state = scattered(algorithm)
    ids, t = jnp.arange(N), jnp.int32(0)
    send = jax.jit(
        jax.vmap(
            lambda rows, i: algorithm.send(State((), rows, ()), Visit(i, None, t, KEY)), (None, 0)
        )
    )
    payloads = send(state.rows, ids)
    rng = np.random.default_rng(1)
    uploads = {
        "params": jax.tree.map(
            lambda p: p + jnp.asarray(rng.normal(size=p.shape), p.dtype), payloads["params"]
        )
    }
    everyone = jnp.ones(N, bool)
    _, rows = algorithm.receive(
        State((), state.rows, ()), tiny.cohort(tiny.TRAIN, ids, everyone, payloads, uploads, t)
    )
    # The store is what it was, so that only the hypernetwork's step shows.
    closer = send(rows._replace(theta=state.rows.theta), ids)

    def flat(tree):
        return jnp.concatenate([x.reshape(N, -1) for x in jax.tree.leaves(tree)], 1)

    before, after, target = (flat(x["params"]) for x in (payloads, closer, uploads))
    moved = (np.asarray(after, np.float64) - before) * (np.asarray(target, np.float64) - before)
    assert (moved.sum(1) > 0).all()


def one_hot_psi(algorithm: Algorithm, state: State) -> State:
    """Hypernetworks whose α is one-hot on the client itself, for the relu normalisation."""

    def force(path: Any, leaf: jax.Array) -> jax.Array:
        if "head" not in str(path[0]):
            return leaf
        own = jnp.eye(N) if leaf.ndim == 2 else jnp.zeros(leaf.shape)
        return own if leaf.ndim == 2 else jnp.zeros_like(leaf)

    psi = jax.tree_util.tree_map_with_path(force, state.rows.psi)
    return state._replace(rows=state.rows._replace(psi=psi))


@pytest.mark.slow("three methods' runs")
def test_one_hot_alpha_mixes_to_the_store_and_equals_local():
    algorithm = make(normalise="relu", step="plain", rate=1e-30)
    data, federation = tiny.federated()
    state = one_hot_psi(algorithm, scattered(algorithm))
    for i in range(N):
        payload = algorithm.send(
            State((), state.rows, ()), Visit(jnp.int32(i), None, jnp.int32(0), KEY)
        )
        chex.assert_trees_all_equal(payload["params"], trees.row(state.rows.theta, i))
    pfedla = make_rounds(algorithm, cases.TASK, federation, cohort=N, calls=3)
    alone = make_rounds(make("local"), cases.TASK, federation, cohort=N, calls=3)
    start = alone.init(KEY)
    same = one_hot_psi(algorithm, pfedla.init(KEY))
    chex.assert_trees_all_equal(same.rows.theta, start.clients.variables["params"])
    mixed, _ = pfedla.run(KEY, same, data, 0, 3)
    own, _ = alone.run(KEY, start, data, 0, 3)
    chex.assert_trees_all_close(
        mixed.rows.theta, own.clients.variables["params"], rtol=1e-6, atol=1e-6
    )
    one, two = (
        jax.device_get(r.evaluate(KEY, s, data, 3).before)
        for r, s in ((pfedla, mixed), (alone, own))
    )
    chex.assert_trees_all_close(one, two, rtol=1e-5, atol=1e-5)


def test_uniform_alpha_is_the_plain_mean():
    algorithm = make()
    state = scattered(algorithm)
    payload = algorithm.send(
        State((), state.rows, ()), Visit(jnp.int32(2), None, jnp.int32(0), KEY)
    )
    wanted = trees.weighted_mean(state.rows.theta, jnp.ones(N))
    chex.assert_trees_all_close(payload["params"], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow("three methods' runs")
def test_retaining_every_layer_equals_local():
    data, federation = tiny.federated()
    heur = make_rounds(make(k=3, step="scaled"), cases.TASK, federation, cohort=N, calls=2)
    alone = make_rounds(make("local"), cases.TASK, federation, cohort=N, calls=2)
    kept, logs = heur.run(KEY, heur.init(KEY), data, 0, 2)
    own, _ = alone.run(KEY, alone.init(KEY), data, 0, 2)
    scores = [jax.device_get(r.evaluate(KEY, s, data, 2)) for r, s in ((heur, kept), (alone, own))]
    chex.assert_trees_all_close(*scores, rtol=1e-5, atol=1e-5)
    assert not any(np.asarray(amount).any() for amount in logs[0].down.values())
    first = heur.init(KEY)
    chex.assert_trees_all_equal(kept.rows.psi, first.rows.psi)  # retained layers give no gradient


def test_the_largest_own_weights_are_retained():
    algorithm = make(k=2, normalise="relu", step="plain")
    state = scattered(algorithm)
    weights = np.asarray(algorithm.observe(state)["alpha"])
    for i in range(N):
        payload = algorithm.send(
            State((), state.rows, ()), Visit(jnp.int32(i), None, jnp.int32(0), KEY)
        )
        chosen = set(np.flatnonzero(payload["retained"]))
        assert chosen == set(np.argsort(-weights[i, :, i])[:2])


@pytest.mark.parametrize(
    ("model", "first"),
    [
        (MLP(tiny.CLASSES, (2,) * 9), ["fc1", "fc2", "fc3"]),  # and not fc1, fc10, fc2
        (tiny.Net(), ["fc1", "norm1"]),  # and not fc1, fc2
    ],
)
def test_of_equal_weights_the_earlier_layers_are_retained(model, first):
    """As in rounds 1 and 2 of every run, before hypernetworks tell clients apart."""
    federation, training = tiny.federated()[1], cases.training()
    made = algorithms.pfedla(model, cases.TASK, training, federation, k=len(first))
    state = made.init(KEY)
    equal = jax.tree.map(jnp.zeros_like, state.rows.psi)
    state = state._replace(rows=state.rows._replace(psi=equal))
    kept = made.send(state, Visit(jnp.int32(2), None, jnp.int32(0), KEY))["retained"]
    names = np.array(list(trees.bytes_per_layer(state.rows.theta)))
    assert sorted(names[np.asarray(kept)]) == sorted(first)


def test_model_granularity_has_one_weight_per_client():
    algorithm = make(granularity="model")
    assert algorithm.observe(algorithm.init(KEY))["alpha"].shape == (N, 1, N)


def test_novel_clients_weigh_nothing_for_others():
    federation = tiny.federated()[1]._replace(active=np.arange(N) < 4)
    algorithm = algorithms.pfedla(tiny.Net(), cases.TASK, cases.training(), federation)
    a = np.asarray(algorithm.observe(algorithm.init(KEY))["alpha"])
    assert not a[:4, :, 4:].any()
    assert (a[5, :, 5] > 0).all()
    assert not a[5, :, 4].any()
    np.testing.assert_allclose(a.sum(-1), 1, atol=1e-6)


class Linear(nn.Module):
    """Two linear layers."""

    outputs: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        return nn.Dense(self.outputs, name="fc2")(nn.Dense(2, name="fc1")(x))


@pytest.mark.parametrize(
    ("normalise", "step"), [("relu", "plain"), ("softmax", "scaled"), ("softmax", "held_out")]
)
def test_a_whole_round_equals_numpy(normalise: str, step: str):
    """Three clients, a two-layer linear network, one full-batch step, three layers of ψ by hand."""
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(12, 3)).astype(np.float32), rng.normal(size=(12, 1)).astype(np.float32)
    rows = np.arange(12, dtype=np.int32).reshape(3, 4)
    split = Split(rows, np.full(3, 4, np.int32))
    data = FederatedData(x, y, split, split, split)
    federation = Federation(np.full(3, 4), (3,), 1, np.ones(3, bool), np.zeros(3, np.int32))
    rate, eta = 0.1, 0.3
    training = local_training.sgd(learning_rate=rate, batch_size=4, epochs=1)
    algorithm = algorithms.pfedla(
        Linear(),
        tiny.HALF_SQUARES,
        training,
        federation,
        rate=eta,
        embedding=4,
        hidden=5,
        depth=2,
        normalise=normalise,
        step=step,
        folds=2,
    )
    rounds = make_rounds(algorithm, tiny.HALF_SQUARES, federation, cohort=3)
    state = rounds.init(KEY)
    state = state._replace(rows=jax.tree.map(lambda leaf: with_noise(leaf, rng), state.rows))

    def as_float32(tree):
        return jax.tree.map(lambda a: np.asarray(a, np.float32), tree)

    def wide(tree):
        return jax.tree.map(lambda a: np.array(a, np.float64), tree)

    theta, psi = wide(state.rows.theta), wide(state.rows.psi)
    got, _ = rounds.run(KEY, state, jax.tree.map(jnp.asarray, data), 0, 1)

    for i in range(3):
        one = {
            a: {b: leaf[i] for b, leaf in part.items()} if isinstance(part, dict) else part[i]
            for a, part in psi.items()
        }
        # α of each layer
        v = one["embedding"]
        z1 = v @ one["hidden1"]["kernel"] + one["hidden1"]["bias"]
        a1 = np.maximum(z1, 0)
        z2 = a1 @ one["hidden2"]["kernel"] + one["hidden2"]["bias"]
        a2 = np.maximum(z2, 0)
        names = ["fc1", "fc2"]
        raw = [a2 @ one[f"head{n:03d}"]["kernel"] + one[f"head{n:03d}"]["bias"] for n in range(2)]
        positive = np.exp if normalise == "softmax" else lambda r: np.maximum(r, 0)
        weights = [positive(r) / positive(r).sum() for r in raw]
        mixed = {
            name: {leaf: np.tensordot(weights[n], theta[name][leaf], 1) for leaf in theta[name]}
            for n, name in enumerate(names)
        }

        def slope(mine, mixed=mixed):
            """The gradient of half the mean squared error."""
            xi, yi = x[mine].astype(np.float64), y[mine].astype(np.float64)
            h = xi @ mixed["fc1"]["kernel"] + mixed["fc1"]["bias"]
            error = (h @ mixed["fc2"]["kernel"] + mixed["fc2"]["bias"] - yi) / len(mine)
            back = error @ mixed["fc2"]["kernel"].T
            return {
                "fc1": {"kernel": xi.T @ back, "bias": back.sum(0)},
                "fc2": {"kernel": h.T @ error, "bias": error.sum(0)},
            }

        # one step; where a fold is held out in round 0, it is every second example from the first
        held_out = step == "held_out"
        delta = jax.tree.map(lambda g: -rate * g, slope(rows[i][1::2] if held_out else rows[i]))
        followed = jax.tree.map(np.negative, slope(rows[i][::2])) if held_out else delta
        # ψ moves along Jᵀ Δθ
        grad_a2, wanted = np.zeros_like(a2), 0.0
        along = {}
        for n, name in enumerate(names):
            length = sum((leaf**2).sum() for leaf in delta[name].values())
            grad_alpha = np.array(
                [
                    sum((theta[name][leaf][j] * g).sum() for leaf, g in followed[name].items())
                    for j in range(3)
                ]
            ) / (length if step == "scaled" else 1)
            grad_raw = grad_alpha - (grad_alpha * weights[n]).sum()
            if held_out:
                grad_raw = grad_alpha - grad_alpha.mean()
                wanted += ((eta * grad_raw) ** 2).sum()
            elif normalise == "softmax":
                grad_raw *= weights[n]
            else:
                grad_raw *= (raw[n] > 0) / positive(raw[n]).sum()
            along[f"head{n:03d}"] = {"kernel": np.outer(a2, grad_raw), "bias": grad_raw}
            grad_a2 += one[f"head{n:03d}"]["kernel"] @ grad_raw
        grad_z2 = grad_a2 * (z2 > 0)
        grad_z1 = (one["hidden2"]["kernel"] @ grad_z2) * (z1 > 0)
        along["hidden2"] = {"kernel": np.outer(a1, grad_z2), "bias": grad_z2}
        along["hidden1"] = {"kernel": np.outer(v, grad_z1), "bias": grad_z1}
        along["embedding"] = one["hidden1"]["kernel"] @ grad_z1
        # held_out: of a length with which the raw weights move by η times the gain along it
        squared = sum((leaf**2).sum() for leaf in jax.tree.leaves(along))
        size = wanted / (eta * squared) if held_out else eta
        new = jax.tree.map(lambda p, d, size=size: p + size * d, one, along)
        trained = jax.tree.map(np.add, mixed, delta)
        chex.assert_trees_all_close(
            as_float32(trained), jax.device_get(trees.row(got.rows.theta, i)), rtol=1e-5, atol=1e-6
        )
        chex.assert_trees_all_close(
            as_float32(new), jax.device_get(trees.row(got.rows.psi, i)), rtol=1e-5, atol=1e-6
        )


def mebibytes(model: LeNet, shape: tuple[int, ...], stays: list[str]) -> float:
    """75 rounds of 10 clients, both directions, with the retained layers forced."""
    federation = Federation(np.full(10, 4), shape, 10, np.ones(10, bool), np.zeros(10, np.int32))
    algorithm = algorithms.pfedla(
        model, classification(), cases.training(), federation, step="scaled"
    )
    shapes = jax.eval_shape(algorithm.init, stage_key(KEY, INIT))
    names = list(trees.layers(shapes.rows.theta))
    payload = {"retained": jnp.array([name in stays for name in names])}
    bill = algorithm.traffic(payload, {})
    book = sum(int(x) for part in bill for x in part.values()) * 75 * 10
    return round(book / 2**20, 2)


def test_megabytes_of_the_papers_third_table():
    """EMNIST to the last digit, CIFAR10 within what no whole number of parameters comes closer."""
    lenet = LeNet(outputs=10)
    assert mebibytes(lenet, (28, 28, 1), []) == 491.08
    assert mebibytes(lenet, (28, 28, 1), ["fc3"]) == 488.65
    assert mebibytes(lenet, (28, 28, 1), ["fc3", "fc1"]) == 312.52
    normed, shape = LeNet(outputs=10, batch_norm=True), (32, 32, 3)
    row = [mebibytes(normed, shape, ["fc1", "conv2", "fc3"][:k]) for k in range(4)]
    np.testing.assert_allclose(row, [693.98, 418.97, 382.25, 379.82], atol=0.03)


def test_bad_settings_are_one_line():
    _, federation = tiny.federated()
    for own, word in (
        ({"k": 4}, "3 layers"),
        ({"k": -1}, "choose 0"),
        ({"refresh": -1}, "refresh"),
        ({"granularity": "leaf"}, "layer or model"),
        ({"normalise": "max"}, "relu or softmax"),
        ({"step": "long"}, "held_out, scaled or plain"),
        ({"normalise": "relu"}, "needs normalise=softmax"),
        ({"folds": 1}, "at least 2"),
        ({"rate": -0.1}, "at least 0"),
    ):
        with pytest.raises(UsageError, match=word):
            algorithms.pfedla(tiny.Net(), cases.TASK, cases.training(), federation, **own)
    lonely = federation._replace(counts=federation.counts[:1], active=np.ones(1, bool))
    with pytest.raises(UsageError, match="at least 2"):
        algorithms.pfedla(tiny.Net(), cases.TASK, cases.training(), lonely)
    mixed = federation._replace(groups=np.arange(N) % 2)
    with pytest.raises(UsageError, match="without groups"):
        algorithms.pfedla(tiny.Net(), cases.TASK, cases.training(), mixed)
