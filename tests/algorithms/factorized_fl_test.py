"""Factorized-FL and pFedPara against numbers computed independently."""

from functools import cache
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.factorized_fl.pruning import collect_mu
from fedjax_pfl.algorithms.shared.matching import candidates, cosine
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import ClientContext, Federation, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import client_data
from fedjax_pfl.networks import ResNet9
from tests import cases, tiny
from tests.algorithms.served import after_rounds, served

KEY, T = jax.random.key(3), jnp.int32(0)
N = tiny.CLIENTS
ALL_CLIENTS = jnp.ones(N, bool)


def make(training: Any = None, federation: Any = None, **settings: Any) -> Any:
    training = training or cases.training(keep_optimizer=False)
    federation = federation or tiny.federated()[1]
    return algorithms.factorized_fl(tiny.Net(), training, federation, **settings)


def scattered(algorithm: Any, noise: Any = jax.random.normal) -> State:
    """Returns an initial state with noise on what the server stores."""

    @jax.jit
    def init(key: jax.Array) -> State:
        state = algorithm.init(key)
        leaves, structure = jax.tree.flatten(state.rows)
        keys = jax.random.split(key, len(leaves))
        noisy = [leaf + noise(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
        return state._replace(rows=jax.tree.unflatten(structure, noisy))

    return jax.device_get(init(KEY))


def observed(algorithm: Any, state: State) -> dict[str, np.ndarray]:
    return jax.device_get(jax.jit(algorithm.observe)(state))


def sent(algorithm: Any, state: State, key: Any = KEY) -> Any:
    def send(state: State, key: Any, i: jax.Array) -> Any:
        return algorithm.send(state, ClientContext(i, None, T, key))

    return jax.device_get(jax.jit(jax.vmap(send, (None, None, 0)))(state, key, np.arange(N)))[
        "params"
    ]


@cache
def after_a_round() -> tuple[Any, State, Any]:
    """Returns beta with momentum and pruned traffic, and its state and log after a round."""
    algorithm = make(training=cases.training(keep_optimizer=True), sparsity=0.02, pruned="travel")
    return algorithm, *jax.device_get(after_rounds(algorithm, 1))


def reference(v: np.ndarray, tau: float, scale: float, minimum: int) -> np.ndarray:
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


@pytest.mark.parametrize(
    ("tau", "scale", "minimum"), [(0.0, 1.0, 1), (0.3, 20.0, 2), (0.95, 5.0, 3), (-1.0, 1.0, N)]
)
@pytest.mark.parametrize("share", ["u", "all"])
def test_mixing_equals_numpy(share, tau, scale, minimum):
    algorithm = make(
        share=share, tau=tau, scale=scale, minimum=minimum, sparsity=0.05, pruned="travel"
    )
    state = scattered(algorithm)
    rows = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state.rows["params"])
    omega = reference(rows["fc1"]["v"][..., 0], tau, scale, minimum)
    np.testing.assert_allclose(observed(algorithm, state)["weights"], omega, atol=1e-6)
    got = sent(algorithm, state)

    def mix(leaf):
        return np.tensordot(omega, leaf, 1)

    np.testing.assert_allclose(got["fc1"]["u"], mix(rows["fc1"]["u"]), atol=1e-5)
    if share == "u":  # the client's own v, and nothing else
        np.testing.assert_array_equal(got["fc1"]["v"], state.rows["params"]["fc1"]["v"])
        assert {layer: set(leaves) for layer, leaves in got.items()} == {"fc1": {"u", "v"}}
    else:
        np.testing.assert_allclose(got["fc1"]["v"], mix(rows["fc1"]["v"]), atol=1e-5)
        np.testing.assert_allclose(got["norm1"]["scale"], mix(rows["norm1"]["scale"]), atol=1e-5)
        mu = mix(rows["fc1"]["mu"])
        np.testing.assert_allclose(got["fc1"]["mu"], np.where(np.abs(mu) < 0.05, 0, mu), atol=1e-5)
        assert set(got) == {"fc1", "norm1"}


@pytest.mark.parametrize("share", ["u", "all"])
def test_the_classifier_is_factorised_and_stays_on_the_client(share):
    algorithm = make(share=share)
    state, log = after_rounds(algorithm, 2)
    head = state.clients.personal["params"]["fc2"]
    assert set(head) == {"u", "v", "mu", "bias"}
    assert all(len(np.unique(np.asarray(head[leaf])[:, 0])) == N for leaf in ("u", "v", "bias"))
    assert "fc2" not in state.rows["params"]
    assert "fc2" not in sent(algorithm, state)
    assert "fc2" not in {*log.down, *log.up}
    model = served(algorithm, state, 2)["params"]["fc2"]
    for leaf in ("u", "v", "bias"):
        np.testing.assert_array_equal(model[leaf], head[leaf][2])


def test_pruned_entries_are_not_counted_as_traffic():
    settings = {"sparsity": 0.3, "scale": 2.0}
    state = scattered(make(**settings))
    for pruned in ("travel", "evaluation"):
        algorithm, data = make(**settings, pruned=pruned), client_data(tiny.federated()[0], 0)
        client = trees.row(state.clients, 0)

        @jax.jit
        def ctx(
            state: State, algorithm: Any = algorithm, client: Any = client, data: Any = data
        ) -> Any:
            payload = algorithm.send(state, ClientContext(0, None, T, KEY))
            upload, trained, _, _ = algorithm.train(payload, client, ClientContext(0, data, T, KEY))
            traffic = algorithm.traffic(payload, upload)
            return payload, upload, trained, (traffic.down["fc1"], traffic.up["fc1"])

        *trees_of, traffic = ctx(state)
        down, up, trained = (np.abs(tree["params"]["fc1"]["mu"]) for tree in trees_of)
        assert ((trained == 0) | (trained >= 0.3)).all()
        assert ((down > 0) & (down < 0.3)).any() == (pruned == "evaluation")
        assert ((up > 0) & (up < 0.3)).any() == (pruned == "evaluation")
        vectors = tiny.FEATURES + tiny.HIDDEN  # u and v
        assert traffic == (4 * (vectors + (down >= 0.3).sum()), 4 * (vectors + (up >= 0.3).sum()))


def test_tau_above_1_is_the_identity_and_equal_v_give_the_mean():
    algorithm = make(tau=1.1, minimum=1, sparsity=0.0)
    state = scattered(algorithm)
    chex.assert_trees_all_close(sent(algorithm, state), state.rows["params"], rtol=1e-6)
    equal_v = scattered(make(sparsity=0.0, tau=0.99, scale=20.0), lambda key, shape: 0.0)
    steps = np.arange(N, dtype=np.float32)
    varied = jax.tree.map(lambda x: x + steps.reshape(N, *(1,) * (x.ndim - 1)), equal_v.rows)
    varied["params"]["fc1"]["v"] = equal_v.rows["params"]["fc1"]["v"]
    got = sent(make(sparsity=0.0, tau=0.99, scale=20.0), equal_v._replace(rows=varied))
    expected = jax.tree.map(lambda x: np.broadcast_to(x.mean(0), x.shape), varied["params"])
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)


def test_mixing_is_equivariant_to_permutations_of_clients():
    algorithm = make(tau=0.2, scale=3.0, minimum=2, sparsity=0.0)
    state, order = scattered(algorithm), np.array([3, 1, 5, 0, 4, 2])
    moved = state._replace(rows=jax.tree.map(lambda leaf: leaf[order], state.rows))
    sent_permuted, sent_plain = sent(algorithm, moved), sent(algorithm, state)
    chex.assert_trees_all_close(
        sent_permuted, jax.tree.map(lambda leaf: leaf[order], sent_plain), rtol=1e-4, atol=1e-6
    )


def test_other_matching_rules():
    base = {"sparsity": 0.0, "scale": 2.0, "peers": 2}
    state = scattered(make(**base))
    v = np.asarray(state.rows["params"]["fc1"]["v"])[..., 0]
    sigma = np.asarray(jax.jit(jax.vmap(cosine, (None, 0)))(v, np.arange(N)))
    worst = observed(make(**base, matching="worst"), state)["weights"]
    for i in range(N):
        others = [j for j in np.argsort(sigma[i]) if j != i]
        assert set(np.flatnonzero(worst[i])) == {i, *others[:2]}
    np.testing.assert_allclose(worst.sum(1), 1, rtol=1e-5)
    algorithm = make(**base, matching="random")
    assert "weights" not in observed(algorithm, state)  # they are drawn, and not of the state
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
    order = jnp.array([0.5, 0.9, 0.1])
    likes, allowed = jnp.zeros(3, bool), jnp.array([True, False, True])
    got = candidates(order, 2, likes, allowed, 0)
    np.testing.assert_array_equal(got, [True, False, True])


@pytest.mark.parametrize("penalty", [True, False])
def test_gradient_of_the_penalty(penalty):
    """Without cross-entropy it is λ sign(μ), or 0 with penalty=False."""
    silent = cases.TASK._replace(loss=lambda o, y, c: 0.0 * o.sum(-1))
    training = local_training.sgd(learning_rate=0.5, batch_size=64, steps=1)
    federation = tiny.federated()[1]._replace(task=silent)
    algorithm = make(training, federation, share="u", sparsity=0.01, penalty=penalty)
    data, _ = tiny.federated()
    state = jax.device_get(jax.jit(algorithm.init)(KEY))
    client, rng = trees.row(state.clients, 0), np.random.default_rng(0)
    start = {}
    for layer in ("fc1", "fc2"):
        mu = rng.normal(size=client.personal["params"][layer]["mu"].shape).astype(np.float32)
        mu[0, 0] = 0.0
        start[layer] = client.personal["params"][layer]["mu"] = mu

    @jax.jit
    def ctx(state: State, client: Any, data: Any) -> Any:
        payload = algorithm.send(state, ClientContext(0, None, T, KEY))
        return payload, algorithm.train(
            payload, client, ClientContext(0, client_data(data, 0), T, KEY)
        )

    payload, (_, trained, after, _) = ctx(State((), state.rows, ()), client, data)
    for layer, mu in start.items():
        got = np.asarray(after.personal["params"][layer]["mu"])
        np.testing.assert_allclose(got, mu - penalty * 0.5 * 0.01 * np.sign(mu), atol=1e-6)
        # The client keeps what is pruned for evaluation.
        expected = np.where(np.abs(got) < np.float32(0.01), np.float32(0), got)
        np.testing.assert_array_equal(trained["params"][layer]["mu"], expected)
    np.testing.assert_array_equal(trained["params"]["fc1"]["v"], payload["params"]["fc1"]["v"])


def test_traffic_by_hand():
    """Alpha: u in both directions, v* up. Beta: all layers except the head, nonzero μ only."""
    _, log = after_rounds(make(share="u"), 1)
    u, v, norm = 4 * tiny.FEATURES, 4 * tiny.HIDDEN, 2 * 4 * tiny.HIDDEN
    assert int(sum(x.ravel()[0] for x in map(np.asarray, log.down.values()))) == u
    assert int(sum(x.ravel()[0] for x in map(np.asarray, log.up.values()))) == u + v
    _, state, log = after_a_round()
    uploaded = np.asarray(collect_mu(state.rows)[0]).reshape(N, -1)
    assert not ((np.abs(uploaded) > 0) & (np.abs(uploaded) < 0.02)).any()
    up = sum(np.asarray(x).ravel() for x in log.up.values())
    np.testing.assert_array_equal(up, u + v + norm + 4 * (uploaded != 0).sum(1))
    assert 0 < (uploaded != 0).sum() < uploaded.size


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
    # The paper prints 0.32, which leaves 7,300 numbers in each transfer besides these.
    assert round(20 * (49 * down + 50 * up) / 1e9, 3) == 0.263


def test_batch_statistics_stay_on_the_client():
    _, state, _ = after_a_round()
    mean = np.asarray(state.clients.personal["batch_stats"]["norm1"]["mean"])
    assert len(np.unique(mean[:, 0])) == N
    assert "batch_stats" not in state.rows


def test_a_phase_starts_only_from_the_same_settings():
    def shapes(algorithm: Any, start: Any = None) -> State:
        return jax.eval_shape(lambda: algorithm.init(KEY, start))

    fedavg_state = shapes(cases.make("fedavg", tiny.federated()[1]))
    for start in (fedavg_state, shapes(make(share="u")), shapes(make(rank=2))):
        with pytest.raises(UsageError, match="same settings"):
            shapes(make(), start)


def test_a_later_phase_continues_factors_and_resets_momentum():
    with_momentum, state, _ = after_a_round()
    for algorithm in (with_momentum, make()):
        later = jax.device_get(jax.jit(algorithm.init)(KEY, state))
        chex.assert_trees_all_equal(later.rows, state.rows)
        chex.assert_trees_all_equal(later.clients.personal, state.clients.personal)
        assert not any(leaf.any() for leaf in jax.tree.leaves(later.clients.momentum))


def test_pfedpara_shares_one_pair_of_factors():
    federation = tiny.federated()[1]
    state, log = after_rounds(cases.make("pfedpara", federation), 2)
    shared, personal = state.server["params"], state.clients.personal["params"]
    assert set(shared["fc1"]) == {"x1", "y1"}
    assert set(personal["fc1"]) == {"x2", "y2"}
    assert len(np.unique(np.asarray(personal["fc1"]["x2"])[:, 0, 0])) == N
    assert set(shared) == {"fc1", "fc2", "norm1"}
    assert int(np.asarray(log.up["fc1"]).ravel()[0]) == 4 * 3 * (tiny.FEATURES + tiny.HIDDEN)
