"""PeFLL against NumPy, on the network (x A) B; the hypernetwork has one hidden layer."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.errors import UsageError
from tests.algorithms import linear
from tests.algorithms.linear import HEAD, A, X, Y, deep, kernels, train_client

pytestmark = pytest.mark.slow("programs of a method beside the four systems")

RATE, STEPS, SERVER_RATE, DECAY = 0.2, 3, 0.01, 0.1
SIZES = {"descriptor": 2, "embedding_width": 3, "embedding_depth": 1, "width": 4, "depth": 1}
KEYS = {"body": "head_body_kernel", "head": "head_head_kernel"}
BATCH_KEY = jax.random.fold_in(linear.KEY, 2)


def make(xs=(X,), ys=(Y,), **settings):
    settings = {"rate": SERVER_RATE, "weight_decay": DECAY, **SIZES, **settings}
    return linear.make_classifier("pefll", xs, ys, **settings)


def layer(x, p):
    return x @ p["kernel"] + p["bias"]


def describe(psi, x, y):
    hidden = layer(x, psi["fc1"]) + np.sqrt(3) * np.eye(3)[y] @ psi["labels"]["kernel"]
    return layer(np.maximum(hidden, 0), psi["fc2"]).mean(0)


def generate(phi, v):
    hidden = layer(np.maximum(layer(v, phi["layer1"]), 0), phi["layer2"])
    return [
        layer(hidden, phi[KEYS[name]]).reshape(shape)
        for name, shape in (("body", (2, 2)), ("head", (2, 3)))
    ]


def by_symbol(embedding, hypernetwork):
    """Returns trees for the two networks in float64."""
    return jax.tree.map(np.float64, {"psi": embedding, "phi": hypernetwork})


def networks(state):
    """Returns the parameters of both networks in float64."""
    server = jax.device_get(state.server)
    return by_symbol(server.embedding, server.hypernetwork)


def train_by_hand(a, head, x, y):
    """Returns A and B after the local steps."""
    for _ in range(STEPS):
        error = (linear.softmax(x @ a @ head) - np.eye(3)[y]) / len(x)
        a, head = a - RATE * x.T @ error @ head.T, head - RATE * (x @ a).T @ error
    return a, head


def alignment(nets, x, y, change):
    """Returns the inner product of the generated model with a change, whose slopes are g."""
    model = generate(nets["phi"], describe(nets["psi"], x, y))
    return sum(np.sum(part * c) for part, c in zip(model, change, strict=True))


@pytest.mark.slow("operations compile one by one")
def test_one_round_by_hand():
    xs, ys = [X, X[1:] * 2], [Y, np.array([1, 1, 0])]
    algorithm, data = make(xs, ys)
    state = algorithm.init(linear.KEY)
    nets, gradients, uploads = networks(state), [], []
    for i in range(2):
        payload = algorithm.send(state._replace(clients=()), linear.context(data, i))
        result = train_client(algorithm, payload, trees.row(state.clients, i), data, i)
        v = describe(nets["psi"], xs[i], ys[i])
        theta = generate(nets["phi"], v)
        trained = train_by_hand(*theta, xs[i], ys[i])
        change = [old - new for old, new in zip(theta, trained, strict=True)]
        slopes = linear.central_differences(partial(alignment, nets, xs[i], ys[i], change), nets)
        np.testing.assert_allclose(result.upload["descriptor"], v, rtol=1e-6, atol=1e-7)
        uploaded = kernels({"params": result.upload["change"]})
        chex.assert_trees_all_close(list(uploaded), change, rtol=4e-5, atol=4e-7)
        chex.assert_trees_all_close(list(kernels(result.variables)), list(trained), rtol=3e-6)
        gradient = result.upload["embedding_gradient"]
        chex.assert_trees_all_close(gradient, slopes["psi"], rtol=1e-5, atol=1e-7)
        gradients.append(slopes)
        uploads.append(result.upload)
        served = algorithm.personalize(state, trees.row(state.clients, i), linear.context(data, i))
        chex.assert_trees_all_close(list(kernels(served)), theta, rtol=4e-6, atol=4e-7)
    after = linear.receive(algorithm, state, [4, 3], uploads, [True, True])

    # Adam's first step has hardly more than the signs of the gradient, its mean has all of it.
    gradient = jax.tree.map(lambda p, g, h: (g + h) / 2 + DECAY * p, nets, *gradients)
    means = by_symbol(**after.server.moments[2][0].mu)
    chex.assert_trees_all_close(
        means, jax.tree.map(lambda g: 0.1 * g, gradient), rtol=4e-5, atol=4e-7
    )
    expected = jax.tree.map(lambda p, g: p - SERVER_RATE * g / (np.abs(g) + 1e-8), nets, gradient)
    chex.assert_trees_all_close(networks(after), expected, rtol=4e-5, atol=4e-7)
    v = np.stack([upload["descriptor"] for upload in uploads])
    np.testing.assert_array_equal(after.rows.descriptor, v)


def test_without_descriptors_clients_train_as_with_fedavg():
    xs, ys = [X, X[1:] * 2], [Y, np.array([1, 1, 0])]
    algorithm, data = make(xs, ys)
    state = algorithm.init(linear.KEY)
    zero_embedding = jax.tree.map(jnp.zeros_like, state.server.embedding)
    state = state._replace(server=state.server._replace(embedding=zero_embedding))
    fedavg, _ = linear.make_classifier("fedavg", xs, ys)
    models = []
    for i in range(2):
        client = trees.row(state.clients, i)
        models.append(algorithm.personalize(state, client, linear.context(data, i)))
        payload = algorithm.send(state._replace(clients=()), linear.context(data, i))
        result = train_client(algorithm, payload, client, data, i)
        expected = train_client(fedavg, models[i], (), data, i)
        chex.assert_trees_all_equal(result.variables, expected.variables)
    chex.assert_trees_all_equal(*models)


@pytest.mark.slow("two programs")
def test_absent_clients_do_not_count():
    algorithm, data = make([X] * 2, [Y] * 2)
    state = algorithm.init(linear.KEY)
    payload = algorithm.send(state._replace(clients=()), linear.context(data))
    upload = train_client(algorithm, payload, trees.row(state.clients, 0), data).upload
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), upload)
    after_one = linear.receive(algorithm, state, [4, 4], [upload, broken], [True, False])
    after_two = linear.receive(algorithm, state, [4, 4], [upload, upload], [True, True])
    chex.assert_trees_all_close(networks(after_one), networks(after_two), rtol=1e-6, atol=1e-7)
    assert not after_one.rows.descriptor[1].any()
    # The mean model is that of the first client alone, which has sent a descriptor.
    np.testing.assert_allclose(algorithm.observe(after_one)["spread"][0], 0.0, atol=1e-6)


def test_the_gradient_is_clipped_over_both_networks():
    algorithm, data = make(clip_norm=1e-9, weight_decay=0.0)
    state = algorithm.init(linear.KEY)
    payload = algorithm.send(state._replace(clients=()), linear.context(data))
    upload = train_client(algorithm, payload, trees.row(state.clients, 0), data).upload
    after = linear.receive(algorithm, state, [4], [upload], [True])
    first = after.server.moments[2][0].mu  # 0.1 g
    assert float(trees.squared_norm(first)) ** 0.5 == pytest.approx(1e-10, rel=1e-3)


def test_a_descriptor_reads_a_batch_in_training_and_all_examples_in_evaluation():
    algorithm, data = make(examples=1)
    state = algorithm.init(linear.KEY)
    payload = algorithm.send(state._replace(clients=()), linear.context(data))
    result = train_client(algorithm, payload, trees.row(state.clients, 0), data)
    psi = networks(state)["psi"]
    singles = np.stack([describe(psi, X[k : k + 1], Y[k : k + 1]) for k in range(4)])
    distances = np.abs(singles - np.asarray(result.upload["descriptor"])).max(1)
    assert (distances < 1e-5).sum() == 1
    served = algorithm.personalize(state, trees.row(state.clients, 0), linear.context(data))
    expected = generate(networks(state)["phi"], singles.mean(0))
    chex.assert_trees_all_close(list(kernels(served)), expected, rtol=1e-6, atol=1e-7)


def test_traffic_is_both_networks_down_and_the_papers_uploads():
    algorithm, data = make()
    state = algorithm.init(linear.KEY)
    payload = algorithm.send(state._replace(clients=()), linear.context(data))
    result = train_client(algorithm, payload, trees.row(state.clients, 0), data)
    traffic = algorithm.traffic(payload, result.upload)
    psi = (3 + 3) * 3 + 4 * 2
    phi = 3 * 4 + 5 * 4 + 5 * (4 + 6)
    assert sum(traffic.down.values()) == 4 * (psi + phi)
    assert sum(traffic.up.values()) == 4 * (psi + 2 + 4 + 6)


def test_phases_continue_the_networks_and_cannot_start_from_a_model():
    algorithm, _ = make()
    state = algorithm.init(linear.KEY)
    state = state._replace(rows=jax.tree.map(lambda leaf: leaf + 1, state.rows))
    chex.assert_trees_all_equal(algorithm.init(jax.random.key(9), state), state)
    with pytest.raises(UsageError, match="φ cannot be read from a model"):
        algorithm.init(linear.KEY, State(deep(A, HEAD), (), ()))


def test_sequences_are_refused():
    _, federation = linear.federated([X], [Y])
    federation = federation._replace(input_dtype="int32")
    with (
        jax.numpy_dtype_promotion("standard"),  # else the network refuses integers first
        pytest.raises(UsageError, match=r"^pefll describes vectors and images"),
    ):
        algorithms.pefll(linear.Deep(), local_training.sgd(steps=1), federation)
