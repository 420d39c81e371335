"""Tests of private layers around several methods."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_pfl import algorithms, transforms
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import client_data
from fedjax_pfl.core.groups import by_group
from fedjax_pfl.settings import configuration
from fedjax_pfl.testing import example
from fedjax_pfl.transforms.compression import compression
from fedjax_pfl.transforms.private_layers import private_layers, replace_layers
from tests import cases, tiny
from tests.algorithms.served import KEY, after_rounds, served

DATA, FEDERATION = tiny.federated()
HEAD = 4 * (tiny.HIDDEN + 1) * tiny.CLASSES


def keep_head(algorithm):
    return private_layers(tiny.Net(), FEDERATION, DATA, {"fc2"})(algorithm)


def with_private_head(name):
    return keep_head(cases.make(name, FEDERATION))


@pytest.mark.slow("two programs")
def test_fedavg_with_private_head_is_fedper():
    private, _ = after_rounds(with_private_head("fedavg"), 3)
    fedper_method = cases.make("fedper", FEDERATION)
    fedper, _ = after_rounds(fedper_method, 3)
    chex.assert_trees_all_equal(private.clients.own, fedper.clients.personal)
    body, head = trees.split(private.server, {"fc1", "norm1"})
    chex.assert_trees_all_equal(body, fedper.server)
    assert set(head["params"]) == {"fc2"}
    models = served(with_private_head("fedavg"), private, 3), served(fedper_method, fedper, 3)
    chex.assert_trees_all_equal(*models)


@pytest.mark.slow("two programs for each method")
@pytest.mark.parametrize("name", ["fedfomo", "pfedla", "factorized_fl_moved"])
def test_private_heads_stay_on_their_clients(name):
    """The server's heads stay at their initial values, clients' heads differ, no byte counts."""
    algorithm = with_private_head(name)
    state, log = after_rounds(algorithm, 2)
    heads = [
        np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path((state.server, state.rows))
        if jax.tree_util.DictKey("fc2") in path
    ]
    assert heads
    for leaf in heads:
        stacked = leaf if len(leaf) == tiny.CLIENTS else leaf[None]
        np.testing.assert_allclose(stacked, np.broadcast_to(stacked[:1], stacked.shape), rtol=1e-5)
    heads = np.asarray(state.clients.own["params"]["fc2"]["kernel"])
    assert all((heads[0] != heads[i]).any() for i in range(1, tiny.CLIENTS))
    assert "fc2" not in log.down
    assert "fc2" not in log.up
    model = served(algorithm, state, 2)
    if name in ("pfedla", "factorized_fl_moved"):
        np.testing.assert_allclose(model["params"]["fc2"]["kernel"], heads[2], rtol=1e-5)


OWN_HEAD = (
    "local",
    "fedper",
    "fedrep",
    "pfedhn_pc",
    "factorized_fl",
    "fedbabu",
    "fedas",
    "fedproto",
)


@pytest.mark.parametrize("name", OWN_HEAD)
def test_methods_that_share_no_head_are_unchanged(name):
    algorithm = cases.make(name, FEDERATION)
    assert keep_head(algorithm) is algorithm


def test_private_layers_of_other_clusters_are_not_sent():
    """IFCA's download has the models of all clusters; a client replaces the head in each."""
    counts = []
    for algorithm in (cases.make("ifca", FEDERATION), with_private_head("ifca")):
        state = jax.eval_shape(algorithm.init, KEY)
        ctx = ClientContext(i=0, data=None, t=0, key=KEY)
        send = functools.partial(algorithm.send, ctx=ctx)
        payload = jax.eval_shape(send, state._replace(clients=()))
        counts.append(algorithm.traffic(payload, {"params": {}}).down)
    plain, private = counts
    heads = {name for name in plain if name.endswith("fc2")}
    assert heads == {"fc2", "others/params/fc2"}
    assert private == {name: plain[name] for name in plain.keys() - heads}


@pytest.mark.slow("builds many methods")
@pytest.mark.parametrize("name", ["pfedhn", "fedem", "fedmn", "pefll", "fedgh", "pfedfda"])
def test_refused_methods(name):
    """Methods without one shared model, and groups of networks."""
    with pytest.raises(UsageError, match="leave it off"):
        with_private_head(name)
    with pytest.raises(UsageError, match=r"control.*leave it off"):
        with_private_head("scaffold")
    with pytest.raises(UsageError, match="fc2, and the method uploads nothing else; leave it off"):
        keep_head(algorithms.lg_fedavg(tiny.Net(), example.training(), FEDERATION))
    with pytest.raises(UsageError, match="without groups"):
        keep_head(by_group((cases.make("fedavg", FEDERATION),) * 2))


def test_replace_layers_changes_every_model_of_a_tree():
    private = {"params": {"b": {"w": jnp.array([5.0])}}}

    def model(*lead):
        return {"params": {"a": {"w": jnp.zeros((*lead, 1))}, "b": {"w": jnp.zeros((*lead, 1))}}}

    tree = replace_layers({**model(), "peers": model(3), "ids": jnp.arange(2)}, private)
    np.testing.assert_array_equal(tree["params"]["b"]["w"], [5])
    np.testing.assert_array_equal(tree["peers"]["params"]["b"]["w"], [[5]] * 3)
    np.testing.assert_array_equal(tree["peers"]["params"]["a"]["w"], [[0]] * 3)
    np.testing.assert_array_equal(tree["ids"], [0, 1])


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.Dense(tiny.CLASSES)(x))


class Nested(nn.Module):
    """Its head, Dense_0, has the name of a layer inside a block."""

    head = "Dense_0"
    layers = ("Block_0/Dense_0", "Block_1/Dense_0", "Dense_0")

    @nn.compact
    def __call__(self, x, train=False, mask=None):
        return nn.Dense(tiny.CLASSES)(Block()(Block()(x)))


def test_layers_inside_blocks_may_have_the_name_of_the_head():
    network = Nested()
    fedavg = algorithms.fedavg(network, example.training(), FEDERATION)
    algorithm = private_layers(network, FEDERATION, DATA, {network.head})(fedavg)
    state = algorithm.init(KEY)
    server, client = state.server, trees.row(state.clients, 1)
    client = client._replace(own=jax.tree.map(lambda leaf: leaf + 1, client.own))
    ctx = ClientContext(jnp.int32(1), client_data(DATA, 1), jnp.int32(0), KEY)
    result = jax.jit(algorithm.train)(server, client, ctx)
    start = trees.join(client.own, trees.split(server, {network.head})[1])
    expected = fedavg.train(start, client.method, ctx)
    head, body = trees.split(expected.upload, {network.head})
    chex.assert_trees_all_close(result.client.own, head, rtol=1e-5, atol=1e-6)
    uploaded_head, uploaded_body = trees.split(result.upload, {network.head})
    chex.assert_trees_all_close(uploaded_body, body, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal(uploaded_head, trees.split(server, {network.head})[0])
    assert set(algorithm.traffic(server, result.upload).up) == set(network.layers[:2])


@pytest.mark.slow("two phases")
def test_later_phase_starts_from_the_private_heads():
    state, _ = after_rounds(with_private_head("fedavg"), 2)
    next_state = with_private_head("per_fedavg").init(KEY, state)
    chex.assert_trees_all_equal(next_state.clients.own, state.clients.own)
    chex.assert_trees_all_equal(next_state.server, state.server)
    without, _ = after_rounds(cases.make("fedavg", FEDERATION), 2)
    head = with_private_head("fedavg").init(KEY, without).clients.own["params"]["fc2"]["kernel"]
    np.testing.assert_array_equal(head[4], without.server["params"]["fc2"]["kernel"])


def test_later_phase_starts_from_a_server_with_the_state_of_other_transforms():
    fedavg = cases.make("fedavg", FEDERATION)
    earlier = transforms.chain(
        fedavg,
        transforms.server_optimizer(DATA, optax.sgd(1.0)),
        transforms.robust(FEDERATION, DATA, "median"),
    )
    start = earlier.init(KEY)
    state = transforms.chain(fedavg, keep_head).init(jax.random.key(4), start)
    model = start.server.method.method
    chex.assert_trees_all_equal(state.server, model)
    head, _ = trees.split(model, {"fc2"})
    chex.assert_trees_all_equal(state.clients.own, trees.repeat(head, tiny.CLIENTS))


def test_later_phase_keeps_private_heads_in_the_state_of_other_transforms():
    fedavg = cases.make("fedavg", FEDERATION)
    compression = transforms.compression(FEDERATION, DATA, bits=8)
    start = transforms.chain(fedavg, keep_head, compression).init(KEY)
    own = jax.tree.map(lambda leaf: leaf + 1, start.clients.method.own)
    start = start._replace(
        clients=start.clients._replace(method=start.clients.method._replace(own=own))
    )
    state = transforms.chain(fedavg, keep_head).init(jax.random.key(4), start)
    chex.assert_trees_all_equal(state.clients.own, own)


@pytest.mark.slow("a program of its own")
def test_fedfomo_stores_models_with_the_private_head():
    state, _ = after_rounds(with_private_head("fedfomo"), 2)
    own, start = state.clients.own["params"], state.clients.method.start["params"]
    chex.assert_trees_all_equal(start["fc2"], own["fc2"])


@pytest.mark.slow("programs of several methods")
def test_a_share_of_the_change_is_that_of_the_method_with_the_private_head():
    """FedFomo computes its share from the download and from its own state."""
    own = with_private_head("fedfomo")
    both = compression(FEDERATION, DATA, top_k=0.5)(own)
    state = both.init(KEY)
    ctx = ClientContext(i=0, data=client_data(DATA, 0), t=jnp.int32(0), key=KEY)
    payload = both.send(state._replace(clients=()), ctx._replace(data=None))
    client = jax.tree.map(lambda leaf: leaf[0], state.clients)
    share = own.kept_change(payload, client.method, ctx)
    np.testing.assert_array_equal(both.kept_change(payload, client, ctx), share)
    assert jnp.isfinite(both.train(payload, client, ctx).metrics["loss"])


def test_a_personal_model_keeps_the_head_that_it_trained():
    """Ditto stores the personal model v. The private head is that of the shared model."""
    algorithm = with_private_head("ditto")
    state, _ = after_rounds(algorithm, 2)
    own, stored = state.clients.own["params"]["fc2"], state.clients.method.variables
    assert np.abs(stored["params"]["fc2"]["kernel"] - own["kernel"]).max() > 1e-3
    model = served(algorithm, state, 2)
    chex.assert_trees_all_equal(model["params"], trees.row(stored["params"], 2))


@pytest.mark.parametrize(
    "settings",
    [
        {"attack": "gaussian", "attack_share": 0.9},
        {"privacy": "local", "privacy_clip_norm": 1.0, "privacy_noise": 1.0},
    ],
)
def test_private_layers_get_no_noise(settings):
    """A robust server compares uploads, and the head is never sent."""
    settings = {**configuration.complete({"keep_head": True, **settings})}
    context = transforms.TransformContext(tiny.Net(), FEDERATION, DATA, {})
    selected = transforms.selected_transforms(
        settings.get, context._replace(registry=configuration.BUILTINS._asdict())
    )
    algorithm = transforms.chain(cases.make("fedavg", FEDERATION), *selected)
    state = algorithm.init(KEY)
    is_attacker = transforms.select_attackers(settings.get, FEDERATION)
    i = int(np.argmax(is_attacker))
    ctx = ClientContext(jnp.int32(i), client_data(DATA, i), jnp.int32(0), KEY)
    upload = jax.jit(algorithm.train)(state.server, trees.row(state.clients, i), ctx).upload
    change = trees.change(state.server, upload)
    assert not np.any(jax.tree.leaves(trees.split(change, {"fc2"})[0])[0])
    assert float(jnp.min(jnp.abs(change["params"]["fc1"]["kernel"]))) > 0
