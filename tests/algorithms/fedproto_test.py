"""FedProto against NumPy: a network (x A) B, whose z is x A."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.local import Client
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.errors import UsageError
from tests.algorithms import linear
from tests.algorithms.fedrod_test import CLASSES, HEAD, A, X, Y, softmax
from tests.algorithms.linear import KEY, TASK, deep, kernels, work

RATE, STEPS, PENALTY = 0.2, 3, 0.7
PROTOTYPES, SEEN = np.array([[1.0, -1.0], [5.0, 5.0], [0.0, 0.0]]), np.array([True, True, False])
PAYLOAD = {"prototypes": jnp.float32(PROTOTYPES), "seen": jnp.asarray(SEEN)}


def make(task=CLASSES, name="fedproto", **own):
    data, federation = linear.federated([X], [Y])
    data = data._replace(y=Y.astype(np.int32))
    training = local_training.sgd(learning_rate=RATE, batch_size=4, epochs=STEPS)
    net, federation = linear.Deep(outputs=3, width=2), federation._replace(outputs=3, task=task)
    return getattr(algorithms, name)(net, training, federation, **own), data


def test_a_visit_by_hand():
    """Class 2 has no prototype, so that its example is not pulled."""
    made, data = make(penalty=PENALTY)
    done = work(made, PAYLOAD, Client(deep(A, HEAD), ()), data)
    a, head = A, HEAD
    for _ in range(STEPS):
        z = X @ a
        by_logit = (softmax(z @ head) - np.eye(3)[Y]) / 4
        away = np.where(SEEN[Y][:, None], z - PROTOTYPES[Y], 0.0) * 2 / 2 / 4
        a, head = (
            a - RATE * X.T @ (by_logit @ head.T + PENALTY * away),
            head - RATE * z.T @ by_logit,
        )
    got = kernels(done.client.variables)
    np.testing.assert_allclose(got[0], a, rtol=1e-5)
    np.testing.assert_allclose(got[1], head, rtol=1e-5)
    z = X @ a
    np.testing.assert_allclose(done.upload["prototypes"][0], z[Y == 0].mean(0), rtol=1e-5)
    np.testing.assert_allclose(done.upload["prototypes"][2], z[Y == 2].mean(0), rtol=1e-5)
    np.testing.assert_array_equal(done.upload["counts"], [3, 0, 1])


def test_without_a_penalty_its_models_are_locals():
    """Bit for bit."""
    (made, data), (alone, _) = make(penalty=0.0), make(name="local")
    start = alone.init(KEY)
    mine = trees.row(start.clients, 0)
    ours, theirs = work(made, PAYLOAD, mine, data), work(alone, (), mine, data)
    chex.assert_trees_all_equal(ours.client, theirs.client)


def test_the_server_by_hand():
    """Of class 0 three examples and one; of class 1 none that arrived; class 2 is new."""
    made, _ = make()
    uploads = [
        {"prototypes": jnp.float32(p), "counts": jnp.float32(c)}
        for p, c in (
            ([[4.0, 0.0], [0.0, 0.0], [1.0, 2.0]], [3, 0, 2]),
            ([[0.0, 8.0], [0.0, 0.0], [0.0, 0.0]], [1, 0, 0]),
            ([[9.0, 9.0], [9.0, 9.0], [9.0, 9.0]], [9, 9, 9]),
        )
    ]
    state = linear.met(made, State(PAYLOAD, (), ()), [5, 1, 27], uploads, [True, True, False])
    np.testing.assert_allclose(state.server["prototypes"], [[3, 2], [5, 5], [1, 2]], rtol=1e-6)
    assert state.server["seen"].all()


def test_the_nearest_prototype_decides():
    made, _ = make()
    served = made.personalize(State(PAYLOAD, (), ()), Client(deep(A, HEAD), ()), None)
    x = X.astype(np.float32)
    logits, z = made.predict(served, x), X @ A
    for c in (0, 1):
        np.testing.assert_allclose(logits[:, c], -np.square(z - PROTOTYPES[c]).sum(1), rtol=1e-5)
    unseen = {**served, "seen": jnp.zeros(3, bool)}
    by_head = make(decides="head")[0]
    plain = by_head.personalize(State(PAYLOAD, (), ()), Client(deep(A, HEAD), ()), None)
    assert set(plain) == {"params"}
    np.testing.assert_array_equal(made.predict(unseen, x), by_head.predict(plain, x))


def test_a_class_without_a_prototype_is_farthest_and_its_loss_stays_small():
    """Distances 1 and 9 to the prototypes, so 10 to class 2."""
    made, _ = make()
    unit = {"prototypes": jnp.float32([[0, 0], [2, 0], [7, 7]]), "seen": jnp.asarray(SEEN)}
    served = made.personalize(State(unit, (), ()), Client(deep(np.eye(2), HEAD), ()), None)
    logits = made.predict(served, jnp.float32([[-1.0, 0.0]]))
    np.testing.assert_array_equal(logits, [[-1.0, -9.0, -10.0]])
    loss = CLASSES.loss(logits, jnp.int32([2]), jnp.ones(3, bool))
    np.testing.assert_allclose(loss, 10 + np.log(np.exp([-1.0, -9.0, -10.0]).sum()), rtol=1e-5)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"penalty": -1.0}, "fedproto.penalty is"),
        ({"decides": "dice"}, "fedproto.decides is"),
        ({"task": TASK}, "with classes"),
    ],
)
def test_wrong_settings(own, said):
    with pytest.raises(UsageError, match=said):
        make(**own)


def test_a_network_without_a_head_of_vectors_is_refused():
    _, federation = linear.federated([X], [Y])
    federation = federation._replace(task=CLASSES)
    net = linear.Deep(outputs=3, width=2)
    object.__setattr__(net, "head", "nothing")
    training = local_training.sgd(steps=1)
    with pytest.raises(UsageError, match=r"^fedproto compares the inputs of the head"):
        algorithms.fedproto(net, training, federation)
