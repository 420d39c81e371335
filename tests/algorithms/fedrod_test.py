"""FedRoD against NumPy: three examples of class 0, none of class 1, one of class 2."""

import chex
import numpy as np

from fedjax_pfl.algorithms.fedrod import Client
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import HEAD, A, X, Y, deep, kernels, train_client

CLIENT_HEAD = np.array([[0.2, 0.0, 0.1], [0.3, -0.1, 0.2]])
RATE, STEPS = 0.2, 3


def test_three_steps_by_hand():
    algorithm, data = linear.make_classifier("fedrod")
    client = Client({"head": deep(A, CLIENT_HEAD)["params"]["head"]}, ())
    result = train_client(algorithm, deep(A, HEAD), client, data)
    a, head, personal = A, HEAD, CLIENT_HEAD
    counts = np.array([3.0, 0.0, 1.0])
    for _ in range(STEPS):
        z = X @ a
        with np.errstate(divide="ignore"):
            balanced_error = linear.softmax(z @ head + np.log(counts)) - np.eye(3)[Y]
        summed_error = linear.softmax(z @ (head + personal)) - np.eye(3)[Y]
        a, head, personal = (
            a - RATE * X.T @ balanced_error @ head.T / 4,
            head - RATE * z.T @ balanced_error / 4,
            personal - RATE * z.T @ summed_error / 4,
        )
    body, shared = kernels(result.upload)
    np.testing.assert_allclose(body, a, rtol=1e-5)
    np.testing.assert_allclose(shared, head, rtol=1e-5)
    np.testing.assert_allclose(result.client.head["head"]["kernel"], personal, rtol=1e-5)
    np.testing.assert_allclose(kernels(result.variables)[1], head + personal, rtol=1e-5, atol=1e-6)
    served = algorithm.personalize(State(deep(A, HEAD), (), ()), result.client, None)
    np.testing.assert_allclose(kernels(served)[1], HEAD + personal, rtol=1e-5, atol=1e-6)
    # The served model adds the logits of both heads.
    logits = algorithm.predict(served, X.astype(np.float32))
    np.testing.assert_allclose(logits, X @ A @ HEAD + X @ A @ personal, rtol=1e-5, atol=1e-6)


def test_the_personal_head_starts_as_the_shared_one():
    algorithm, _ = linear.make_classifier("fedrod")
    state = algorithm.init(linear.KEY)
    chex.assert_trees_all_equal(
        state.clients.head["head"]["kernel"][0], state.server["params"]["head"]["kernel"]
    )
    assert set(state.clients.head) == {"head"}
