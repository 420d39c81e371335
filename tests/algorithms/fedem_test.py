"""FedEM against a round in NumPy."""

from functools import partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import ClientContext, Federation, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, Split, client_data
from fedjax_pfl.core.task import regression
from fedjax_pfl.simulation.rounds import make_rounds
from tests import cases, tiny
from tests.algorithms.served import KEY, trained


class Softmax(nn.Module):
    """Logits that are linear in x."""

    outputs: int = 3

    @nn.compact
    def __call__(self, x, train=False, mask=None):
        return nn.Dense(self.outputs, use_bias=False, name="fc")(x)


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_a_round_equals_numpy():
    """Two clients with 5 and 3 examples, three components, two full-batch steps in one round."""
    rng, rate, m = np.random.default_rng(0), 0.3, 3
    x, y = rng.normal(size=(8, 2)).astype(np.float32), rng.integers(0, 3, 8).astype(np.int32)
    rows = np.array([[0, 1, 2, 3, 4], [5, 6, 7, 0, 0]], np.int32)
    split = Split(rows, np.array([5, 3], np.int32))
    data = jax.tree.map(jnp.asarray, FederatedData(x, y, split, split, split))
    federation = Federation(np.array([5, 3]), (2,), 3, np.ones(2, bool), np.zeros(2, np.int32))
    training = local_training.sgd(learning_rate=rate, batch_size=5, steps=2)
    made = algorithms.fedem(Softmax(), training, federation, components=m)
    rounds = make_rounds(made, federation, cohort=2)
    state = rounds.init(KEY)
    pi = np.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
    state = state._replace(clients=state.clients._replace(pi=jnp.asarray(pi, jnp.float32)))
    theta = np.array(state.server["params"]["fc"]["kernel"], np.float64)
    assert len(np.unique(theta)) == theta.size  # M different draws
    got, _ = rounds.run(KEY, state, data, 0, 1)

    uploads = []
    for k, n in enumerate((5, 3)):
        xk, yk = x[rows[k, :n]].astype(np.float64), y[rows[k, :n]]

        def chance(w, xk=xk):
            return softmax(xk @ w)

        truth = np.eye(3)[yk]
        q = np.stack([pi[k, j] * (chance(theta[j]) * truth).sum(1) for j in range(m)])
        q /= q.sum(0)
        own = theta.copy()
        for _ in range(2):
            for j in range(m):
                own[j] -= rate * xk.T @ (q[j][:, None] * (chance(own[j]) - truth)) / n
        uploads.append(own)
        np.testing.assert_allclose(got.clients.pi[k], q.mean(1), rtol=1e-5)
    wanted = (5 * uploads[0] + 3 * uploads[1]) / 8
    np.testing.assert_allclose(got.server["params"]["fc"]["kernel"], wanted, rtol=1e-4, atol=1e-6)
    served = made.personalize(
        State(got.server, (), ()),
        trees.row(got.clients, 0),
        ClientContext(0, client_data(data, 0), 1, KEY),
    )
    parts = [softmax(x @ w) for w in wanted]
    mixed = np.einsum("m,mbc->bc", np.asarray(got.clients.pi[0]), parts)
    np.testing.assert_allclose(np.exp(made.predict(served, jnp.asarray(x))), mixed, rtol=1e-4)
    closed = {**served, "classes": jnp.array([True, False, True])}
    sums = np.exp(np.asarray(made.predict(closed, jnp.asarray(x))))
    np.testing.assert_allclose(sums.sum(1), 1, rtol=1e-5)
    assert not sums[:, 1].any()


def make(components=2, **changes):
    federation = tiny.federated()[1]._replace(**changes)
    return algorithms.fedem(tiny.Net(), cases.training(), federation, components=components)


def test_one_component_is_fedavg():
    federation = tiny.federated()[1]
    average = algorithms.fedavg(tiny.Net(), cases.training(), federation)
    one, state = make(1), average.init(KEY)
    begun = one.init(KEY)._replace(server=jax.tree.map(lambda leaf: leaf[None], state.server))
    upload, mixture, client, metrics = trained(one, begun, 3)
    wanted, _, kept, other = trained(average, state, 3)
    close = partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-6)
    close(trees.row(upload, 0), wanted)
    close(trees.row(client.momentum, 0), kept)
    close(metrics["loss"], other["loss"])
    np.testing.assert_array_equal(mixture["pi"], [1.0])


def test_a_novel_client_weighs_by_its_own_examples():
    made = make(active=np.arange(6) < 5)
    state = made.init(KEY)
    data, pi = tiny.federated()[0], []
    for i in (0, 5):
        ctx = ClientContext(i, client_data(data, i), 0, KEY)
        pi.append(made.personalize(state, trees.row(state.clients, i), ctx)["pi"])
    np.testing.assert_array_equal(pi[0], [0.5, 0.5])
    assert float(abs(pi[1][0] - 0.5)) > 1e-3


def test_what_cannot_be():
    federation = tiny.federated()[1]
    with pytest.raises(UsageError, match="at least 1"):
        make(0)
    with pytest.raises(UsageError, match="classes"):
        algorithms.fedem(tiny.Net(), cases.training(), federation._replace(task=regression()))
    made, average = make(), cases.make("fedavg", federation)
    with pytest.raises(UsageError, match="copies"):
        made.init(KEY, average.init(KEY))
    own = made.init(jax.random.key(9))
    chex.assert_trees_all_equal(made.init(KEY, own).server, own.server)
