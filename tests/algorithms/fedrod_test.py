"""FedRoD against NumPy: three examples of class 0, none of class 1, one of class 2."""

import chex
import numpy as np

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.fedrod import Client
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.task import classification
from tests.algorithms import linear
from tests.algorithms.linear import deep, kernels, train_client

X = np.array([[1.0, 0.5], [0.2, -1.0], [0.3, 2.0], [-1.0, 0.4]])
Y = np.array([0, 0, 2, 0])
A = np.array([[0.5, -0.3], [0.2, 0.7]])
HEAD, CLIENT_HEAD = (
    np.array([[0.1, 0.3, -0.2], [0.4, -0.5, 0.6]]),
    np.array([[0.2, 0.0, 0.1], [0.3, -0.1, 0.2]]),
)
RATE, STEPS = 0.2, 3
CLASSES = classification(3)


def make(clip=None, task=CLASSES):
    data, federation = linear.federated([X], [Y])
    data = data._replace(y=Y.astype(np.int32))
    training = local_training.sgd(learning_rate=RATE, batch_size=4, epochs=STEPS, clip_norm=clip)
    net, federation = linear.Deep(outputs=3, width=2), federation._replace(outputs=3, task=task)
    return algorithms.fedrod(net, training, federation), data


def softmax(logits):
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def test_three_steps_by_hand():
    algorithm, data = make()
    client = Client({"head": deep(A, CLIENT_HEAD)["params"]["head"]}, ())
    result = train_client(algorithm, deep(A, HEAD), client, data)
    a, head, personal = A, HEAD, CLIENT_HEAD
    counts = np.array([3.0, 0.0, 1.0])
    for _ in range(STEPS):
        z = X @ a
        with np.errstate(divide="ignore"):
            balanced_error = softmax(z @ head + np.log(counts)) - np.eye(3)[Y]
        summed_error = softmax(z @ (head + personal)) - np.eye(3)[Y]
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
    # What it is served is the sum of both heads' logits
    logits = algorithm.predict(served, X.astype(np.float32))
    np.testing.assert_allclose(logits, X @ A @ HEAD + X @ A @ personal, rtol=1e-5, atol=1e-6)


def test_the_personal_head_starts_as_the_shared_one():
    algorithm, _ = make()
    state = algorithm.init(linear.KEY)
    chex.assert_trees_all_equal(
        state.clients.head["head"]["kernel"][0], state.server["params"]["head"]["kernel"]
    )
    assert set(state.clients.head) == {"head"}
