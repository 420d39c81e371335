"""FedTGP, FedGH and FML against NumPy, and methods whose groups have different networks."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pfl as pfl
from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.fedtgp import adaptive_margin
from fedjax_pfl.algorithms.fml import Client, pair
from fedjax_pfl.algorithms.local import LocalClient
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import State
from tests import cases, tiny
from tests.algorithms import linear
from tests.algorithms.linear import HEAD, KEY, A, X, Y, deep, kernels, softmax, train_client

pytestmark = pytest.mark.slow("programs of two groups")

RATE, STEPS = 0.2, 3  # of `linear.make_classifier`
PROTOTYPES = np.array(
    [[[1.0, -1.0], [0.5, 2.0], [7.0, 7.0]], [[3.0, 0.5], [7.0, 7.0], [-1.0, 1.0]]]
)  # of two clients; (7, 7) is not sent
SENT = np.array([[True, True, False], [True, False, True]])
SHARING = ("fedproto", "fedtgp", "fedgh", "fml")


def assert_kernels(variables: object, body: np.ndarray, head: np.ndarray):
    for got, expected in zip(kernels(variables), (body, head), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def contrastive(trained: np.ndarray, client: int, margin: float) -> float:
    """Returns the mean loss of a client's prototypes."""
    losses = []
    for c in np.flatnonzero(SENT[client]):
        logits = -np.linalg.norm(PROTOTYPES[client][c] - trained, axis=1)
        logits[c] -= margin
        losses.append(np.log(np.exp(logits).sum()) - logits[c])
    return float(np.mean(losses))


def test_fedtgp_on_the_server_by_hand():
    """The means are (2, -0.25), (0.5, 2) and (-1, 1), so the first and the last are farthest."""
    farthest = np.hypot(3, 1.25)
    for threshold, expected in ((100.0, farthest), (2.0, 2.0)):
        margin = adaptive_margin(jnp.float32(PROTOTYPES), jnp.asarray(SENT), threshold)
        np.testing.assert_allclose(margin, expected, rtol=1e-6)
    one_class = jnp.asarray(SENT & (np.arange(3) == 0))
    assert adaptive_margin(jnp.float32(PROTOTYPES), one_class, 100.0) == 0

    algorithm, _ = linear.make_classifier("fedtgp", rate=0.3, epochs=2, threshold=2.0)
    first = algorithm.init(KEY)
    uploads = [
        {"prototypes": jnp.float32(p), "counts": jnp.float32(4 * sent)}
        for p, sent in zip(PROTOTYPES, SENT, strict=True)
    ]
    absent = jax.tree.map(lambda leaf: leaf + 9, uploads[0])
    state = linear.receive(algorithm, first, [4, 4, 9], [*uploads, absent], [True, True, False])

    params = jax.tree.map(np.float64, first.server["generator"])

    def generated() -> np.ndarray:
        hidden = params["vectors"] @ params["hidden"]["kernel"] + params["hidden"]["bias"]
        return np.maximum(hidden, 0) @ params["output"]["kernel"] + params["output"]["bias"]

    for _ in range(2):
        for client in (0, 1):
            slopes = linear.central_differences(
                lambda client=client: contrastive(generated(), client, 2.0), params
            )
            jax.tree.map(lambda p, g: np.subtract(p, 0.3 * g, out=p), params, slopes)
    chex.assert_trees_all_close(state.server["generator"], params, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.server["prototypes"], generated(), rtol=1e-4, atol=1e-5)
    assert state.server["seen"].all()
    assert not first.server["seen"].any()


def test_fedgh_by_hand():
    algorithm, data = linear.make_classifier("fedgh", rate=0.3)
    payload, client = (
        {"kernel": jnp.float32(HEAD)},
        {"params": {"body": {"kernel": jnp.float32(A)}}},
    )
    result = train_client(algorithm, payload, LocalClient(client, ()), data)
    a, head = A, HEAD
    for _ in range(STEPS):
        z = X @ a
        error = (softmax(z @ head) - np.eye(3)[Y]) / 4
        a, head = a - RATE * X.T @ error @ head.T, head - RATE * z.T @ error
    assert_kernels(result.variables, a, head)
    np.testing.assert_array_equal(result.client.variables["params"]["body"]["kernel"].shape, (2, 2))
    assert set(result.client.variables["params"]) == {"body"}
    z = X @ a
    np.testing.assert_allclose(result.upload["means"][0], z[Y == 0].mean(0), rtol=1e-5)
    np.testing.assert_array_equal(result.upload["counts"], [3, 0, 1])

    uploads = [
        {"means": jnp.float32(p), "counts": jnp.float32(sent)}
        for p, sent in zip(PROTOTYPES, SENT, strict=True)
    ]
    state = State({"kernel": jnp.float32(HEAD)}, (), ())
    state = linear.receive(algorithm, state, [4, 4, 9], [*uploads, uploads[0]], [True, True, False])
    head = HEAD
    for k, c in zip(*np.nonzero(SENT), strict=True):
        z = PROTOTYPES[k, [c]]
        head = head - 0.3 * z.T @ (softmax(z @ head) - np.eye(3)[[c]])
    np.testing.assert_allclose(state.server["kernel"], head, rtol=1e-5)
    served = algorithm.personalize(state, LocalClient(client, ()), None)
    assert_kernels(served, A, head)


@pytest.mark.parametrize("classes", [None, [True, True, False]])
def test_fml_by_hand(classes):
    """A class that the client does not use has probability 0 in the divergence as well."""
    alpha, beta, b = 0.7, 0.4, HEAD[:, ::-1]
    unused = 0.0 if classes is None else np.where(classes, 0, -1e9)
    labels = Y if classes is None else np.minimum(Y, 1)
    algorithm, data = linear.make_classifier("fml", ys=(labels,), alpha=alpha, beta=beta)
    if classes is not None:
        data = data._replace(classes=jnp.asarray([classes]))
    client = Client(deep(A, HEAD), ())
    result = train_client(algorithm, deep(A, b), client, data)
    models = [[A, HEAD], [A, b]]
    for _ in range(STEPS):
        p = [softmax(X @ a @ head + unused) for a, head in models]
        for i, weight in enumerate((alpha, beta)):
            a, head = models[i]
            # The gradient of KL(q ‖ p) in the logits of p is p − q.
            error = p[i] - weight * np.eye(3)[labels] - (1 - weight) * p[1 - i]
            error /= 4
            models[i] = [
                a - RATE * X.T @ error @ head.T,
                head - RATE * (X @ a).T @ error,
            ]
    assert_kernels(result.variables, *models[0])
    assert_kernels(result.upload, *models[1])
    chex.assert_trees_all_equal(result.client.personal, result.variables)


def test_a_pair_of_networks_may_have_different_collections():
    with_statistics = {"params": {"fc": 1}, "batch_stats": {"norm": 2}}
    joined = pair(with_statistics, {"params": {"fc": 3}})
    assert joined == {
        "params": {"personal": {"fc": 1}, "shared": {"fc": 3}},
        "batch_stats": {"personal": {"norm": 2}},
    }


@pytest.mark.parametrize("name", SHARING)
def test_two_groups_have_one_server(name):
    """Two groups with the same network are the same as one group."""
    data, federation = tiny.federated()
    settings, net = cases.CASES[name].settings, tiny.Net()
    factory = getattr(algorithms, name)
    single = factory(net, cases.training(), federation, **settings)
    two_groups = federation._replace(groups=np.arange(federation.clients) % 2)
    grouped = factory((net, net), cases.training(), two_groups, **settings)
    state, state_of_groups = single.init(KEY), grouped.init(KEY)
    chex.assert_trees_all_equal(state_of_groups.server, state.server)
    chex.assert_trees_all_equal(state_of_groups.clients, (state.clients, state.clients))

    rng = np.random.default_rng(5)

    def upload() -> object:
        context = linear.context(data)
        payload = single.send(state, context._replace(data=None))
        return single.train(payload, trees.row(state.clients, 0), context).upload

    example = jax.eval_shape(upload)
    uploads = jax.tree.map(
        lambda leaf: jnp.asarray(rng.uniform(0.1, 1, (3, *leaf.shape)), leaf.dtype), example
    )
    ids, arrived = jnp.array([0, 1, 2]), jnp.array([True, True, False])

    def cohort(rows: slice) -> object:
        part = jax.tree.map(lambda leaf: leaf[rows], uploads)
        return tiny.cohort(tiny.TRAIN, ids[rows], arrived[rows], (), part, linear.T)

    bare = state._replace(clients=())
    expected, _ = single.receive(bare, cohort(slice(0, 3)))
    received, _ = grouped.receive(bare, (cohort(slice(0, 1)), cohort(slice(1, 3))))
    chex.assert_trees_all_close(received, expected, rtol=1e-6)
    assert trees.size(received) == trees.size(expected)


@pytest.mark.slow("programs of two groups")
@pytest.mark.parametrize("name", SHARING)
def test_groups_with_different_networks_learn(name):
    data = pfl.partition(
        pfl.datasets.digits(), "classes", clients=4, per_client=4, groups=2, examples=120
    )
    networks = (pfl.networks.MLP(10, (16,)), pfl.networks.MLP(10, (24, 16)))
    training = pfl.local_sgd(learning_rate=0.1, epochs=2, batch_size=10)
    simulation = pfl.Simulation(getattr(pfl, name)(networks, training, data.federation), data)
    state = simulation.init()
    state, _ = simulation.run_rounds(state, 0, 6)
    assert simulation.evaluate(state, 6).before.accuracy.min() > 0.8
    sizes = [trees.size(simulation.personal_model(state, client)["params"]) for client in (0, 1)]
    assert sizes == [64 * 16 + 16 + 170, 64 * 24 + 24 + 24 * 16 + 16 + 170]
