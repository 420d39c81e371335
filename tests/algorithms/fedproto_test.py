"""FedProto against NumPy, on the network (x A) B with features x A."""

import jax.numpy as jnp
import numpy as np

from fedjax_pfl.algorithms.local import LocalClient
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import HEAD, A, X, Y, deep, kernels, train_client

RATE, STEPS, PENALTY = 0.2, 3, 0.7
PROTOTYPES, HAS_PROTOTYPE = (
    np.array([[1.0, -1.0], [5.0, 5.0], [0.0, 0.0]]),
    np.array([True, True, False]),
)
PAYLOAD = {"prototypes": jnp.float32(PROTOTYPES), "seen": jnp.asarray(HAS_PROTOTYPE)}


def test_local_training_by_hand():
    """Class 2 has no prototype, so its example has no penalty."""
    algorithm, data = linear.make_classifier("fedproto", penalty=PENALTY)
    result = train_client(algorithm, PAYLOAD, LocalClient(deep(A, HEAD), ()), data)
    a, head = A, HEAD
    for _ in range(STEPS):
        z = X @ a
        by_logit = (linear.softmax(z @ head) - np.eye(3)[Y]) / 4
        distance_grad = np.where(HAS_PROTOTYPE[Y][:, None], z - PROTOTYPES[Y], 0.0) * 2 / 2 / 4
        a, head = (
            a - RATE * X.T @ (by_logit @ head.T + PENALTY * distance_grad),
            head - RATE * z.T @ by_logit,
        )
    got = kernels(result.client.variables)
    np.testing.assert_allclose(got[0], a, rtol=1e-5)
    np.testing.assert_allclose(got[1], head, rtol=1e-5)
    z = X @ a
    np.testing.assert_allclose(result.upload["prototypes"][0], z[Y == 0].mean(0), rtol=1e-5)
    np.testing.assert_allclose(result.upload["prototypes"][2], z[Y == 2].mean(0), rtol=1e-5)
    np.testing.assert_allclose(result.upload["prototypes"][1], PROTOTYPES[1])  # no change there
    np.testing.assert_array_equal(result.upload["counts"], [3, 0, 1])


def test_the_server_by_hand():
    """Class 0 has three examples and one, class 1 none, class 2 is new."""
    algorithm, _ = linear.make_classifier("fedproto")
    uploads = [
        {"prototypes": jnp.float32(p), "counts": jnp.float32(c)}
        for p, c in (
            ([[4.0, 0.0], [0.0, 0.0], [1.0, 2.0]], [3, 0, 2]),
            ([[0.0, 8.0], [0.0, 0.0], [0.0, 0.0]], [1, 0, 0]),
            ([[9.0, 9.0], [9.0, 9.0], [9.0, 9.0]], [9, 9, 9]),
        )
    ]
    state = linear.receive(
        algorithm, State(PAYLOAD, (), ()), [5, 1, 27], uploads, [True, True, False]
    )
    np.testing.assert_allclose(state.server["prototypes"], [[3, 2], [5, 5], [1, 2]], rtol=1e-6)
    assert state.server["seen"].all()


def test_prediction_by_the_nearest_prototype():
    algorithm, _ = linear.make_classifier("fedproto")
    served = algorithm.personalize(State(PAYLOAD, (), ()), LocalClient(deep(A, HEAD), ()), None)
    x = X.astype(np.float32)
    logits, z = algorithm.predict(served, x), X @ A
    for c in (0, 1):
        np.testing.assert_allclose(logits[:, c], -np.square(z - PROTOTYPES[c]).sum(1), rtol=1e-5)
    no_prototypes = {**served, "seen": jnp.zeros(3, bool)}
    by_head = linear.make_classifier("fedproto", decides="head")[0]
    served_by_head = by_head.personalize(
        State(PAYLOAD, (), ()), LocalClient(deep(A, HEAD), ()), None
    )
    assert set(served_by_head) == {"params"}
    np.testing.assert_array_equal(
        algorithm.predict(no_prototypes, x), by_head.predict(served_by_head, x)
    )


def test_a_class_without_a_prototype_has_a_finite_loss():
    """The distances to the prototypes are 1 and 9, so 10 for class 2."""
    algorithm, _ = linear.make_classifier("fedproto")
    unit = {"prototypes": jnp.float32([[0, 0], [2, 0], [7, 7]]), "seen": jnp.asarray(HAS_PROTOTYPE)}
    served = algorithm.personalize(
        State(unit, (), ()), LocalClient(deep(np.eye(2), HEAD), ()), None
    )
    logits = algorithm.predict(served, jnp.float32([[-1.0, 0.0]]))
    np.testing.assert_array_equal(logits, [[-1.0, -9.0, -10.0]])
    loss = linear.CLASSES.loss(logits, jnp.int32([2]), jnp.ones(3, bool))
    np.testing.assert_allclose(loss, 10 + np.log(np.exp([-1.0, -9.0, -10.0]).sum()), rtol=1e-5)
