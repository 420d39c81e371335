"""FedAS against NumPy, on the network (x A) B with features x A."""

import chex
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.algorithms.fedas import Client
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import HEAD, A, X, Y, deep, kernels, train_client

RATE, ALIGN, STEPS = 0.2, 0.3, 3
LAST_BODY = np.array([[0.1, 0.9], [-0.6, 0.2]])  # of the client's last model
BODY, _ = trees.split(deep(A, HEAD), {"body"})


def gradients(x, y, a, head):
    z = x @ a
    by_logit = (linear.softmax(z @ head) - np.eye(3)[y]) / len(y)
    return x.T @ by_logit @ head.T, z.T @ by_logit


def test_local_training_by_hand():
    """Two passes of alignment. Class 0 with three examples counts the same as class 2 with one."""
    algorithm, data = linear.make_classifier("fedas", align_rate=ALIGN, align_epochs=2)
    result = train_client(algorithm, BODY, Client(deep(LAST_BODY, HEAD), ()), data)
    of = {c: X[[i for i in range(4) if Y[i] == c]] for c in (0, 2)}
    prototypes = {c: (x @ LAST_BODY).mean(0) for c, x in of.items()}
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
    assert algorithm.personalize(None, result.client, None) is result.client.variables


def test_fisher_is_summed_over_batches():
    """The batches have three examples and one, in stored order."""
    training = local_training.sgd(learning_rate=RATE, batch_size=3, epochs=STEPS)
    algorithm, data = linear.make_classifier("fedas", training=training)
    result = train_client(algorithm, BODY, Client(deep(LAST_BODY, HEAD), ()), data)
    a, head = kernels(result.variables)
    parts = [gradients(X[s], Y[s], a, head) for s in (slice(0, 3), slice(3, 4))]
    expected = sum(np.square(part).sum() for pair in parts for part in pair)
    np.testing.assert_allclose(result.upload["fisher"], expected, rtol=1e-4)


def test_the_server_averages_by_fisher():
    """The weights are 3 : 1, independent of the numbers of examples; absent clients have none."""
    algorithm, _ = linear.make_classifier("fedas")
    bodies = [
        {**trees.split(deep(s * A, HEAD), {"body"})[0], "fisher": jnp.float32(f)}
        for s, f in ((1.0, 3.0), (5.0, 1.0), (99.0, 9.0))
    ]
    state, counts, arrived = State(BODY, (), ()), [1, 50, 9], [True, True, False]
    new_state = linear.receive(algorithm, state, counts, bodies, arrived)
    np.testing.assert_allclose(kernels(new_state.server)[0], 2 * A, rtol=1e-5)
    flat = [{**body, "fisher": jnp.float32(0)} for body in bodies]
    unchanged = linear.receive(algorithm, state, counts, flat, arrived)
    chex.assert_trees_all_equal(unchanged.server, BODY)
    noised = [
        {**body, "fisher": jnp.float32(f)} for body, f in zip(bodies, (2, -1.9, 0), strict=True)
    ]
    positive = linear.receive(algorithm, state, counts, noised, arrived)
    np.testing.assert_allclose(kernels(positive.server)[0], A, rtol=1e-5)
