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
from fedjax_pfl.networks.zero_head import ZeroHead
from tests import cases, tiny
from tests.algorithms.served import after_rounds, served

KEY, T = jax.random.key(3), jnp.int32(0)
N = tiny.CLIENTS
EVERYONE = jnp.ones(N, bool)


def make(training: Any = None, federation: Any = None, **own: Any) -> Any:
    training = training or cases.training(keep_optimizer=False)
    federation = federation or tiny.federated()[1]
    return algorithms.factorized_fl(tiny.Net(), training, federation, **own)


def scattered(made: Any, own: Any = jax.random.normal) -> State:
    """Returns an initial state with noise on what the server stores."""

    @jax.jit
    def init(key: jax.Array) -> State:
        state = made.init(key)
        leaves, form = jax.tree.flatten(state.rows)
        keys = jax.random.split(key, len(leaves))
        noisy = [leaf + own(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
        return state._replace(rows=jax.tree.unflatten(form, noisy))

    return jax.device_get(init(KEY))


def observed(made: Any, state: State) -> dict[str, np.ndarray]:
    return jax.device_get(jax.jit(made.observe)(state))


def sent(made: Any, state: State, key: Any = KEY) -> Any:
    def send(state: State, key: Any, i: jax.Array) -> Any:
        return made.send(state, ClientContext(i, None, T, key))

    return jax.device_get(jax.jit(jax.vmap(send, (None, None, 0)))(state, key, np.arange(N)))[
        "params"
    ]


@cache
def after_a_round() -> tuple[Any, State, Any]:
    """Returns beta with momentum and pruned traffic, and its state and log after a round."""
    made = make(training=cases.training(keep_optimizer=True), sparsity=0.02, pruned="travel")
    return made, *jax.device_get(after_rounds(made, 1))


def reference(v: np.ndarray, tau: float, scale: float, minimum: int) -> np.ndarray:
    """Computes ω [N, N] with loops, from (4) and (5)."""
    n = len(v)
    omega = np.zeros((n, n))
    for k in range(n):
        sigma = {
            i: v[k] @ v[i] / np.linalg.norm(v[k]) / np.linalg.norm(v[i]) for i in range(n) if i != k
        }
        others = sorted(sigma, key=lambda i: -sigma[i])
        chosen = {i for i in others if sigma[i] >= tau} | set(others[: minimum - 1])
        whole = {k: 1.0, **{i: sigma[i] for i in chosen}}
        total = sum(np.exp(scale * s) for s in whole.values())
        for i, s in whole.items():
            omega[k, i] = np.exp(scale * s) / total
    return omega


@pytest.mark.parametrize(
    ("tau", "scale", "minimum"), [(0.0, 1.0, 1), (0.3, 20.0, 2), (0.95, 5.0, 3), (-1.0, 1.0, N)]
)
@pytest.mark.parametrize("share", ["u", "all"])
def test_mixing_equals_numpy(share, tau, scale, minimum):
    made = make(share=share, tau=tau, scale=scale, minimum=minimum, sparsity=0.05, pruned="travel")
    state = scattered(made)
    rows = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state.rows["params"])
    omega = reference(rows["fc1"]["v"][..., 0], tau, scale, minimum)
    np.testing.assert_allclose(observed(made, state)["weights"], omega, atol=1e-6)
    got = sent(made, state)

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
def test_the_classifier_is_factorised_and_never_leaves_its_client(share):
    made = make(share=share)
    state, log = after_rounds(made, 2)
    own = state.clients.own["params"]["fc2"]
    assert set(own) == {"u", "v", "mu", "bias"}
    assert all(len(np.unique(np.asarray(own[leaf])[:, 0])) == N for leaf in ("u", "v", "bias"))
    assert "fc2" not in state.rows["params"]
    assert "fc2" not in sent(made, state)
    assert "fc2" not in {*log.down, *log.up}
    model = served(made, state, 2)["params"]["fc2"]
    for leaf in ("u", "v", "bias"):
        np.testing.assert_array_equal(model[leaf], own[leaf][2])


def test_entries_pruned_for_evaluation_only_travel_unbilled():
    least = {"sparsity": 0.3, "scale": 2.0}
    state = scattered(make(**least))
    for pruned in ("travel", "evaluation"):
        made, data = make(**least, pruned=pruned), client_data(tiny.federated()[0], 0)
        client = trees.row(state.clients, 0)

        @jax.jit
        def ctx(state: State, made: Any = made, client: Any = client, data: Any = data) -> Any:
            payload = made.send(state, ClientContext(0, None, T, KEY))
            upload, trained, _, _ = made.train(payload, client, ClientContext(0, data, T, KEY))
            bill = made.traffic(payload, upload)
            return payload, upload, trained, (bill.down["fc1"], bill.up["fc1"])

        *trees_of, bill = ctx(state)
        down, up, trained = (np.abs(tree["params"]["fc1"]["mu"]) for tree in trees_of)
        assert ((trained == 0) | (trained >= 0.3)).all()
        assert ((down > 0) & (down < 0.3)).any() == (pruned == "evaluation")
        assert ((up > 0) & (up < 0.3)).any() == (pruned == "evaluation")
        others = tiny.FEATURES + tiny.HIDDEN  # u and v
        assert bill == (4 * (others + (down >= 0.3).sum()), 4 * (others + (up >= 0.3).sum()))


def test_a_threshold_above_one_is_the_identity_and_equal_v_the_plain_mean():
    made = make(tau=1.1, minimum=1, sparsity=0.0)
    state = scattered(made)
    chex.assert_trees_all_close(sent(made, state), state.rows["params"], rtol=1e-6)
    alike = scattered(make(sparsity=0.0, tau=0.99, scale=20.0), lambda key, shape: 0.0)
    steps = np.arange(N, dtype=np.float32)
    vary = jax.tree.map(lambda x: x + steps.reshape(N, *(1,) * (x.ndim - 1)), alike.rows)
    vary["params"]["fc1"]["v"] = alike.rows["params"]["fc1"]["v"]
    got = sent(make(sparsity=0.0, tau=0.99, scale=20.0), alike._replace(rows=vary))
    wanted = jax.tree.map(lambda x: np.broadcast_to(x.mean(0), x.shape), vary["params"])
    chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_permuting_the_clients_permutes_what_they_get():
    made = make(tau=0.2, scale=3.0, minimum=2, sparsity=0.0)
    state, order = scattered(made), np.array([3, 1, 5, 0, 4, 2])
    moved = state._replace(rows=jax.tree.map(lambda leaf: leaf[order], state.rows))
    there, here = sent(made, moved), sent(made, state)
    chex.assert_trees_all_close(
        there, jax.tree.map(lambda leaf: leaf[order], here), rtol=1e-4, atol=1e-6
    )


def test_worst_random_and_no_matching():
    base = {"sparsity": 0.0, "scale": 2.0, "peers": 2}
    state = scattered(make(**base))
    v = np.asarray(state.rows["params"]["fc1"]["v"])[..., 0]
    sigma = np.asarray(jax.jit(jax.vmap(cosine, (None, 0)))(v, np.arange(N)))
    worst = observed(make(**base, matching="worst"), state)["weights"]
    for i in range(N):
        others = [j for j in np.argsort(sigma[i]) if j != i]
        assert set(np.flatnonzero(worst[i])) == {i, *others[:2]}
    np.testing.assert_allclose(worst.sum(1), 1, rtol=1e-5)
    made = make(**base, matching="random")
    assert "weights" not in observed(made, state)  # they are drawn, and not of the state
    u = [np.asarray(sent(made, state, key)["fc1"]["u"]) for key in jax.random.split(KEY, 2)]
    assert (np.abs(u[0] - u[1]).max(axis=(1, 2)) > 1e-4).sum() > 2  # other peers with another key
    counts = tiny.TRAIN / tiny.TRAIN.sum()
    mean = observed(make(**base, matching="none"), state)["weights"]
    np.testing.assert_allclose(mean, np.tile(counts, (N, 1)), rtol=1e-5)


def test_novel_clients_weigh_nothing_for_others():
    federation = tiny.federated()[1]._replace(active=np.arange(N) < 4)
    made = make(federation=federation, minimum=3)
    omega = observed(made, scattered(made))["weights"]
    assert not omega[:4, 4:].any()
    assert (omega[5, 5] > 0, omega[5, 4]) == (True, 0)
    order = jnp.array([0.5, 0.9, 0.1])
    likes, allowed = jnp.zeros(3, bool), jnp.array([True, False, True])
    got = candidates(order, 2, likes, allowed, 0)
    np.testing.assert_array_equal(got, [True, False, True])


@pytest.mark.parametrize("penalty", [True, False])
def test_without_a_loss_mu_moves_by_the_sign(penalty):
    """dLoss/dμ = λ sign(μ) without cross-entropy, and 0 as in the authors' code."""
    silent = cases.TASK._replace(loss=lambda o, y, c: 0.0 * o.sum(-1))
    training = local_training.sgd(learning_rate=0.5, batch_size=64, steps=1)
    federation = tiny.federated()[1]._replace(task=silent)
    made = make(training, federation, share="u", sparsity=0.01, penalty=penalty)
    data, _ = tiny.federated()
    state = jax.device_get(jax.jit(made.init)(KEY))
    client, rng = trees.row(state.clients, 0), np.random.default_rng(0)
    start = {}
    for layer in ("fc1", "fc2"):
        mu = rng.normal(size=client.own["params"][layer]["mu"].shape).astype(np.float32)
        mu[0, 0] = 0.0
        start[layer] = client.own["params"][layer]["mu"] = mu

    @jax.jit
    def ctx(state: State, client: Any, data: Any) -> Any:
        payload = made.send(state, ClientContext(0, None, T, KEY))
        return payload, made.train(payload, client, ClientContext(0, client_data(data, 0), T, KEY))

    payload, (_, trained, after, _) = ctx(State((), state.rows, ()), client, data)
    for layer, mu in start.items():
        got = np.asarray(after.own["params"][layer]["mu"])
        np.testing.assert_allclose(got, mu - penalty * 0.5 * 0.01 * np.sign(mu), atol=1e-6)
        # The client keeps what is pruned for evaluation.
        wanted = np.where(np.abs(got) < np.float32(0.01), np.float32(0), got)
        np.testing.assert_array_equal(trained["params"][layer]["mu"], wanted)
    np.testing.assert_array_equal(trained["params"]["fc1"]["v"], payload["params"]["fc1"]["v"])


def test_traffic_by_hand():
    """Alpha: u, and v of the last body layer up. Beta: all but the head, with nonzero μ only."""
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
    plain = ResNet9(conv="xla")
    image = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
    parameters = trees.size(jax.eval_shape(plain.init, KEY, image))
    counters = 8  # PyTorch counts batches, once for each BatchNorm
    assert round(20 * 99 * 4 * (parameters + counters) / 1e9, 2) == 20.39
    federation = Federation(
        np.full(20, 4), (32, 32, 3), 10, np.ones(20, bool), np.zeros(20, np.int32)
    )
    made = algorithms.factorized_fl(plain, cases.training(), federation, share="u")
    rows = {"params": jax.eval_shape(made.init, KEY).rows["params"]}
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows)
    bill = made.traffic(one, one)
    down, up = sum(bill.down.values()), sum(bill.up.values())
    u = 4 * (7 * 9 + 25)  # seven 3×3 windows and a 5×5 one
    assert (down, up) == (u, u + 4 * 65_536)
    # The paper prints 0.32, which leaves 7,300 numbers in each transfer besides these.
    assert round(20 * (49 * down + 50 * up) / 1e9, 3) == 0.263


def test_batch_statistics_stay_at_home():
    _, state, _ = after_a_round()
    mean = np.asarray(state.clients.own["batch_stats"]["norm1"]["mean"])
    assert len(np.unique(mean[:, 0])) == N
    assert "batch_stats" not in state.rows


def test_bad_settings_are_one_line():
    for own, word in (
        ({"share": "v"}, "all or u"),
        ({"matching": "best"}, "similar, random, worst or none"),
        ({"layout": "io"}, "kernel, mixed or oihw"),
        ({"minimum": 0}, "choose 1 to 6"),
        ({"minimum": N + 1}, "choose 1 to 6"),
        ({"matching": "random", "peers": N}, "choose 1 to 5"),
        ({"sparsity": -1.0}, "at least 0"),
        ({"rank": 0}, "at least 1"),
        ({"pruned": "never"}, "travel or evaluation"),
    ):
        with pytest.raises(UsageError, match=word):
            make(**own)

    with pytest.raises(UsageError, match="set zero_head=False"):
        algorithms.factorized_fl(ZeroHead(tiny.Net()), cases.training(), tiny.federated()[1])

    def shapes(made: Any, start: Any = None) -> State:
        return jax.eval_shape(lambda: made.init(KEY, start))

    plain = shapes(cases.make("fedavg", tiny.federated()[1]))
    for start in (plain, shapes(make(share="u")), shapes(make(rank=2))):
        with pytest.raises(UsageError, match="continue its own factors"):
            shapes(make(), start)


def test_a_later_phase_takes_factors_and_begins_its_momentum_anew():
    kept, state, _ = after_a_round()
    for made in (kept, make()):
        begun = jax.device_get(jax.jit(made.init)(KEY, state))
        chex.assert_trees_all_equal(begun.rows, state.rows)
        chex.assert_trees_all_equal(begun.clients.own, state.clients.own)
        assert not any(leaf.any() for leaf in jax.tree.leaves(begun.clients.momentum))


def test_pfedpara_shares_one_factor_and_keeps_the_other():
    federation = tiny.federated()[1]
    state, log = after_rounds(cases.make("pfedpara", federation), 2)
    shared, own = state.server["params"], state.clients.own["params"]
    assert set(shared["fc1"]) == {"x1", "y1"}
    assert set(own["fc1"]) == {"x2", "y2"}
    assert len(np.unique(np.asarray(own["fc1"]["x2"])[:, 0, 0])) == N
    assert set(shared) == {"fc1", "fc2", "norm1"}
    assert int(np.asarray(log.up["fc1"]).ravel()[0]) == 4 * 3 * (tiny.FEATURES + tiny.HIDDEN)
    with pytest.raises(UsageError, match="choose 0 to 1"):
        algorithms.pfedpara(tiny.Net(), cases.training(), federation, gamma=2.0)
