"""FedALA by hand: f = ½ (x a b − y)², the head b taken in by W, the body a as it comes down."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.fedala import Client
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import ClientContext, State
from fedjax_pfl.core.errors import UsageError
from tests import cases, tiny
from tests.algorithms import linear
from tests.algorithms.linear import KEY, T, client, deep, kernels, work
from tests.algorithms.served import trained

X, Y, RATE = 1.5, 3.0, 0.1
A, B, OWN = 0.8, 3.0, 0.5  # the global model's body and head; the client's head


def make(**own):
    data, federation = linear.federated([[[X]]], [[Y]])
    training = local_training.sgd(learning_rate=RATE, batch_size=1, epochs=2)
    own = {"weight_rate": 0.3, "first_passes": 3, **own}
    return algorithms.fedala(linear.Deep(), training, federation, **own), data


def clients(weight=1.0, learned=False, head=OWN):
    layer = {"head": {"kernel": jnp.float32([[head]])}}
    weights = {"head": {"kernel": jnp.float32([[weight]])}}
    return Client({"theta": layer, "weights": weights, "learned": jnp.asarray(learned)}, ())


def learned(weight, passes, rate):
    for _ in range(passes):
        mixed = weight * B + (1 - weight) * OWN
        weight = np.clip(weight - rate * (B - OWN) * (X * A * mixed - Y) * X * A, 0, 1)
    return weight


@pytest.mark.parametrize(("first", "before", "passes"), [(True, 1.0, 3), (False, 0.9, 1)])
def test_a_visit_by_hand(first, before, passes):
    """Several passes where W is learned for the first time, later one."""
    made, data = make()
    done = work(made, deep([[A]], [[B]]), clients(before, not first), data)
    weight = learned(before, passes, 0.3)
    assert 0 < weight < 1
    a, b = A, weight * B + (1 - weight) * OWN
    for _ in range(2):
        gap = X * a * b - Y
        a, b = a - RATE * gap * X * b, b - RATE * gap * X * a
    np.testing.assert_allclose(done.client.own["weights"]["head"]["kernel"], [[weight]], rtol=1e-5)
    np.testing.assert_allclose(np.ravel(kernels(done.upload)), [a, b], rtol=1e-5)
    np.testing.assert_allclose(done.client.own["theta"]["head"]["kernel"], [[b]], rtol=1e-5)
    assert bool(done.client.own["learned"])


def test_a_client_is_served_what_it_has_taken_in():
    made, data = make()
    state = State(deep([[A]], [[B]]), (), ())
    got = made.personalize(state, clients(), ClientContext(jnp.int32(0), client(data, 0), T, KEY))
    weight = learned(1.0, 3, 0.3)
    np.testing.assert_allclose(
        np.ravel(kernels(got)), [A, weight * B + (1 - weight) * OWN], rtol=1e-5
    )


def test_where_both_models_are_the_same_nothing_is_learned():
    made, data = make()
    done = work(made, deep([[A]], [[OWN]]), clients(), data)
    assert not bool(done.client.own["learned"])
    np.testing.assert_array_equal(done.client.own["weights"]["head"]["kernel"], [[1.0]])


def test_weights_stop_at_their_ends():
    made, data = make(weight_rate=100.0)
    done = work(made, deep([[A]], [[B]]), clients(0.5, True), data)
    assert float(done.client.own["weights"]["head"]["kernel"][0, 0]) in (0.0, 1.0)


@pytest.mark.slow("three programs of the tiny network; a visit is worked out by hand above")
def test_with_a_weight_rate_of_zero_it_is_fedavg():
    """Bit for bit, BatchNorm, momentum, decay and clipping included, whatever the client has."""
    federation = tiny.federated()[1]
    average = cases.make("fedavg", federation)
    made = cases.make("fedala", federation, {"weight_rate": 0.0})
    state = made.init(KEY)
    theta = jax.tree.map(lambda leaf: leaf + 1, state.clients.own["theta"])
    state = state._replace(
        clients=Client({**state.clients.own, "theta": theta}, state.clients.momentum)
    )
    ours, theirs = trained(made, state, 3), trained(average, average.init(KEY), 3)
    chex.assert_trees_all_equal(ours[:2], theirs[:2])
    chex.assert_trees_all_equal(ours[2].momentum, theirs[2])


def test_the_share_is_of_the_examples():
    """Of ten examples four: each has a gradient in one number of W alone, and four of them move."""
    eye = np.eye(10)
    data, federation = linear.federated([eye], [np.ones(10)])
    training = local_training.sgd(learning_rate=RATE, batch_size=4, epochs=1)
    net = linear.Deep(outputs=1, width=10)
    made = algorithms.fedala(net, training, federation, share=0.4, first_passes=1)
    own = made.init(KEY).clients.own
    own = {**trees.row(own, 0), "theta": {"head": {"kernel": jnp.zeros((10, 1))}}}
    done = work(made, deep(eye, np.full((10, 1), 2.0)), Client(own, ()), data)
    moved = np.asarray(done.client.own["weights"]["head"]["kernel"])[:, 0] != 1
    assert moved.sum() == 4


@pytest.mark.parametrize(
    "own", [{"layers": 3}, {"weight_rate": -1.0}, {"share": 0.0}, {"first_passes": 0}]
)
def test_wrong_settings(own):
    with pytest.raises(UsageError, match=f"fedala.{next(iter(own))} is"):
        make(**own)
