"""FedMN against numbers worked out apart from it."""

from functools import cache
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, State, Visit
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import client_data
from fedjax_pfl.networks import correlation, router
from fedjax_pfl.networks.modular import Modular, blocks
from tests import cases, rules, tiny

KEY = jax.random.key(3)
LAYOUT = (2, 2, 2)
SMALL = {"layout": LAYOUT, "width": 4, "hidden": 5, "x_size": 3, "y_size": 2}
SMALL |= {"dropout": 0.0, "embed": "concatenated", "encoders": "always"}
NAMES = blocks(LAYOUT)
RATE, CLIENT = 0.5, 3
# Full batches, in any order the same: one step where gates are soft, two where they are hard.
TRAINING = {
    "soft": local_training.sgd(learning_rate=RATE, batch_size=16, epochs=1, begin=20, rounds=5),
    "hard": local_training.sgd(learning_rate=RATE, batch_size=16, steps=2),
}


def make(training: local_training.Training, **own: Any) -> Algorithm:
    federation = tiny.federated()[1]
    return algorithms.fedmn(tiny.Net(), cases.TASK, training, federation, **{**SMALL, **own})


def logit(p: Any) -> np.ndarray:
    p = np.asarray(p)
    with np.errstate(divide="ignore"):
        return np.log(p) - np.log1p(-p)


@cache
def plain(gates: str) -> tuple[Algorithm, Any, Any]:
    """An algorithm without momentum, its first state, and client 3's compiled `train`."""
    algorithm = make(TRAINING[gates], gates=gates)
    state, data = jax.jit(algorithm.init)(KEY), client_data(tiny.federated()[0], CLIENT)
    client = trees.row(state.clients, CLIENT)
    train = jax.jit(
        lambda payload, t, key: algorithm.train(payload, client, Visit(0, data, t, key))
    )
    return algorithm, state, train


def router_of(tree: Any) -> Any:
    return {name: layer for name, layer in tree["params"].items() if name.startswith("router")}


def replaced(payload: Any, layers: Any) -> Any:
    return {**payload, "params": {**payload["params"], **layers}}


def test_the_first_routers_gradient_is_that_of_finite_differences():
    """Soft gates: the loss that a client reports, as a function of the router that it was sent."""
    _, state, train = plain("soft")
    payload, t = state.server, jnp.int32(20)
    psi = router_of(payload)
    psi, upload = jax.device_get((psi, train(payload, t, KEY)[0]))
    gradient = jax.tree.map(lambda old, new: (old - new) / RATE, psi, router_of(upload))

    def square(tree: Any) -> float:
        return sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(tree))

    for layer in ("router_encoder", "router_labels", "router_gates"):
        assert square(gradient[layer]) > 0
    rng = np.random.default_rng(0)
    noise = jax.tree.map(lambda g: rng.normal(size=g.shape).astype(np.float32), gradient)
    for direction in (gradient, noise):
        size = np.float32(np.sqrt(square(direction)))
        step = jax.tree.map(lambda d, size=size: d / size, direction)
        pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(step), strict=True)
        slope = sum(float(np.sum(g * d)) for g, d in pairs)
        loss = [
            float(train(replaced(payload, moved), t, KEY)[3]["loss"])
            for h in (0.05, -0.05)
            for moved in [jax.tree.map(lambda p, d, h=h: p + np.float32(h) * d, psi, step)]
        ]
        np.testing.assert_allclose((loss[0] - loss[1]) / 0.1, slope, rtol=0.02, atol=2e-5)


def test_the_routers_step_is_the_sum_over_an_epochs_batches():
    """Two full batches: gradients at both θ, through hard gates, at the router that was sent."""
    _, state, train = plain("hard")
    payload, data = state.server, client_data(tiny.federated()[0], CLIENT)
    upload, _, client, _ = train(payload, jnp.int32(0), KEY)
    # The noise, read off soft gates that were drawn with the same key, at τ = 1.
    soft = jax.device_get(plain("soft")[2](payload, jnp.int32(20), KEY)[2])
    noise = logit(soft.gates) - logit(soft.pi)
    data = jax.device_get(data)
    rows = data.train.rows[: int(data.train.size)]
    x, y = data.x[rows], data.y[rows]
    network, made = Modular(tiny.Net(), 3, LAYOUT, 4, 5, 0.0), router.Router(tiny.Net(), 10, 3, 2)

    def loss(theta: Any, psi: Any, seen: Any) -> Any:
        variables = {"params": psi, "batch_stats": payload["batch_stats"]}
        z = jnp.mean(made.apply(variables, x, jax.nn.one_hot(y, 3)), 0)
        drawn = jax.nn.sigmoid(z + noise)
        gates = client.gates + (drawn - jax.lax.stop_gradient(drawn))
        variables = {"params": theta, "batch_stats": seen}
        out, new = network.apply(variables, x, gates, train=True, mutable=["batch_stats"])
        return jnp.mean(cases.TASK.loss(out, y, None)), new["batch_stats"]

    psi = router_of(payload)
    theta = {name: layer for name, layer in payload["params"].items() if name not in psi}
    seen = {name: payload["batch_stats"][name] for name in ("encoder1", "encoder2")}
    gradient = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    theta, psi = jax.device_get((theta, psi))
    sums = jax.tree.map(np.zeros_like, psi)
    for _ in range(2):
        (d_theta, d_psi), seen = jax.device_get(gradient(theta, psi, seen))
        theta = jax.tree.map(lambda p, g: p - RATE * g, theta, d_theta)
        sums = jax.tree.map(np.add, sums, d_psi)
    assert any(leaf.any() for leaf in jax.tree.leaves(sums))
    psi = jax.tree.map(lambda p, g: p - RATE * g, psi, sums)
    chex.assert_trees_all_close(upload["params"], {**theta, **psi}, rtol=1e-4, atol=1e-6)


def test_temperature_and_noise():
    """With one key the noise is the same in every round; τ falls from 1 to .1 within the phase."""
    _, state, train = plain("soft")
    seen = [train(state.server, jnp.int32(t), KEY)[2] for t in (20, 22, 24)]
    tau = (1, 0.1**0.5, 0.1)
    drawn = [logit(c.gates) * one - logit(c.pi) for c, one in zip(seen, tau, strict=True)]
    told = np.abs(drawn[0]) < 1.4  # the others are too close to 0 or 1 at the end
    assert told.sum() > 4
    np.testing.assert_allclose(drawn[1][told], drawn[0][told], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(drawn[2][told], drawn[0][told], rtol=2e-2, atol=2e-2)
    other = train(state.server, jnp.int32(20), jax.random.key(4))[2]
    assert (logit(other.gates) - logit(other.pi) != drawn[0]).all()
    np.testing.assert_array_equal(other.pi, seen[0].pi)


def test_an_inactive_block_neither_travels_nor_changes():
    """With momentum that is there already, decay, and two epochs with gates of their own."""
    algorithm, data = make(cases.training()), tiny.federated()[0]
    state, ids = jax.jit(algorithm.init)(KEY), jnp.arange(tiny.CLIENTS)
    moving = jax.tree.map(lambda leaf: leaf + 0.01, jax.device_get(state.clients.momentum))
    state = state._replace(clients=state.clients._replace(momentum=moving))

    def one(i: jax.Array, client: Any) -> Any:
        key = jax.random.fold_in(KEY, i)
        return algorithm.train(
            state.server, client, Visit(i, client_data(data, i), jnp.int32(0), key)
        )

    uploads, _, clients, _ = jax.jit(jax.vmap(one))(ids, state.clients)
    active = np.asarray(uploads["active"])
    assert (~active).sum() > 2
    assert active.any(0).all()

    traces, before = (optax.tree.get(c.momentum[0], "trace") for c in (clients, state.clients))
    for b, name in enumerate(NAMES):
        here = active[:, b]
        for new, old in (
            (uploads["params"][name], state.server["params"][name]),
            (traces[name], before[name]),
        ):
            for leaf, kept in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
                changed = np.not_equal(leaf, kept).reshape(tiny.CLIENTS, -1)
                np.testing.assert_array_equal(changed.any(1), here)
    bytes_of = trees.bytes_per_layer(state.server)
    traffic = jax.jit(algorithm.traffic)
    for k in range(tiny.CLIENTS):
        bill = traffic(state.server, trees.row(jax.device_get(uploads), k))
        wanted = {
            n: size for n, size in bytes_of.items() if n not in NAMES or active[k, NAMES.index(n)]
        }
        for side in bill:
            assert {n: int(amount) for n, amount in side.items() if int(amount)} == wanted


def test_blocks_that_are_not_fetched_do_not_matter():
    """With other numbers in them all else comes out the same, bit for bit."""
    _, state, train = plain("hard")
    for seed in range(4):
        key = jax.random.key(seed)
        upload = train(state.server, jnp.int32(0), key)[0]
        away = [n for n, here in zip(NAMES, upload["active"], strict=True) if not here]
        server = jax.device_get(state.server["params"])
        other = {n: jax.tree.map(lambda p: p + 3, server[n]) for n in away}
        again = train(replaced(state.server, other), jnp.int32(0), key)[0]
        kept = {n: upload["params"][n] for n in upload["params"] if n not in away}
        chex.assert_trees_all_equal({n: again["params"][n] for n in kept}, kept)
        chex.assert_trees_all_equal({n: again["params"][n] for n in away}, other)
        chex.assert_trees_all_equal(again["batch_stats"], upload["batch_stats"])


def test_aggregation_in_numpy():
    """Σ n a θ / Σ n a for each block; one that nobody used stays, bit for bit; one was absent."""
    (algorithm, state, _), n = plain("hard"), tiny.TRAIN
    server, rng = state.server, np.random.default_rng(0)
    ids = np.array([4, 0, tiny.CLIENTS, 5])  # the third did not arrive
    active = np.array([[1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1]], bool)

    uploads = jax.tree.map(lambda x: rng.normal(size=(4, *x.shape)).astype(np.float32), server)
    uploads = rules.where(ids < tiny.CLIENTS, uploads, jax.tree.map(np.zeros_like, uploads))
    uploaded = {**uploads, "active": active}

    @jax.jit
    def receive(server: Any, uploaded: Any) -> Any:
        here = jnp.asarray(ids < tiny.CLIENTS)
        cohort = tiny.cohort(n, jnp.asarray(ids), here, (), uploaded, 0)
        return algorithm.receive(State(server, (), ()), cohort)

    got, _ = receive(server, uploaded)
    weights = np.array([n[4], n[0], 0, n[5]], float)
    got, server, uploads = (trees.layers(jax.device_get(one)) for one in (got, server, uploads))
    for name, leaves in got.items():
        share = weights * (active[:, NAMES.index(name)] if name in NAMES else 1)
        if not share.any():
            chex.assert_trees_all_equal(leaves, server[name])
            continue
        for new, old in zip(leaves, uploads[name], strict=True):
            wanted = np.tensordot(share / share.sum(), old, 1)
            np.testing.assert_allclose(new, wanted, rtol=1e-5, atol=1e-6)
    assert not active[:, 2].any()


def test_evaluation_opens_the_gates_above_one_half():
    algorithm, state, train = plain("hard")
    data, client = client_data(tiny.federated()[0], CLIENT), trees.row(state.clients, CLIENT)
    serve = jax.jit(
        lambda server: algorithm.personal(
            State(server, (), ()), client, Visit(CLIENT, data, 0, KEY)
        )
    )
    pi = train(state.server, jnp.int32(0), KEY)[2].pi
    pi, gates = jax.device_get((pi, serve(state.server)["gates"]))
    decide = jax.jit(lambda z: router.decide(z, LAYOUT))
    np.testing.assert_array_equal(gates, decide(logit(pi)))
    assert ((pi > 0.5) <= gates).all()
    layer = jax.device_get(state.server["params"]["router_gates"])
    closed = {"router_gates": {**layer, "bias": layer["bias"] - 50}}
    served = serve(replaced(state.server, closed))
    assert int(served["gates"].sum()) == 3  # one path through three layers
    assert (np.asarray(jax.jit(algorithm.predict)(served, data.x[:4])) != 0).all()


def test_a_start_fills_every_encoder_and_copies_part():
    algorithm, fresh, train = plain("hard")
    federation = tiny.federated()[1]
    fedavg = algorithms.fedavg(tiny.Net(), cases.TASK, cases.training(), federation)
    known = jax.device_get(jax.jit(fedavg.init)(KEY))
    known = known._replace(server=jax.tree.map(lambda leaf: leaf + 0.25, known.server))
    server = jax.device_get(jax.jit(algorithm.init)(KEY, known)).server
    body = trees.split(known.server, {"fc2"})[1]
    for name in ("params", "batch_stats"):
        for slot in ("encoder1", "encoder2", "router_encoder"):
            there = {layer: server[name][slot][layer] for layer in body[name]}
            chex.assert_trees_all_equal(there, body[name])
    for layer in (*NAMES, "router_gates", "router_labels"):
        chex.assert_trees_all_equal(server["params"][layer], fresh.server["params"][layer])
    trained = train(server, jnp.int32(0), KEY)[0]["params"]
    one, other = (trained[e]["fc1"]["kernel"] for e in ("encoder1", "encoder2"))
    assert np.abs(np.subtract(one, other)).max() > 1e-3
    own = fresh._replace(server=server)
    chex.assert_trees_all_equal(jax.jit(algorithm.init)(KEY, own).server, server)
    with pytest.raises(UsageError, match="same network"):
        algorithm.init(KEY, known._replace(server={"params": {}}))


@pytest.mark.slow("rounds of its own")
def test_correlations_give_routes_that_only_their_gates_learn_and_travel_once():
    """φx and φy stay bit for bit, and are billed with the first visit."""
    training, data = TRAINING["hard"]._replace(rounds=5), tiny.federated()[0]
    algorithm = make(training, embed="correlation")
    state = jax.jit(algorithm.init)(KEY)
    client, own = trees.row(state.clients, CLIENT), client_data(data, CLIENT)
    visit, train = Visit(CLIENT, own, jnp.int32(0), KEY), jax.jit(algorithm.train)
    done = train(state.server, client, visit)
    seen = done.upload["batch_stats"][correlation.STATISTICS]
    made = correlation.Correlation(tiny.Net(), LAYOUT, tiny.CLIENTS, 3)
    variables = {"params": router_of(state.server), "batch_stats": state.server["batch_stats"]}
    sign = correlation.look(made, variables, own, 3, 16)
    np.testing.assert_allclose(seen["mean"], sign.r, rtol=1e-5, atol=1e-6)  # wholly its own, once
    # In the first round a client is the mean of all that it knows of: all take the route of b.
    b = state.server["params"]["router_gates"]["bias"]
    first_route = jax.nn.sigmoid(correlation.balanced(b, LAYOUT))
    np.testing.assert_allclose(done.client.pi, first_route, rtol=1e-5)
    # Later others are known, and it goes its own way.
    square = jnp.outer(sign.r, sign.r)
    known = {"mean": sign.r / 2, "square": square, "chance": sign.chance / 40}
    server = {
        **state.server,
        "batch_stats": {**state.server["batch_stats"], correlation.STATISTICS: known},
    }
    visited = client._replace(pi=jnp.full(10, 0.5))
    learnt = train(server, visited, visit._replace(t=jnp.int32(1)))
    for name in router.EMBEDDINGS:
        chex.assert_trees_all_equal(learnt.upload["params"][name], server["params"][name])
    before, after = (tree["params"]["router_gates"]["kernel"] for tree in (server, learnt.upload))
    assert before.shape[0] == 3  # of φx, whatever φy's size is
    assert np.abs(after - before).max() > 0
    bills = {}
    for first in (True, False):
        bills[first] = jax.jit(algorithm.traffic)(server, {**done.upload, "first": first})
    assert bool(done.upload["first"])
    assert not bool(learnt.upload["first"])
    embeddings = trees.bytes_per_layer({k: server["params"][k] for k in router.EMBEDDINGS})
    embeddings = sum(embeddings.values()) + 4 * 2 * tiny.HIDDEN  # and BatchNorm's statistics
    down = {first: int(sum(bill.down.values())) for first, bill in bills.items()}
    assert down[True] - down[False] == embeddings
    assert int(sum(bills[True].up.values())) == down[False]


@pytest.mark.slow("rounds of its own")
def test_an_encoder_that_is_not_used_stays_where_encoders_are_fetched():
    """Bit for bit, with its momentum; it is not billed, and its average is over who used it."""
    algorithm = make(cases.training(), embed="correlation", encoders="fetched")
    data, names = tiny.federated()[0], blocks(LAYOUT, 0)
    state, ids = jax.jit(algorithm.init)(KEY), jnp.arange(tiny.CLIENTS)

    def one(i: jax.Array, client: Any) -> Any:
        visit = Visit(i, client_data(data, i), jnp.int32(0), jax.random.fold_in(KEY, i))
        return algorithm.train(state.server, client, visit)

    done = jax.jit(jax.vmap(one))(ids, state.clients)
    active = np.asarray(done.upload["active"])
    assert active.shape == (tiny.CLIENTS, 6)
    assert not active[:, :2].all()
    bytes_of = trees.bytes_per_layer(state.server)
    for j, name in enumerate(("encoder1", "encoder2")):

        def own(tree: Any, name: str = name) -> Any:
            return jax.tree.leaves([tree[part][name] for part in ("params", "batch_stats")])

        changed = np.concatenate(
            [
                (np.asarray(leaf) != np.asarray(before)[None]).reshape(tiny.CLIENTS, -1)
                for leaf, before in zip(own(done.upload), own(state.server), strict=True)
            ],
            1,
        )
        np.testing.assert_array_equal(changed.any(1), active[:, j])
        for k in range(tiny.CLIENTS):
            bill = algorithm.traffic(state.server, trees.row(done.upload, k)).up
            billed = sum(int(v) for layer, v in bill.items() if layer.startswith(name))
            whole = sum(v for layer, v in bytes_of.items() if layer.startswith(name))
            assert billed == whole * active[k, j]
    n, leaf = (
        np.asarray(tiny.TRAIN, float),
        lambda tree: tree["params"]["encoder1"]["fc1"]["kernel"],
    )
    cohort = tiny.cohort(n, ids, jnp.ones(tiny.CLIENTS, bool), state.server, done.upload, 0)
    share = n * active[:, names.index("encoder1")]
    mixed = np.tensordot(share / max(share.sum(), 1), np.asarray(leaf(done.upload)), 1)
    wanted = mixed if share.any() else leaf(state.server)
    np.testing.assert_allclose(
        leaf(algorithm.receive(state, cohort)[0]), wanted, rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow("rounds of its own")
def test_the_routers_rate_is_its_own():
    payload = plain("hard")[1].server
    own, steps = client_data(tiny.federated()[0], CLIENT), []
    visit = Visit(CLIENT, own, jnp.int32(0), KEY)
    for times in (1.0, 3.0):
        algorithm = make(TRAINING["hard"], router_rate=times)
        client = trees.row(plain("hard")[1].clients, CLIENT)
        upload = jax.device_get(jax.jit(algorithm.train)(payload, client, visit).upload)
        steps.append(jax.tree.map(np.subtract, router_of(upload), router_of(payload)))
        rest = {k: v for k, v in upload["params"].items() if k not in router_of(upload)}
        steps.append(rest)
    chex.assert_trees_all_equal(steps[1], steps[3])
    chex.assert_trees_all_close(
        jax.tree.map(lambda s: 3 * s, steps[0]), steps[2], rtol=1e-3, atol=1e-6
    )


def test_bad_settings_are_one_line():
    for own, word in (
        ({"layout": (3,)}, "two layers or more"),
        ({"layout": (2, 0, 2)}, "each with a block"),
        ({"gates": "open"}, "hard or soft"),
        ({"temperatures": (1.0, 0.0)}, "above 0"),
        ({"dropout": 1.0}, "below 1"),
        ({"embed": "sum"}, "concatenated or correlation"),
        ({"encoders": "never"}, "always or fetched"),
        ({"router_rate": -1.0}, "router_rate is -1.0; it must be above 0"),
    ):
        with pytest.raises(UsageError, match=word):
            make(TRAINING["hard"], **own)
