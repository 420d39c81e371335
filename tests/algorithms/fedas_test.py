"""FedAS against NumPy, on the network (x A) B with features x A."""

import chex
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.fedas import Client
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.fedrod_test import CLASSES, HEAD, A, X, Y, softmax
from tests.algorithms.linear import KEY, deep, kernels, receive, train_client

RATE, ALIGN, STEPS = 0.2, 0.3, 3
MINE = np.array([[0.1, 0.9], [-0.6, 0.2]])  # the body of the client's own last model
BODY, HEAD_PART = (trees.split(deep(A, HEAD), {name})[0] for name in ("body", "head"))


def make(task=CLASSES, name="fedas", batch_size=4, **settings):
    data, federation = linear.federated([X], [Y])
    data = data._replace(y=Y.astype(np.int32))
    training = local_training.sgd(learning_rate=RATE, batch_size=batch_size, epochs=STEPS)
    net, federation = linear.Deep(outputs=3, width=2), federation._replace(outputs=3, task=task)
    return getattr(algorithms, name)(net, training, federation, **settings), data


def gradients(x, y, a, head):
    z = x @ a
    by_logit = (softmax(z @ head) - np.eye(3)[y]) / len(y)
    return x.T @ by_logit @ head.T, z.T @ by_logit


def test_local_training_by_hand():
    """Two passes of alignment. Class 0 with three examples counts the same as class 2 with one."""
    algorithm, data = make(align_rate=ALIGN, align_epochs=2)
    result = train_client(algorithm, BODY, Client(deep(MINE, HEAD), ()), data)
    of = {c: X[[i for i in range(4) if Y[i] == c]] for c in (0, 2)}
    prototypes = {c: (x @ MINE).mean(0) for c, x in of.items()}
    a, head = A, HEAD
    for _ in range(2):
        slopes = [x.T @ (2 * (x @ a - prototypes[c]) / 2 / len(x)) for c, x in of.items()]
        a = a - ALIGN * sum(slopes)
    for _ in range(STEPS):
        by_a, by_head = gradients(X, Y, a, head)
        a, head = a - RATE * by_a, head - RATE * by_head
    got = kernels(result.variables)
    np.testing.assert_allclose(got[0], a, rtol=1e-5)
    np.testing.assert_allclose(got[1], head, rtol=1e-5)
    expected = sum(np.square(part).sum() for part in gradients(X, Y, a, head))
    np.testing.assert_allclose(result.upload["fisher"], expected, rtol=1e-4)
    np.testing.assert_allclose(kernels({"params": result.upload["params"]})[0], a, rtol=1e-5)
    chex.assert_trees_all_equal(result.client.variables, result.variables)


def test_fisher_is_summed_over_batches():
    """The batches have three examples and one, in stored order."""
    algorithm, data = make(batch_size=3)
    result = train_client(algorithm, BODY, Client(deep(MINE, HEAD), ()), data)
    a, head = kernels(result.variables)
    parts = [gradients(X[s], Y[s], a, head) for s in (slice(0, 3), slice(3, 4))]
    expected = sum(np.square(part).sum() for pair in parts for part in pair)
    np.testing.assert_allclose(result.upload["fisher"], expected, rtol=1e-4)


def test_the_server_averages_by_fisher():
    """The weights are 3 : 1, independent of the numbers of examples; absent clients have none."""
    algorithm, _ = make()
    bodies = [
        {**trees.split(deep(s * A, HEAD), {"body"})[0], "fisher": jnp.float32(f)}
        for s, f in ((1.0, 3.0), (5.0, 1.0), (99.0, 9.0))
    ]
    state = receive(algorithm, State(BODY, (), ()), [1, 50, 9], bodies, [True, True, False])
    np.testing.assert_allclose(kernels(state.server)[0], 2 * A, rtol=1e-5)
    flat = [{**body, "fisher": jnp.float32(0)} for body in bodies]
    unchanged = receive(algorithm, State(BODY, (), ()), [1, 50, 9], flat, [True, True, False])
    chex.assert_trees_all_equal(unchanged.server, BODY)


def test_align_rate_0_equals_fedper():
    """Exact equality."""
    (algorithm, data), (fedper, _) = make(align_rate=0.0), make(name="fedper")
    fedas_result = train_client(algorithm, BODY, Client(deep(MINE, HEAD), ()), data)
    start = trees.row(fedper.init(KEY).clients, 0)
    fedper_result = train_client(fedper, BODY, start._replace(personal=HEAD_PART), data)
    chex.assert_trees_all_equal(fedas_result.variables, fedper_result.variables)


def test_the_served_model_and_phases():
    algorithm, _ = make()
    state = algorithm.init(KEY, State(deep(A, HEAD), (), ()))
    np.testing.assert_array_equal(
        kernels(trees.row(state.clients.variables, 0))[1], np.float32(HEAD)
    )
    settings = Client(deep(MINE, HEAD), ())
    assert algorithm.personalize(state, settings, None) is settings.variables
    later = state._replace(server=trees.split(deep(MINE, HEAD), {"body"})[0])
    chex.assert_trees_all_equal(algorithm.init(KEY, later), later)
