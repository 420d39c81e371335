"""FedFomo: weights and mixtures against NumPy, and the selection of peers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.fedfomo.method import Client, mixture
from fedjax_pfl.algorithms.shared.matching import select_peers
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import ClientContext, State
from tests import tiny
from tests.algorithms import linear
from tests.algorithms.linear import KEY, T, context, variables, weights

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 2))
Y = X @ [0.2, -0.1] + 0.1 * RNG.normal(size=5)  # so that [1, −1] is neither best nor worst
STORED = np.array([[1.0, -1.0], [0.3, 0.1], [5.0, 5.0], [0.0, -0.5]])


def setting(clients=4, validation=5, peers=3, rate=0.0, active=None, begin=0, **settings):
    """Returns FedFomo and data. With rate 0 the upload is the mixture."""
    validation_sets = [X[:validation]] * clients, [Y[:validation]] * clients
    data, federation = linear.federated([X] * clients, [Y] * clients, validation_sets)
    if active is not None:
        federation = federation._replace(active=np.asarray(active))
    training = local_training.sgd(learning_rate=rate, batch_size=8, steps=1, first_round=begin)
    algorithm = algorithms.fedfomo(linear.Linear(), training, federation, peers=peers, **settings)
    return algorithm, data


def stacked(models):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *map(variables, models))


def payload(model, peers):
    return {**variables(model), "peers": stacked(peers), "ids": jnp.arange(len(peers))}


def client_state(start=None):
    return Client(() if start is None else variables(start), ())


def loss(w, x=X, y=Y):
    return np.mean(0.5 * (x @ w - y) ** 2)


def oracle(previous, models, x=X, y=Y):
    """Computes the weights of the models and their mixture."""
    distances = np.linalg.norm(models - previous, axis=1)
    signed_weights = np.array([loss(previous, x, y) - loss(m, x, y) for m in models]) / distances
    positive = np.maximum(signed_weights, 0)
    return signed_weights, previous + positive / positive.sum() @ (models - previous)


def test_weights_and_mixture_equal_numpy():
    """θ_prev [2, −2], own model [1, −1], and three peers, one of them worse than θ_prev."""
    algorithm, data = setting(validation=3)
    previous, download = np.array([2.0, -2.0]), payload(STORED[0], STORED[1:])
    upload, trained, new_client, _ = algorithm.train(
        download, client_state(previous), context(data)
    )
    signed_weights, mixed = oracle(previous, STORED, X[:3], Y[:3])
    np.testing.assert_array_equal(signed_weights > 0, [True, True, False, True])
    np.testing.assert_allclose(upload["weights"], signed_weights[1:], rtol=1e-5)
    np.testing.assert_allclose(weights(upload), mixed, rtol=1e-5)
    np.testing.assert_array_equal(weights(trained), weights(upload))
    np.testing.assert_array_equal(weights(new_client.start), weights(upload))  # trained with rate 0


def test_reference_last():
    algorithm, data = setting(validation=3, reference="last")
    download = payload(STORED[0], STORED[1:])
    upload, _, new_client, _ = algorithm.train(download, client_state(), context(data))
    signed_weights, mixed = oracle(STORED[0], STORED[1:], X[:3], Y[:3])
    np.testing.assert_allclose(upload["weights"], signed_weights, rtol=1e-5)
    np.testing.assert_allclose(weights(upload), mixed, rtol=1e-5)
    assert new_client == client_state()


def test_shares_are_nonnegative_and_sum_to_one():
    peer_weights = jnp.array([2.0, -9.0, 6.0])
    mixed, share = mixture(variables(STORED[0]), stacked(STORED[1:]), peer_weights)
    np.testing.assert_allclose(share, [0.25, 0.0, 0.75], rtol=1e-6)
    expected = 0.25 * STORED[1] + 0.75 * STORED[3]
    np.testing.assert_allclose(weights(mixed), expected, rtol=1e-5)


def test_without_positive_weights_theta_prev_stays():
    best = np.linalg.lstsq(X, Y, rcond=None)[0]
    for reference, model, stored_client in (
        ("last", best, client_state()),
        ("start", STORED[0], client_state(best)),
    ):
        algorithm, data = setting(reference=reference)
        upload, *_ = algorithm.train(payload(model, STORED[:3]), stored_client, context(data))
        assert (upload["weights"] < 0).all()
        np.testing.assert_array_equal(weights(upload), best.astype(np.float32))


def test_without_better_peers_theta_is_the_own_model():
    """The last local training helped and no peer does, so FedFomo is Local."""
    best = np.linalg.lstsq(X, Y, rcond=None)[0]
    algorithm, data = setting(peers=2)
    download = payload(best, [STORED[2], STORED[2] + 1])
    upload, *_ = algorithm.train(download, client_state(STORED[1]), context(data))
    np.testing.assert_allclose(weights(upload), best, rtol=1e-5)


def test_an_equal_model_has_weight_zero():
    """At distance zero the weight is not 0/0."""
    algorithm, data = setting()
    peers = [STORED[0], STORED[1], STORED[0]]
    download = payload(STORED[0], peers)
    upload, *_ = algorithm.train(download, client_state(STORED[0]), context(data))
    np.testing.assert_array_equal(upload["weights"][jnp.array([0, 2])], 0.0)
    np.testing.assert_allclose(weights(upload), STORED[1], rtol=1e-5)


def test_local_training_follows_the_mixture():
    algorithm, data = setting(rate=0.1)
    previous, download = np.array([2.0, -2.0]), payload(STORED[0], STORED[1:])
    upload, _, new_client, _ = algorithm.train(download, client_state(previous), context(data))
    _, mixed = oracle(previous, STORED)
    np.testing.assert_allclose(weights(new_client.start), mixed, rtol=1e-5)
    expected = mixed - 0.1 * X.T @ (X @ mixed - Y) / len(X)
    np.testing.assert_allclose(weights(upload), expected, rtol=1e-5)


AFFINITY = jnp.array([0.5, 9.0, 3.0, -1.0, 7.0, 0.0])
OPEN = jnp.array([True, False, True, True, True, True])


def select(epsilon, affinity=AFFINITY, peers=2):
    keys = jax.random.split(KEY, 500)
    sample = jax.jit(
        jax.vmap(lambda key: select_peers(affinity, OPEN, peers, jnp.float32(epsilon), key))
    )
    return np.asarray(sample(keys))


def test_without_exploration_the_best_peers_are_selected():
    assert (select(0.0) == [4, 2]).all()


def test_exploration_is_uniform_over_free_clients():
    ids = select(1.0)
    assert (ids[:, 0] != ids[:, 1]).all()
    counts = np.bincount(ids.ravel(), minlength=6)
    assert counts[1] == 0
    np.testing.assert_allclose(counts[[0, 2, 3, 4, 5]], 200, atol=45)


def test_each_peer_is_explored_independently():
    """The best of five is selected first with probability 1 − ε + ε/5."""
    share = (select(0.3)[:, 0] == 4).mean()
    np.testing.assert_allclose(share, 0.7 + 0.3 / 5, atol=0.06)


def test_ties_are_broken_at_random():
    counts = np.bincount(select(0.0, jnp.zeros(6)).ravel(), minlength=6)
    assert counts[1] == 0
    np.testing.assert_allclose(counts[[0, 2, 3, 4, 5]], 200, atol=45)


def sends(algorithm, state, i, t=0, draws=40):
    send = jax.jit(
        jax.vmap(lambda key: algorithm.send(state, ClientContext(i, None, jnp.int32(t), key)))
    )
    return send(jax.random.split(KEY, draws))


def test_peers_are_other_active_clients():
    algorithm, _ = setting(5, peers=2, active=[True, True, False, True, True])
    state = algorithm.init(KEY)
    for i, peers in ((0, {1, 3, 4}), (4, {0, 1, 3}), (2, {0, 1, 3, 4})):
        assert set(np.asarray(sends(algorithm, state, i)["ids"]).ravel()) == peers


@pytest.mark.slow("a run")
@pytest.mark.parametrize("begin", [0, 20])
def test_exploration_decays_to_zero_in_a_phase(begin):
    algorithm, _ = setting(epsilon=1.0, epsilon_decay=0.25, peers=1, begin=begin)
    state = algorithm.init(KEY)
    rows = state.rows._replace(affinity=state.rows.affinity.at[0, 3].set(1.0))
    state = state._replace(rows=rows)
    shares = [
        (np.asarray(sends(algorithm, state, 0, begin + t)["ids"]) == 3).mean()
        for t in range(0, 9, 2)
    ]
    assert shares[0] < 0.6
    assert shares[2:] == [1.0, 1.0, 1.0]


def test_the_download_has_the_own_and_the_peers_models():
    algorithm, _ = setting()
    state = algorithm.init(KEY)
    state = state._replace(rows=state.rows._replace(models=stacked(STORED)))
    got = algorithm.send(state, ClientContext(2, None, T, KEY))
    stored = STORED.astype(np.float32)
    np.testing.assert_array_equal(weights(got), stored[2])
    np.testing.assert_array_equal(weights(got["peers"]), stored[np.asarray(got["ids"])])


def test_the_server_stores_models_and_sums_weights():
    algorithm, _ = setting(peers=2)
    state = algorithm.init(KEY)
    rows = jax.tree.map(jnp.asarray, state.rows._replace(models=stacked(STORED)))
    ids, arrived = jnp.array([1, 4, 3]), jnp.array([True, False, True])  # the second is absent
    payloads = {"ids": jnp.array([[0, 2], [1, 3], [0, 1]])}
    peer_weights = jnp.array([[1, 2], [0, 0], [3, -4.0]])
    uploads = {**stacked([[7, 7], [0, 0], [8, 8]]), "weights": peer_weights}
    for _ in range(2):
        _, rows = algorithm.receive(
            State((), rows, ()), tiny.cohort(tiny.TRAIN, ids, arrived, payloads, uploads, T)
        )
    expected = np.zeros((4, 4))
    expected[1, [0, 2]], expected[3, [0, 1]] = [2, 4], [6, -8]
    np.testing.assert_array_equal(rows.affinity, expected)
    models = np.float32([STORED[0], [7, 7], STORED[2], [8, 8]])
    np.testing.assert_array_equal(weights(rows.models), models)


def test_evaluation_uses_the_peers_with_the_largest_affinity():
    """Only `send` explores. The own model has no share here."""
    algorithm, data = setting(peers=1, epsilon=1.0)
    rows = algorithm.init(KEY).rows._replace(models=stacked(STORED))
    for best in (1, 3):
        rows = rows._replace(affinity=jnp.zeros((4, 4)).at[0, best].set(1.0))
        served = algorithm.personalize(State((), rows, ()), client_state(STORED[0]), context(data))
        np.testing.assert_allclose(weights(served), STORED[best], rtol=1e-5)
