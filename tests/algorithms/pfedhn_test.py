"""pFedHN and pFedHN-PC against NumPy, and Proposition 1."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.pfedhn import hypernet
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import ClientContext, Federation
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks import MLP, LeNet
from fedjax_pfl.simulation.rounds import make_rounds
from tests import cases, tiny
from tests.algorithms import linear

KEY = jax.random.key(5)
T = jnp.int32(0)


def make(**settings: Any) -> Any:
    training, federation = cases.training(keep_optimizer=False), tiny.federated()[1]
    return algorithms.pfedhn(tiny.Net(), training, federation, width=4, depth=1, **settings)


def float64(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), jax.device_get(tree))


def norm(tree: Any) -> float:
    return float(np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(tree))))


# A linear network of two layers; four clients with four examples
RATE, ETA, CLIP, SERVER_CLIP, DECAY, SERVER_DECAY = 0.1, 0.2, 0.2, 0.09, 0.01, 0.05
CLIENTS, STEPS, ROUNDS = 4, 2, 4


def clipped(gradient: Any, most: float) -> Any:
    length = norm(gradient)
    return jax.tree.map(lambda leaf: leaf * (most / length if length > most else 1.0), gradient)


def sgd_step(params: Any, gradient: Any, moment: Any, rate: float, decay: float) -> Any:
    moment = jax.tree.map(lambda m, g, p: 0.9 * m + g + decay * p, moment, gradient, params)
    return jax.tree.map(lambda p, m: p - rate * m, params, moment), moment


def zeros(tree: Any) -> Any:
    return jax.tree.map(np.zeros_like, tree)


def forward(phi: Any, v: np.ndarray) -> Any:
    """Returns θ, with one hidden layer."""
    first = v @ phi["layer1"]["kernel"] + phi["layer1"]["bias"]
    last = np.maximum(first, 0) @ phi["layer2"]["kernel"] + phi["layer2"]["bias"]
    theta: dict[str, Any] = {}
    for name, shape in (("fc1", (3, 2)), ("fc2", (2, 1))):
        for leaf, leaf_shape in (("kernel", shape), ("bias", shape[1:])):
            head = phi.get(f"head_0_params_{name}_{leaf}")
            if head is not None:
                flat = last @ head["kernel"] + head["bias"]
                theta.setdefault(name, {})[leaf] = flat.reshape(leaf_shape)
    return theta


@pytest.mark.parametrize("name", ["pfedhn", "pfedhn_pc"])
def test_rounds_equal_numpy(name: str):
    """One client a round; both clippings are active; client 3 is held out."""
    rng = np.random.default_rng(1)
    xs, ys = rng.normal(size=(CLIENTS, 4, 3)), rng.normal(size=(CLIENTS, 4))
    data, federation = linear.federated(list(xs), list(ys))
    federation = federation._replace(active=np.arange(CLIENTS) < 3)
    sgd = {"learning_rate": RATE, "momentum": 0.9, "weight_decay": DECAY, "clip_norm": CLIP}
    training = local_training.sgd(**sgd, batch_size=4, steps=STEPS)
    settings = {"rate": ETA, "weight_decay": SERVER_DECAY, "clip_norm": SERVER_CLIP}
    network = linear.TwoLayers()
    make_method = getattr(algorithms, name)
    algorithm = make_method(network, training, federation, **settings, width=5, depth=1)
    rounds = make_rounds(algorithm, federation, cohort=1, max_rounds=ROUNDS)
    start = float64(rounds.init(KEY))
    state, (log,) = rounds.run(KEY, rounds.init(KEY), data, T, jnp.int32(ROUNDS))
    sampled = np.asarray(log.ids)[:, 0]
    assert len(set(sampled)) < ROUNDS  # a client continues with the momentum of its head
    assert start.rows.v.shape == (CLIENTS, 1 + CLIENTS // 4)

    phi, v = start.server.phi, start.rows.v
    phi_moment, v_moment = zeros(phi), zeros(v)
    heads = [trees.row(start.clients.personal, i).get("params", {}) for i in range(CLIENTS)]
    head_moments, lengths, server_lengths = zeros(heads), [], []
    for i in sampled:
        body = forward(phi, v[i])
        trained, moment = body, zeros(body)
        for _ in range(STEPS):
            gradient = linear.two_layer_gradient({**trained, **heads[i]}, xs[i], ys[i][:, None])
            of_body = {layer: gradient[layer] for layer in trained}
            of_head = {layer: gradient[layer] for layer in heads[i]}
            lengths.append(norm(of_body))
            trained, moment = sgd_step(trained, clipped(of_body, CLIP), moment, RATE, DECAY)
            heads[i], head_moments[i] = sgd_step(heads[i], of_head, head_moments[i], RATE, DECAY)
        change = jax.tree.map(np.subtract, body, trained)

        def agreement(phi: Any = phi, v: Any = v, i: int = i, change: Any = change) -> float:
            """Inner product of θ and the change, whose derivative is Jᵀ change."""
            return sum(jax.tree.leaves(jax.tree.map(np.vdot, forward(phi, v[i]), change)))

        gradient_all = linear.central_differences(agreement, {"phi": phi, "v": v})
        server_lengths.append(norm(gradient_all))
        gradient_all = clipped(gradient_all, SERVER_CLIP)
        phi, phi_moment = sgd_step(phi, gradient_all["phi"], phi_moment, ETA, SERVER_DECAY)
        v_moment[:3] = 0.9 * v_moment[:3] + gradient_all["v"][:3] + SERVER_DECAY * v[:3]
        v = v - ETA * v_moment
    assert max(lengths) > CLIP
    assert min(server_lengths) < SERVER_CLIP < max(server_lengths)

    got = jax.device_get(state)
    close = {"rtol": 1e-5, "atol": 1e-6}
    chex.assert_trees_all_close(float64(got.server.phi), phi, **close)
    chex.assert_trees_all_close(float64(got.rows.v), v, **close)
    np.testing.assert_array_equal(got.rows.v[3], start.rows.v[3].astype(np.float32))
    for i in range(CLIENTS):
        client = trees.row(got.clients, i)
        head = client.personal.get("params", {})
        chex.assert_trees_all_close(float64(head), heads[i], **close)
        served = algorithm.personalize(state, client, ClientContext(i, None, T, KEY))
        expected = {**forward(phi, v[i]), **heads[i]}
        chex.assert_trees_all_close(float64(served["params"]), expected, **close)
    assert set(log.up) == ({"fc1"} if name == "pfedhn_pc" else {"fc1", "fc2"})
    assert np.asarray(log.up["fc1"]).ravel().tolist() == [4 * 8] * ROUNDS


@pytest.mark.slow("two programs")
def test_gradients_are_added_or_averaged():
    """The sum at rate η equals the mean over six clients at 6 η, without clipping and decay."""
    settings = {"weight_decay": 0.0, "clip_norm": 1e9, "spectral_norm": True}
    adding, averaging = make(rate=0.01, **settings), make(rate=0.06, average=True, **settings)
    state, ids = jax.jit(adding.init)(KEY), jnp.arange(tiny.CLIENTS)
    send = jax.vmap(lambda i: adding.send(state, ClientContext(i, None, T, KEY)))
    payloads = jax.jit(send)(ids)
    uploads = jax.tree.map(lambda leaf: leaf + jnp.cos(7 * leaf), payloads)
    arrived = jnp.ones(tiny.CLIENTS, bool)
    cohort = tiny.cohort(tiny.TRAIN, ids, arrived, payloads, uploads, T)
    (server, rows), (mean_server, mean_rows) = (
        jax.jit(algorithm.receive)(state, cohort) for algorithm in (adding, averaging)
    )
    close = {"rtol": 1e-5, "atol": 1e-6}
    chex.assert_trees_all_close((server.phi, rows), (mean_server.phi, mean_rows), **close)
    expected = jax.jit(hypernet.advance)(server.phi, state.server.spectral)
    chex.assert_trees_all_close(server.spectral, expected, **close)
    first = state.server.spectral["layer1"]["vector"]
    assert (server.spectral["layer1"]["vector"] != first).any()


@pytest.mark.slow("programs of two networks")
def test_networks_of_two_sizes_share_one_step():
    """Gradients, clipping and step of a linear hypernetwork of two networks, in NumPy."""
    federation = tiny.federated()[1]._replace(groups=np.array([0, 1, 0, 1, 0, 1]))
    models = (MLP(tiny.CLASSES, ()), MLP(tiny.CLASSES, (2,)))
    settings = {"width": 0, "rate": 0.1, "weight_decay": 0.01, "clip_norm": 2.0, "embedding": 3}
    algorithm = algorithms.pfedhn(models, local_training.sgd(epochs=1), federation, **settings)
    state = jax.jit(algorithm.init)(KEY)
    ids = (jnp.array([2, 6]), jnp.array([1, 3]))  # client 0 or 4 is absent
    arrived = (jnp.array([True, False]), jnp.array([True, True]))

    def send(g):
        return jax.jit(jax.vmap(lambda i: algorithm.send[g](state, ClientContext(i, None, T, KEY))))

    payloads = tuple(send(g)(ids[g] % 6) for g in range(2))
    sizes = [trees.size(trees.row(p, 0)) for p in payloads]
    assert sizes == [6 * 3, 6 * 2 + 3 * 3]
    rng = np.random.default_rng(3)
    uploads = jax.tree.map(lambda x: x + jnp.asarray(rng.normal(size=x.shape), x.dtype), payloads)
    cohorts = tuple(
        tiny.cohort(tiny.TRAIN, *group, T)
        for group in zip(ids, arrived, payloads, uploads, strict=True)
    )
    server, rows = jax.jit(algorithm.receive)(state, cohorts)

    phi, v = float64(state.server.phi), float64(state.rows.v)
    gradient = {"phi": zeros(phi), "v": np.zeros_like(v)}
    for g, (client, slot) in ((0, (2, 0)), (1, (1, 0)), (1, (3, 1))):
        change = jax.tree.map(
            lambda a, b, k=slot: np.float64(a[k]) - np.float64(b[k]), payloads[g], uploads[g]
        )
        for layer, leaves in change["params"].items():
            for leaf, value in leaves.items():
                head = f"head_{g}_params_{layer}_{leaf}"
                gradient["phi"][head]["kernel"] += np.outer(v[client], value)
                gradient["v"][client] += phi[head]["kernel"] @ value.ravel()
    assert norm(gradient) > 2
    expected, _ = sgd_step({"phi": phi, "v": v}, clipped(gradient, 2.0), zeros(gradient), 0.1, 0.01)
    got = {"phi": float64(server.phi), "v": float64(rows.v)}
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


def test_traffic_on_cifar10():
    """PC sends the 121,182 parameters without the 850 of the head."""
    federation = Federation(np.full(50, 4), (32, 32, 3), 10, np.ones(50, bool), np.zeros(50, int))
    for name, expected in (("pfedhn", 121_182), ("pfedhn_pc", 120_332)):
        algorithm = getattr(algorithms, name)(LeNet(), cases.training(), federation)
        state = jax.eval_shape(algorithm.init, KEY)
        assert state.rows.v.shape == (50, 13)
        payload = jax.eval_shape(
            lambda s, m=algorithm: m.send(s, ClientContext(0, None, T, KEY)), state
        )
        traffic = algorithm.traffic(payload, payload)
        assert sum(traffic.down.values()) == sum(traffic.up.values()) == 4 * expected
        assert ("fc3" in traffic.up) == (name == "pfedhn")


def test_fixed_embeddings_are_the_shares_of_classes():
    counts = np.array([[1, 0, 0], [2, 2, 0], [0, 0, 1], [1, 1, 1], [0, 3, 0], [0, 0, 4]])
    federation = tiny.federated()[1]._replace(class_counts=counts)
    algorithm = algorithms.pfedhn(tiny.Net(), cases.training(), federation, fixed=True, width=4)
    state = algorithm.init(KEY)
    np.testing.assert_allclose(state.rows.v, counts / counts.sum(0), rtol=1e-6)
    assert set(jax.eval_shape(algorithm.observe, state)) == {"class_shares", "spread"}


def test_a_held_out_client_changes_no_fixed_embedding_of_others():
    """The last two are held out. No active client has the third class."""
    counts = np.array([[1, 0, 0], [2, 2, 0], [0, 0, 0], [1, 1, 0], [0, 3, 0], [8, 0, 4]])
    active = np.array([True, True, True, True, False, False])
    federation = tiny.federated()[1]._replace(class_counts=counts, active=active)
    algorithm = algorithms.pfedhn(tiny.Net(), cases.training(), federation, fixed=True, width=4)
    third = 1 / 3
    expected = [[0.25, 0], [0.5, 2 * third], [0, 0], [0.25, third], [0, 1], [2, 0]]
    v = algorithm.init(KEY).rows.v
    np.testing.assert_allclose(v, np.pad(expected, ((0, 0), (0, 1))), rtol=1e-6)


def test_starts_of_phases():
    """A phase continues the same hypernetwork. Only such a phase can freeze it."""
    algorithm = make()
    start = jax.eval_shape(algorithm.init, KEY)
    assert jax.eval_shape(algorithm.init, KEY, start) == start
    with pytest.raises(UsageError, match="can only start from one of the same"):
        jax.eval_shape(make(embedding=7).init, KEY, start)
    with pytest.raises(UsageError, match="has trained φ"):
        jax.eval_shape(make(frozen=True).init, KEY)
    shapes = jax.eval_shape(make(frozen=True, first_round=1).init, KEY)
    assert (shapes.server.phi, shapes.rows) == (start.server.phi, start.rows)


def test_proposition_1():
    """θ_i = W v_i on clients with XᵀX = m·I: W spans the first components of uncentred PCA."""
    rng = np.random.default_rng(4)
    d, k, clients, m = 5, 2, 6, 8
    basis = np.linalg.qr(rng.normal(size=(d, d)))[0]
    solutions = rng.normal(size=(clients, d)) * [3.0, 2.0, 0.6, 0.4, 0.2] @ basis.T + 0.5
    xs = [np.linalg.qr(rng.normal(size=(m, d)))[0] * m**0.5 for _ in range(clients)]
    data, federation = linear.federated(xs, [x @ w for x, w in zip(xs, solutions, strict=True)])
    training = local_training.sgd(learning_rate=0.5, batch_size=m, steps=1)
    settings = {"width": 0, "embedding": k, "rate": 0.02, "weight_decay": 0.0, "clip_norm": 1e9}
    algorithm = algorithms.pfedhn(linear.Linear(), training, federation, **settings)
    n_rounds = 1500
    rounds = make_rounds(algorithm, federation, cohort=clients, max_rounds=n_rounds)
    state, _ = rounds.run(KEY, rounds.init(KEY), data, T, jnp.int32(n_rounds))
    (head,) = state.server.phi.values()
    assert set(head) == {"kernel"}
    spanned = np.linalg.qr(np.asarray(head["kernel"], np.float64).T)[0]
    generated = np.asarray(state.rows.v) @ np.asarray(head["kernel"])

    def distance(points: np.ndarray) -> float:
        components = np.linalg.svd(points)[2][:k].T
        return float(np.linalg.norm(spanned @ spanned.T - components @ components.T, 2))

    assert distance(solutions) < 1e-3
    assert distance(solutions - solutions.mean(0)) > 0.05  # not the centred one
    left, sigma, right = np.linalg.svd(solutions, full_matrices=False)
    np.testing.assert_allclose(generated, left[:, :k] * sigma[:k] @ right[:k], atol=5e-3)
