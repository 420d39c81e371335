"""IFCA: rounds against NumPy, choices of clients, and shared layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.algorithms.ifca import Server
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import ClientContext, State
from tests.algorithms import limits_test, linear
from tests.algorithms.limits_test import TRAINING, after_rounds, assert_equal
from tests.algorithms.linear import KEY, context, make_classifier, weights

pytestmark = pytest.mark.slow("programs of a method beside the four systems")

RNG = np.random.default_rng(0)
COUNTS = (3, 5, 2, 4)
XS = [RNG.normal(size=(n, 2)) for n in COUNTS]
TRUTHS = np.array([[1.0, -1.0], [1.0, -1.0], [-1.0, 2.0], [-1.0, 2.0]])
YS = [x @ w for x, w in zip(XS, TRUTHS, strict=True)]
START = np.array([[-0.8, 1.5], [5.0, 5.0], [0.9, -0.5]])  # nobody chooses the second one
RATE, STEPS, ROUNDS = 0.1, 2, 3
CLASSES = limits_test.XS, limits_test.YS


def make(**settings):
    training = local_training.sgd(learning_rate=RATE, batch_size=8, epochs=STEPS)
    return linear.make("ifca", XS, YS, training, clusters=3, **settings)


def state_of(models, rows):
    kernel = jnp.asarray(models, jnp.float32)[..., None]
    server = Server({"params": {"fc": {"kernel": kernel}}}, {})
    return State(server, jnp.asarray(rows, jnp.int32), ())


def loss(w, x, y):
    return np.mean(0.5 * (x @ w - y) ** 2)


def oracle(models, rounds):
    """Returns the models and each client's cluster after some rounds with all clients."""
    for _ in range(rounds):
        pairs = list(zip(XS, YS, strict=True))
        clusters = [int(np.argmin([loss(w, x, y) for w in models])) for x, y in pairs]
        trained = []
        for (x, y), j in zip(pairs, clusters, strict=True):
            w = models[j]
            for _ in range(STEPS):
                w = w - RATE * x.T @ (x @ w - y) / len(x)
            trained.append(w)
        models = np.array(
            [
                np.average(np.array(trained)[members], 0, np.array(COUNTS)[members])
                if any(members := np.array(clusters) == j)
                else old
                for j, old in enumerate(models)
            ]
        )
    return models, clusters


@pytest.mark.parametrize("rows", [(0, 0, 0, 0), (2, 1, 0, 1)])
def test_rounds_equal_numpy(rows):
    """The cluster of the last round decides the order of the download only."""
    algorithm, data = make()
    state, _ = linear.run_rounds(algorithm, state_of(START, rows), data, COUNTS, ROUNDS)
    models, clusters = oracle(START, ROUNDS)
    np.testing.assert_array_equal(state.rows, clusters)
    np.testing.assert_array_equal(clusters, [2, 2, 0, 0])
    np.testing.assert_allclose(weights(state.server.clusters), models, rtol=1e-5)
    served = algorithm.personalize(state, (), context(data, 3))
    np.testing.assert_allclose(weights(served), models[0], rtol=1e-5)
    np.testing.assert_array_equal(algorithm.observe(state)["cluster"], clusters)


def test_download_starts_with_the_last_cluster():
    algorithm, data = make()
    state = state_of(START, [1, 2, 0, 1])
    payload = algorithm.send(state, ClientContext(jnp.int32(1), None, 0, KEY))
    np.testing.assert_array_equal(weights(payload), np.float32(START[2]))
    np.testing.assert_array_equal(weights(payload["others"]), np.float32(START[:2]))
    chosen = [
        int(jax.jit(algorithm.train)(algorithm.send(state, ctx), (), ctx).upload["chosen"])
        for ctx in (context(data, 0), context(data, 1))
    ]
    assert chosen == [1, 0]
    new = state_of(START, [-1] * 4)  # has not chosen: as if the first cluster were its last
    first = algorithm.send(new, ClientContext(jnp.int32(1), None, 0, KEY))
    np.testing.assert_array_equal(weights(first), np.float32(START[0]))


def test_uploads_change_the_first_model_as_training_changes_the_chosen_one():
    """Compression and limits of norms see the change by training, not that of the cluster."""
    algorithm, data = make()
    ctx = context(data, 0)  # chooses the last model, and trained the first one before
    payload = algorithm.send(state_of(START, [0] * 4), ctx)
    result = jax.jit(algorithm.train)(payload, (), ctx)
    assert int(result.upload["chosen"]) == 2
    change = weights(result.upload) - weights(payload)
    # The models of the two clusters differ by about 2.
    np.testing.assert_allclose(change, weights(result.variables) - START[2], rtol=0, atol=1e-5)


def test_ties_keep_the_cluster_and_models_that_are_not_finite_are_avoided():
    algorithm, data = make()
    equal = state_of(np.ones((3, 2)), [2] * 4)
    after, _ = linear.run_rounds(algorithm, equal, data, COUNTS, 1)
    np.testing.assert_array_equal(after.rows, [2] * 4)
    broken = state_of(np.where(np.arange(3)[:, None] == 1, np.nan, START), [1] * 4)
    served = algorithm.personalize(broken, (), context(data, 0))
    np.testing.assert_array_equal(weights(served), np.float32(START[2]))


def test_absent_clients_do_not_count():
    algorithm, _ = make()
    state = state_of(START, [1, 1, 1, 1])
    uploads = [
        {**linear.variables(w), "chosen": jnp.int32(chosen)}
        for w, chosen in ((TRUTHS[0], 1), (2 * TRUTHS[0], 1), (TRUTHS[2], 2), (TRUTHS[2], 1))
    ]
    after = linear.receive(algorithm, state, COUNTS, uploads, [True, True, False, False])
    np.testing.assert_array_equal(after.rows, [2, 2, 1, 1])
    mean = TRUTHS[0] * (3 + 2 * 5) / 8 + START[2] - START[1]  # the chosen model is the last one
    np.testing.assert_allclose(weights(after.server.clusters), [*START[:2], mean], rtol=1e-6)


def test_shared_layers_are_averaged_over_all_clients():
    algorithm, data = make_classifier(
        "ifca", [linear.X, linear.X], [linear.Y, 2 - linear.Y], clusters=2, cluster_layers=1
    )
    state = algorithm.init(KEY)
    assert set(state.server.clusters["params"]) == {"head"}
    assert set(state.server.shared["params"]) == {"body"}
    heads = state.server.clusters["params"]["head"]["kernel"]
    assert (heads[0] != heads[1]).any()
    after, models = linear.run_rounds(algorithm, state, data, (4, 4), 1)
    bodies, trained_heads = linear.kernels(models)
    np.testing.assert_allclose(
        after.server.shared["params"]["body"]["kernel"], bodies.mean(0), rtol=1e-6
    )
    new_heads = after.server.clusters["params"]["head"]["kernel"]
    for j in (0, 1):
        members = np.asarray(after.rows) == j
        expected = trained_heads[members].mean(0) if members.any() else heads[j]
        np.testing.assert_allclose(new_heads[j], expected, rtol=1e-6)


@pytest.mark.parametrize("layers", [None, 1])
def test_one_cluster_is_fedavg(layers):
    algorithm, data = make_classifier("ifca", *CLASSES, TRAINING, clusters=1, cluster_layers=layers)
    fedavg, _ = make_classifier("fedavg", *CLASSES, TRAINING)
    start = jax.jit(fedavg.init)(KEY)
    shared, own_layers = trees.split(start.server, () if layers is None else {"body"})
    server = Server(trees.repeat(own_layers, 1), shared)
    state = State(server, jnp.zeros(4, jnp.int32), start.clients)
    state, models = linear.run_rounds(algorithm, state, data, [3] * 4, 2)
    expected, expected_models = after_rounds("fedavg")
    assert_equal(models, expected_models)
    assert_equal(state.clients, expected.clients)


def test_a_phase_continues_the_clusters():
    algorithm, _ = make()
    state = state_of(START, [1, 2, 0, 1])
    continued = algorithm.init(KEY, state)
    np.testing.assert_array_equal(weights(continued.server.clusters), np.float32(START))
    np.testing.assert_array_equal(continued.rows, state.rows)
