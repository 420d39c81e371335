"""Factorized-FL and its variant against numbers computed independently."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.shared.matching import cosine
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import ClientContext, Federation, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import client_data
from fedjax_pfl.networks import ResNet9
from fedjax_pfl.simulation import rounds
from tests import cases, tiny
from tests.algorithms.served import after_rounds, served

KEY, T = jax.random.key(3), jnp.int32(0)
N = tiny.CLIENTS
ALL_CLIENTS = jnp.ones(N, bool)


def make(training: Any = None, federation: Any = None, **settings: Any) -> Any:
    training = training or cases.training(keep_optimizer=False)
    federation = federation or tiny.federated()[1]
    return algorithms.factorized_fl(tiny.Net(), training, federation, **settings)


def scattered(algorithm: Any) -> State:
    """Returns an initial state with noise on the server-side rows."""

    @jax.jit
    def init(key: jax.Array) -> State:
        state = algorithm.init(key)
        leaves, structure = jax.tree.flatten(state.rows)
        keys = jax.random.split(key, len(leaves))
        noise = [jax.random.normal(k, leaf.shape) for k, leaf in zip(keys, leaves, strict=True)]
        rows = jax.tree.map(jnp.add, state.rows, jax.tree.unflatten(structure, noise))
        return state._replace(rows=rows)

    return jax.device_get(init(KEY))


def observed(algorithm: Any, state: State) -> dict[str, np.ndarray]:
    return jax.device_get(jax.jit(algorithm.observe)(state))


def sent(algorithm: Any, state: State, key: Any = KEY) -> Any:
    def send(state: State, key: Any, i: jax.Array) -> Any:
        return algorithm.send(state, ClientContext(i, None, T, key))

    return jax.device_get(jax.jit(jax.vmap(send, (None, None, 0)))(state, key, np.arange(N)))[
        "params"
    ]


@pytest.mark.slow("two programs")
@pytest.mark.parametrize("pruned", ["travel", "evaluation"])
def test_pruned_entries_are_not_counted_as_traffic(pruned):
    """Models are always pruned for evaluation, downloads and uploads only with `travel`."""
    algorithm = make(sparsity=0.3, scale=2.0, pruned=pruned)
    state, data = scattered(algorithm), client_data(tiny.federated()[0], 0)
    client = trees.row(state.clients, 0)

    @jax.jit
    def train(state: State) -> Any:
        payload = algorithm.send(state, ClientContext(0, None, T, KEY))
        result = algorithm.train(payload, client, ClientContext(0, data, T, KEY))
        traffic = algorithm.traffic(payload, result.upload)
        return payload, result, (traffic.down["fc1"], traffic.up["fc1"])

    payload, result, traffic = train(state)
    down, up, trained = (
        np.abs(tree["params"]["fc1"]["mu"]) for tree in (payload, result.upload, result.variables)
    )
    assert ((trained == 0) | (trained >= 0.3)).all()
    assert ((down > 0) & (down < 0.3)).any() == (pruned == "evaluation")
    assert ((up > 0) & (up < 0.3)).any() == (pruned == "evaluation")
    vectors = tiny.FEATURES + tiny.HIDDEN  # u and v
    assert traffic == (4 * (vectors + (down >= 0.3).sum()), 4 * (vectors + (up >= 0.3).sum()))


def test_other_matching_rules():
    base = {"sparsity": 0.0, "scale": 2.0, "peers": 2}
    state = scattered(make(**base))
    v = np.asarray(state.rows["params"]["fc1"]["v"])[..., 0]
    sigma = np.asarray(jax.jit(jax.vmap(cosine, (None, 0)))(v, np.arange(N)))
    worst = observed(make(**base, matching="worst"), state)["weights"]
    for i in range(N):
        peers = [j for j in np.argsort(sigma[i]) if j != i]
        assert set(np.flatnonzero(worst[i])) == {i, *peers[:2]}
    np.testing.assert_allclose(worst.sum(1), 1, rtol=1e-5)
    algorithm = make(**base, matching="random")
    assert "weights" not in observed(algorithm, state)  # peers are sampled in each round
    u = [np.asarray(sent(algorithm, state, key)["fc1"]["u"]) for key in jax.random.split(KEY, 2)]
    assert (np.abs(u[0] - u[1]).max(axis=(1, 2)) > 1e-4).sum() > 2  # other peers with another key
    counts = tiny.TRAIN / tiny.TRAIN.sum()
    mean = observed(make(**base, matching="none"), state)["weights"]
    np.testing.assert_allclose(mean, np.tile(counts, (N, 1)), rtol=1e-5)


def test_held_out_clients_are_in_no_other_mixture():
    federation = tiny.federated()[1]._replace(active=np.arange(N) < 4)
    algorithm = make(federation=federation, minimum=3)
    omega = observed(algorithm, scattered(algorithm))["weights"]
    assert not omega[:4, 4:].any()
    assert (omega[5, 5] > 0, omega[5, 4]) == (True, 0)


def test_the_papers_costs():
    """ResNet9, 20 clients, 50 uploads and 49 downloads: FedAvg 20.39 GB, alpha 0.26 GB."""
    network = ResNet9(conv="xla")
    image = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
    parameters = trees.size(jax.eval_shape(network.init, KEY, image))
    counters = 8  # PyTorch counts batches, once for each BatchNorm
    assert round(20 * 99 * 4 * (parameters + counters) / 1e9, 2) == 20.39
    federation = Federation(
        np.full(20, 4), (32, 32, 3), 10, np.ones(20, bool), np.zeros(20, np.int32)
    )
    algorithm = algorithms.factorized_fl(network, cases.training(), federation, share="u")
    rows = {"params": jax.eval_shape(algorithm.init, KEY).rows["params"]}
    row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows)
    traffic = algorithm.traffic(row, row)
    down, up = sum(traffic.down.values()), sum(traffic.up.values())
    u = 4 * (7 * 9 + 25)  # seven 3×3 windows and a 5×5 one
    assert (down, up) == (u, u + 4 * 65_536)
    # The paper prints 0.32, which leaves 7,300 other numbers in each transfer.
    assert round(20 * (49 * down + 50 * up) / 1e9, 3) == 0.263


@pytest.mark.slow("two phases")
def test_a_later_phase_continues_factors_and_resets_momentum():
    """BatchNorm statistics stay on the client."""
    algorithm = make(cases.training(keep_optimizer=True))
    state, _ = jax.device_get(after_rounds(algorithm, 1))
    assert len(np.unique(state.clients.personal["batch_stats"]["norm1"]["mean"][:, 0])) == N
    assert "batch_stats" not in state.rows
    later = jax.device_get(jax.jit(algorithm.init)(KEY, state))
    chex.assert_trees_all_equal(later.rows, state.rows)
    chex.assert_trees_all_equal(later.clients.personal, state.clients.personal)
    assert not any(leaf.any() for leaf in jax.tree.leaves(later.clients.momentum))
    with pytest.raises(UsageError, match="same settings"):
        jax.eval_shape(make(rank=2).init, KEY, state)


@pytest.mark.slow("programs of a variant")
@pytest.mark.parametrize("share", ["u", "all"])
def test_weights_of_the_moved_variant_follow_changes_of_v(share):
    """ω is computed from cosines of d, the total change of v; σ_k is the best peer's."""
    data, federation = tiny.federated()
    training = cases.training(keep_optimizer=False)
    settings = {"share": share, "tau": -1.0, "scale": 3.0, "minimum": 2}
    algorithm = algorithms.factorized_fl_moved(tiny.Net(), training, federation, **settings)
    engine = rounds.make_rounds(algorithm, federation, cohort=N, max_rounds=1, evaluate_after=False)
    state = engine.init(KEY)
    np.testing.assert_array_equal(state.rows["moved"], 0)
    np.testing.assert_allclose(observed(algorithm, state)["weights"], 1 / N, rtol=1e-6)
    d = np.zeros((N, tiny.HIDDEN))
    for t in (0, 1):
        before = sent(algorithm, state)["fc1"]["v"][..., 0]
        state, (log,) = engine.run(KEY, state, data, jnp.int32(t), jnp.int32(1))
        d += np.asarray(state.rows["params"]["fc1"]["v"])[..., 0] - before
        np.testing.assert_allclose(state.rows["moved"], d, atol=1e-5)
    # From the stored change: division by its length would increase rounding errors.
    d = np.asarray(state.rows["moved"], np.float64)
    unit = d / np.linalg.norm(d, axis=1, keepdims=True)
    sigma = unit @ unit.T
    np.fill_diagonal(sigma, -1)
    np.fill_diagonal(sigma, sigma.max(1))
    omega = np.exp(3 * sigma) / np.exp(3 * sigma).sum(1, keepdims=True)
    state = jax.device_get(state)
    np.testing.assert_allclose(observed(algorithm, state)["weights"], omega, atol=1e-5)
    longer = state._replace(rows={**state.rows, "moved": 100 * state.rows["moved"]})
    np.testing.assert_allclose(observed(algorithm, longer)["weights"], omega, atol=1e-5)
    # The head is not factorised and is mixed.
    head = state.rows["params"]["fc2"]["kernel"]
    assert head.shape == (N, tiny.HIDDEN, tiny.CLASSES)
    model = served(algorithm, state, 2)["params"]["fc2"]["kernel"]
    np.testing.assert_allclose(model, np.tensordot(omega[2], head, 1), atol=1e-5)
    assert int(np.asarray(log.up["fc2"]).ravel()[0]) == 4 * (tiny.HIDDEN + 1) * tiny.CLASSES
