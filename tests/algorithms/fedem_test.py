"""FedEM against NumPy."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import ClientContext, Federation, State
from fedjax_pfl.core.examples import FederatedData, Split, client_data
from fedjax_pfl.simulation.rounds import make_rounds
from tests import cases, tiny
from tests.algorithms import linear
from tests.algorithms.served import KEY, trained

pytestmark = pytest.mark.slow("programs of a method beside the four systems")


def test_a_round_equals_numpy():
    """Two clients with 5 and 3 examples, three components, two full-batch steps in one round."""
    rng, rate, m = np.random.default_rng(0), 0.3, 3
    x, y = rng.normal(size=(8, 2)).astype(np.float32), rng.integers(0, 3, 8).astype(np.int32)
    rows = np.array([[0, 1, 2, 3, 4], [5, 6, 7, 0, 0]], np.int32)
    split = Split(rows, np.array([5, 3], np.int32))
    data = jax.tree.map(jnp.asarray, FederatedData(x, y, split, split, split))
    federation = Federation(np.array([5, 3]), (2,), 3, np.ones(2, bool), np.zeros(2, np.int32))
    training = local_training.sgd(learning_rate=rate, batch_size=5, steps=2)
    algorithm = algorithms.fedem(linear.Linear(3), training, federation, components=m)
    rounds = make_rounds(algorithm, federation, cohort=2)
    state = rounds.init(KEY)
    pi = np.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
    state = state._replace(clients=state.clients._replace(pi=jnp.asarray(pi, jnp.float32)))
    theta = np.array(state.server["params"]["fc"]["kernel"], np.float64)
    assert len(np.unique(theta)) == theta.size  # M different draws
    after, _ = rounds.run(KEY, state, data, 0, 1)

    uploads = []
    for k, n in enumerate((5, 3)):
        xk, yk = x[rows[k, :n]].astype(np.float64), y[rows[k, :n]]

        def probabilities(w, xk=xk):
            return linear.softmax(xk @ w)

        one_hot = np.eye(3)[yk]
        q = np.stack([pi[k, j] * (probabilities(theta[j]) * one_hot).sum(1) for j in range(m)])
        q /= q.sum(0)
        local = theta.copy()
        for _ in range(2):
            for j in range(m):
                local[j] -= rate * xk.T @ (q[j][:, None] * (probabilities(local[j]) - one_hot)) / n
        uploads.append(local)
        np.testing.assert_allclose(after.clients.pi[k], q.mean(1), rtol=1e-5)
    expected = (5 * uploads[0] + 3 * uploads[1]) / 8
    np.testing.assert_allclose(
        after.server["params"]["fc"]["kernel"], expected, rtol=1e-4, atol=1e-6
    )
    served = algorithm.personalize(
        State(after.server, (), ()),
        trees.row(after.clients, 0),
        ClientContext(0, client_data(data, 0), 1, KEY),
    )
    parts = [linear.softmax(x @ w) for w in expected]
    mixture = np.einsum("m,mbc->bc", np.asarray(after.clients.pi[0]), parts)
    np.testing.assert_allclose(
        np.exp(algorithm.predict(served, jnp.asarray(x))), mixture, rtol=1e-4
    )
    restricted = {**served, "classes": jnp.array([True, False, True])}
    sums = np.exp(np.asarray(algorithm.predict(restricted, jnp.asarray(x))))
    np.testing.assert_allclose(sums.sum(1), 1, rtol=1e-5)
    assert not sums[:, 1].any()


def test_one_component_is_fedavg():
    federation = tiny.federated()[1]
    fedavg = algorithms.fedavg(tiny.Net(), cases.training(), federation)
    fedem = algorithms.fedem(tiny.Net(), cases.training(), federation, components=1)
    state = fedavg.init(KEY)
    state_m = fedem.init(KEY)._replace(server=jax.tree.map(lambda leaf: leaf[None], state.server))
    upload, mixture, client, metrics = trained(fedem, state_m, 3)
    expected, _, fedavg_momentum, fedavg_metrics = trained(fedavg, state, 3)
    close = partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-6)
    close(trees.row(upload, 0), expected)
    close(trees.row(client.momentum, 0), fedavg_momentum)
    close(metrics["loss"], fedavg_metrics["loss"])
    np.testing.assert_array_equal(mixture["pi"], [1.0])


def test_a_held_out_client_estimates_its_weights():
    data, federation = tiny.federated()
    algorithm = cases.make("fedem", federation._replace(active=np.arange(6) < 5))
    state = algorithm.init(KEY)
    pi = []
    for i in (0, 5):
        ctx = ClientContext(i, client_data(data, i), 0, KEY)
        pi.append(algorithm.personalize(state, trees.row(state.clients, i), ctx)["pi"])
    np.testing.assert_array_equal(pi[0], [0.5, 0.5])
    assert float(abs(pi[1][0] - 0.5)) > 1e-3
    joined = federation._replace(active=np.arange(6) == 5, earlier=np.arange(6) < 5)
    ctx = ClientContext(0, client_data(data, 0), 0, KEY)
    later = cases.make("fedem", joined).personalize(state, trees.row(state.clients, 0), ctx)
    np.testing.assert_array_equal(later["pi"], [0.5, 0.5])  # as it learned before
    continued = algorithm.init(jax.random.key(9), state)
    chex.assert_trees_all_equal(continued.server, state.server)
