"""FedRoD against NumPy: three examples of one class, one of another, none of a third."""

import chex
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.fedrod import Client
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.task import classification
from tests.algorithms import linear
from tests.algorithms.linear import TASK, deep, kernels, work

X = np.array([[1.0, 0.5], [0.2, -1.0], [0.3, 2.0], [-1.0, 0.4]])
Y = np.array([0, 0, 2, 0])
A = np.array([[0.5, -0.3], [0.2, 0.7]])
HEAD, OWN = (
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
    made, data = make()
    own = Client({"head": deep(A, OWN)["params"]["head"]}, ())
    done = work(made, deep(A, HEAD), own, data)
    a, head, mine = A, HEAD, OWN
    counts = np.array([3.0, 0.0, 1.0])
    for _ in range(STEPS):
        z = X @ a
        with np.errstate(divide="ignore"):
            balanced = softmax(z @ head + np.log(counts)) - np.eye(3)[Y]
        plain = softmax(z @ (head + mine)) - np.eye(3)[Y]
        a, head, mine = (
            a - RATE * X.T @ balanced @ head.T / 4,
            head - RATE * z.T @ balanced / 4,
            mine - RATE * z.T @ plain / 4,
        )
    body, shared = kernels(done.upload)
    np.testing.assert_allclose(body, a, rtol=1e-5)
    np.testing.assert_allclose(shared, head, rtol=1e-5)
    np.testing.assert_allclose(done.client.own["head"]["kernel"], mine, rtol=1e-5)
    np.testing.assert_allclose(kernels(done.variables)[1], head + mine, rtol=1e-5, atol=1e-6)
    served = made.personalize(State(deep(A, HEAD), (), ()), done.client, None)
    np.testing.assert_allclose(kernels(served)[1], HEAD + mine, rtol=1e-5, atol=1e-6)
    # What it is served is the sum of both heads' logits
    logits = made.predict(served, X.astype(np.float32))
    np.testing.assert_allclose(logits, X @ A @ HEAD + X @ A @ mine, rtol=1e-5, atol=1e-6)


def test_the_own_head_begins_as_the_shared_one():
    made, _ = make()
    state = made.init(linear.KEY)
    chex.assert_trees_all_equal(
        state.clients.own["head"]["kernel"][0], state.server["params"]["head"]["kernel"]
    )
    assert set(state.clients.own) == {"head"}


def test_without_classes_it_is_refused():
    with pytest.raises(UsageError, match="with classes"):
        make(task=TASK)
