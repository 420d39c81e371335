"""FedLC against NumPy: three examples of class 0, none of class 1, one of class 2."""

import chex
import numpy as np
import pytest

from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import HEAD, A, X, Y, deep, kernels, train_client

RATE, STEPS, TAU = 0.2, 3, 1.5


def test_one_round_by_hand():
    algorithm, data = linear.make_classifier("fedlc", tau=TAU)
    a, head = A, HEAD
    margins = np.array([TAU * 3**-0.25, np.inf, TAU])
    losses = []
    for _ in range(STEPS):
        z = X @ a
        probabilities = linear.softmax(z @ head - margins)
        losses.append(-np.log(probabilities[np.arange(len(Y)), Y]).mean())
        error = (probabilities - np.eye(3)[Y]) / len(Y)
        a, head = a - RATE * X.T @ error @ head.T, head - RATE * z.T @ error
    result = train_client(algorithm, deep(A, HEAD), (), data)
    body, trained_head = kernels(result.upload)
    np.testing.assert_allclose(body, a, rtol=1e-6)
    np.testing.assert_allclose(trained_head, head, rtol=1e-6)
    np.testing.assert_allclose(result.metrics["loss"], np.mean(losses), rtol=1e-6)
    # The weights of the missing class do not change.
    np.testing.assert_array_equal(trained_head[:, 1], np.float32(HEAD)[:, 1])
    # The server averages by examples, and clients are served its model.
    state = State(deep(A, HEAD), (), ())
    uploads = [result.upload, deep(3 * A, HEAD)]
    state = linear.receive(algorithm, state, [4, 1], uploads, [True, True])
    np.testing.assert_allclose(kernels(state.server)[0], (4 * body + 3 * A) / 5, rtol=1e-6)
    chex.assert_trees_all_equal(algorithm.personalize(state, (), None), state.server)


@pytest.mark.parametrize("name", ["fedlc", "fedavg"])
def test_a_client_with_one_class_does_not_train(name: str):
    """The only class in the sum has probability 1; FedAvg lowers the logits of the others."""
    algorithm, data = linear.make_classifier(name, [X], [np.zeros(4, int)])
    result = train_client(algorithm, deep(A, HEAD), (), data)
    unchanged = bool((kernels(result.upload)[1] == np.float32(HEAD)).all())
    assert unchanged == (name == "fedlc")


def test_only_the_model_is_sent():
    algorithm, data = linear.make_classifier("fedlc")
    state = algorithm.init(linear.KEY)
    payload = algorithm.send(state, linear.context(data))
    chex.assert_trees_all_equal(payload, state.server)
    traffic = algorithm.traffic(payload, train_client(algorithm, payload, (), data).upload)
    assert traffic.down == traffic.up == {"body": 4 * 4, "head": 4 * 6}
