"""FedAS against NumPy: a network (x A) B, whose z is x A; batches of two and one epoch."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.fedas import Client
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.errors import UsageError
from tests.algorithms import linear
from tests.algorithms.fedrod_test import CLASSES, HEAD, A, X, Y, softmax
from tests.algorithms.linear import KEY, TASK, deep, kernels, met, work

RATE, ALIGN, STEPS = 0.2, 0.3, 3
MINE = np.array([[0.1, 0.9], [-0.6, 0.2]])  # the body of the client's own last model
BODY, HEAD_PART = (trees.split(deep(A, HEAD), {name})[0] for name in ("body", "head"))


def make(task=CLASSES, name="fedas", batch_size=4, **own):
    data, federation = linear.federated([X], [Y])
    data = data._replace(y=Y.astype(np.int32))
    training = local_training.sgd(learning_rate=RATE, batch_size=batch_size, epochs=STEPS)
    net, federation = linear.Deep(outputs=3, width=2), federation._replace(outputs=3, task=task)
    return getattr(algorithms, name)(net, training, federation, **own), data


def gradients(x, y, a, head):
    z = x @ a
    by_logit = (softmax(z @ head) - np.eye(3)[y]) / len(y)
    return x.T @ by_logit @ head.T, z.T @ by_logit


def test_a_visit_by_hand():
    """Two passes of alignment: class 0 has three examples and weighs as class 2 with one."""
    made, data = make(align_rate=ALIGN, align_epochs=2)
    done = work(made, BODY, Client(deep(MINE, HEAD), ()), data)
    of = {c: X[[i for i in range(4) if Y[i] == c]] for c in (0, 2)}
    prototypes = {c: (x @ MINE).mean(0) for c, x in of.items()}
    a, head = A, HEAD
    for _ in range(2):
        slopes = [x.T @ (2 * (x @ a - prototypes[c]) / 2 / len(x)) for c, x in of.items()]
        a = a - ALIGN * sum(slopes)
    for _ in range(STEPS):
        by_a, by_head = gradients(X, Y, a, head)
        a, head = a - RATE * by_a, head - RATE * by_head
    got = kernels(done.variables)
    np.testing.assert_allclose(got[0], a, rtol=1e-5)
    np.testing.assert_allclose(got[1], head, rtol=1e-5)
    expected = sum(np.square(part).sum() for part in gradients(X, Y, a, head))
    np.testing.assert_allclose(done.upload["fisher"], expected, rtol=1e-4)
    np.testing.assert_allclose(kernels({"params": done.upload["params"]})[0], a, rtol=1e-5)
    chex.assert_trees_all_equal(done.client.own, done.variables)


def test_fisher_is_summed_over_batches():
    """Of three examples and one, in the order in which they are stored."""
    made, data = make(batch_size=3)
    done = work(made, BODY, Client(deep(MINE, HEAD), ()), data)
    a, head = kernels(done.variables)
    each = [gradients(X[s], Y[s], a, head) for s in (slice(0, 3), slice(3, 4))]
    expected = sum(np.square(part).sum() for pair in each for part in pair)
    np.testing.assert_allclose(done.upload["fisher"], expected, rtol=1e-4)


def test_the_server_weighs_by_fisher():
    """3 : 1, whatever the numbers of examples; who did not arrive has none."""
    made, _ = make()
    bodies = [
        {**trees.split(deep(s * A, HEAD), {"body"})[0], "fisher": jnp.float32(f)}
        for s, f in ((1.0, 3.0), (5.0, 1.0), (99.0, 9.0))
    ]
    state = met(made, State(BODY, (), ()), [1, 50, 9], bodies, [True, True, False])
    np.testing.assert_allclose(kernels(state.server)[0], 2 * A, rtol=1e-5)
    flat = [{**body, "fisher": jnp.float32(0)} for body in bodies]
    still = met(made, State(BODY, (), ()), [1, 50, 9], flat, [True, True, False])
    chex.assert_trees_all_equal(still.server, BODY)


def test_without_alignment_a_visit_is_fedpers():
    """Bit for bit."""
    (made, data), (per, _) = make(align_rate=0.0), make(name="fedper")
    ours = work(made, BODY, Client(deep(MINE, HEAD), ()), data)
    start = trees.row(per.init(KEY).clients, 0)
    theirs = work(per, BODY, start._replace(own=HEAD_PART), data)
    chex.assert_trees_all_equal(ours.variables, theirs.variables)


def test_what_is_served_and_phases():
    made, _ = make()
    state = made.init(KEY, State(deep(A, HEAD), (), ()))
    np.testing.assert_array_equal(kernels(trees.row(state.clients.own, 0))[1], np.float32(HEAD))
    own = Client(deep(MINE, HEAD), ())
    assert made.personalize(state, own, None) is own.own
    moved = state._replace(server=trees.split(deep(MINE, HEAD), {"body"})[0])
    chex.assert_trees_all_equal(made.init(KEY, moved), moved)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"align_rate": -1.0}, "fedas.align_rate is"),
        ({"align_epochs": 0}, "fedas.align_epochs is"),
        ({"task": TASK}, "with classes"),
    ],
)
def test_wrong_settings(own, said):
    with pytest.raises(UsageError, match=said):
        make(**own)
