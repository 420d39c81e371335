"""FedMN's training, traffic and evaluation; fedmn_round_test has a complete round."""

from functools import cache
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.fedmn import router
from fedjax_pfl.algorithms.fedmn.modular import Modular, blocks
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import client_data
from tests import cases, tiny

KEY = jax.random.key(3)
LAYOUT = (2, 2, 2)
SMALL = {"layout": LAYOUT, "width": 4, "hidden": 5, "x_size": 3, "y_size": 2, "dropout": 0.0}
NAMES = blocks(LAYOUT)
RATE, CLIENT = 0.5, 3
# Full batches, so that order does not matter: one step with soft gates, two with hard ones.
TRAINING = {
    "soft": local_training.sgd(learning_rate=RATE, batch_size=16, epochs=1),
    "hard": local_training.sgd(learning_rate=RATE, batch_size=16, steps=2),
}


def make(training: local_training.Training, **settings: Any) -> Algorithm:
    federation = tiny.federated()[1]
    return algorithms.fedmn(tiny.Net(), training, federation, **{**SMALL, **settings})


def logit(p: Any) -> np.ndarray:
    p = np.asarray(p)
    with np.errstate(divide="ignore"):
        return np.log(p) - np.log1p(-p)


@cache
def compiled(gates: str) -> tuple[Algorithm, Any, Any]:
    """Returns FedMN without momentum, its initial state, and client 3's compiled `train`."""
    schedule = {"rounds": 5, "first_round": 20} if gates == "soft" else {"rounds": 1}
    algorithm = make(TRAINING[gates], gates=gates, **schedule)
    state, data = jax.jit(algorithm.init)(KEY), client_data(tiny.federated()[0], CLIENT)
    client = trees.row(state.clients, CLIENT)
    train = jax.jit(
        lambda payload, t, key: algorithm.train(payload, client, ClientContext(0, data, t, key))
    )
    return algorithm, state, train


def replaced(payload: Any, layers: Any) -> Any:
    return {**payload, "params": {**payload["params"], **layers}}


def test_the_routers_step_is_the_sum_over_a_rounds_batches():
    """Two full batches: gradients at both θ, through hard gates, at the downloaded router."""
    _, state, train = compiled("hard")
    payload, data = state.server, client_data(tiny.federated()[0], CLIENT)
    upload, _, client, _ = train(payload, jnp.int32(0), KEY)
    # Soft gates of the same key at τ = 1 tell the noise.
    soft = jax.device_get(compiled("soft")[2](payload, jnp.int32(20), KEY)[2])
    noise = logit(soft.gates) - logit(soft.pi)
    data = jax.device_get(data)
    rows = data.train.rows[: int(data.train.size)]
    x, y = data.x[rows], data.y[rows]
    network = Modular(network=tiny.Net(), outputs=3, layout=LAYOUT, width=4, hidden=5, dropout=0.0)
    routing_network = router.Router(network=tiny.Net(), gates=10, x_size=3, y_size=2)

    def loss(theta: Any, psi: Any, stats: Any) -> Any:
        variables = {"params": psi, "batch_stats": payload["batch_stats"]}
        z = jnp.mean(routing_network.apply(variables, x, jax.nn.one_hot(y, 3)), 0)
        relaxed = jax.nn.sigmoid(z + noise)
        gates = client.gates + (relaxed - jax.lax.stop_gradient(relaxed))
        variables = {"params": theta, "batch_stats": stats}
        out, new = network.apply(variables, x, gates, train=True, mutable=["batch_stats"])
        return jnp.mean(cases.TASK.loss(out, y, None)), new["batch_stats"]

    psi = {n: layer for n, layer in payload["params"].items() if n.startswith("router")}
    theta = {name: layer for name, layer in payload["params"].items() if name not in psi}
    stats = {name: payload["batch_stats"][name] for name in ("encoder1", "encoder2")}
    gradient = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    theta, psi = jax.device_get((theta, psi))
    sums = jax.tree.map(np.zeros_like, psi)
    for _ in range(2):
        (d_theta, d_psi), stats = jax.device_get(gradient(theta, psi, stats))
        theta = jax.tree.map(lambda p, g: p - RATE * g, theta, d_theta)
        sums = jax.tree.map(np.add, sums, d_psi)
    assert any(leaf.any() for leaf in jax.tree.leaves(sums))
    psi = jax.tree.map(lambda p, g: p - RATE * g, psi, sums)
    chex.assert_trees_all_close(upload["params"], {**theta, **psi}, rtol=1e-4, atol=1e-6)


@pytest.mark.slow("a program of its own")
def test_temperature_and_noise():
    """One key gives the same noise in every round; τ falls from 1 to 0.1 within the phase."""
    _, state, train = compiled("soft")
    first, middle, last = (train(state.server, jnp.int32(t), KEY)[2] for t in (20, 22, 24))
    scaled = logit(first.gates)
    for client, tau in ((middle, 0.1**0.5), (last, 0.1)):
        np.testing.assert_array_equal(client.pi, first.pi)
        np.testing.assert_allclose(client.gates, 1 / (1 + np.exp(-scaled / tau)), atol=1e-4)
    changed = train(state.server, jnp.int32(20), jax.random.key(4))[2]
    assert (np.abs(logit(changed.gates) - scaled) > 1e-3).all()


def test_network_and_router_have_the_learning_rate_of_the_round():
    training = TRAINING["soft"]._replace(rate=lambda t: jnp.where(t == 0, RATE, 0.0))
    algorithm, data = make(training), client_data(tiny.federated()[0], CLIENT)
    _, state, _ = compiled("soft")
    client = trees.row(state.clients, CLIENT)
    train = jax.jit(
        lambda t: algorithm.train(state.server, client, ClientContext(0, data, t, KEY)).upload
    )
    params = state.server["params"]
    chex.assert_trees_all_equal(train(jnp.int32(1))["params"], params)
    moved = train(jnp.int32(0))["params"]
    for layer in ("encoder1", "router_gates"):
        assert all(
            map(np.any, jax.tree.leaves(jax.tree.map(jnp.subtract, moved[layer], params[layer])))
        )


@pytest.mark.slow("a program of its own")
def test_an_inactive_block_neither_changes_nor_is_sent():
    """Momentum from earlier rounds and weight decay would change it."""
    algorithm, data = make(cases.training()), tiny.federated()[0]
    state, ids = jax.jit(algorithm.init)(KEY), jnp.arange(tiny.CLIENTS)
    moving = jax.tree.map(lambda leaf: leaf + 0.01, jax.device_get(state.clients.momentum))
    state = state._replace(clients=state.clients._replace(momentum=moving))

    def train(i: jax.Array, client: Any) -> Any:
        key = jax.random.fold_in(KEY, i)
        return algorithm.train(
            state.server, client, ClientContext(i, client_data(data, i), jnp.int32(0), key)
        )

    uploads, _, clients, _ = jax.jit(jax.vmap(train))(ids, state.clients)
    active = np.asarray(uploads["active"])
    assert (~active).sum() > 2
    assert active.any(0).all()

    traces, before = (optax.tree.get(c.momentum[0], "trace") for c in (clients, state.clients))
    for b, name in enumerate(NAMES):
        for new, old in (
            (uploads["params"][name], state.server["params"][name]),
            (traces[name], before[name]),
        ):
            for leaf, unchanged in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
                changed = np.not_equal(leaf, unchanged).reshape(tiny.CLIENTS, -1)
                np.testing.assert_array_equal(changed.any(1), active[:, b])
    bytes_of = trees.bytes_per_layer(state.server)
    traffic = jax.jit(algorithm.traffic)
    for k in range(tiny.CLIENTS):
        counted = traffic(state.server, trees.row(jax.device_get(uploads), k))
        expected = {
            n: size for n, size in bytes_of.items() if n not in NAMES or active[k, NAMES.index(n)]
        }
        for side in counted:
            assert {n: int(amount) for n, amount in side.items() if int(amount)} == expected


def test_a_soft_gate_that_underflows_closes_its_block():
    """At τ = 0.1 a logit of −50 gives V = 0 exactly: the block is not trained, sent or averaged."""
    algorithm, state, train = compiled("soft")
    layer = jax.device_get(state.server["params"]["router_gates"])
    logits = np.full(10, 50.0, np.float32)
    logits[[2, 3, 5, 7]] = -50  # into and out of block2_2
    closed = {"router_gates": {"kernel": 0 * layer["kernel"], "bias": logits}}
    server = replaced(state.server, closed)
    upload, _, client, _ = train(server, jnp.int32(24), KEY)
    np.testing.assert_array_equal(client.gates, logits > 0)
    np.testing.assert_array_equal(upload["active"], [True, False, True, True])
    chex.assert_trees_all_equal(upload["params"]["block2_2"], server["params"]["block2_2"])
    traffic = algorithm.traffic(server, upload)
    assert {name for name, size in traffic.up.items() if not int(size)} == {"block2_2"}


def test_evaluation_opens_gates_above_one_half():
    algorithm, state, train = compiled("hard")
    data, client = client_data(tiny.federated()[0], CLIENT), trees.row(state.clients, CLIENT)
    serve = jax.jit(
        lambda server: algorithm.personalize(
            State(server, (), ()), client, ClientContext(CLIENT, data, 0, KEY)
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


@pytest.mark.slow("a program of its own")
def test_a_start_model_is_copied_to_every_encoder():
    algorithm, fresh, train = compiled("hard")
    federation = tiny.federated()[1]
    fedavg = algorithms.fedavg(tiny.Net(), cases.training(), federation)
    start = jax.device_get(jax.jit(fedavg.init)(KEY))
    start = start._replace(server=jax.tree.map(lambda leaf: leaf + 0.25, start.server))
    server = jax.device_get(jax.jit(algorithm.init)(KEY, start)).server
    body = trees.split(start.server, {"fc2"})[1]
    for name in ("params", "batch_stats"):
        for slot in ("encoder1", "encoder2", "router_encoder"):
            copied = {layer: server[name][slot][layer] for layer in body[name]}
            chex.assert_trees_all_equal(copied, body[name])
    for layer in (*NAMES, "router_gates", "router_labels"):
        chex.assert_trees_all_equal(server["params"][layer], fresh.server["params"][layer])
    trained = train(server, jnp.int32(0), KEY)[0]["params"]
    first, second = (trained[e]["fc1"]["kernel"] for e in ("encoder1", "encoder2"))
    assert np.abs(np.subtract(first, second)).max() > 1e-3
    settings = fresh._replace(server=server)
    chex.assert_trees_all_equal(jax.jit(algorithm.init)(KEY, settings).server, server)
    with pytest.raises(UsageError, match="same network"):
        algorithm.init(KEY, start._replace(server={"params": {}}))
