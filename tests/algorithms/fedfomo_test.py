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
Y = X @ [0.2, -0.1] + 0.1 * RNG.normal(size=5)  # [1, −1] is neither the best nor the worst model
STORED = np.array([[1.0, -1.0], [0.3, 0.1], [5.0, 5.0], [0.0, -0.5]])
BEST = np.linalg.lstsq(X, Y, rcond=None)[0]


def setting(clients=4, validation=5, peers=3, active=None, begin=0, **settings):
    validation_sets = [X[:validation]] * clients, [Y[:validation]] * clients
    data, federation = linear.federated([X] * clients, [Y] * clients, validation_sets)
    if active is not None:
        federation = federation._replace(active=np.asarray(active))
    training = local_training.sgd(learning_rate=0.1, batch_size=8, steps=1)
    settings |= {"peers": peers, "first_round": begin}
    algorithm = algorithms.fedfomo(linear.Linear(), training, federation, **settings)
    return algorithm, data


def stacked(models):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *map(variables, models))


def loss(w, x, y):
    return np.mean(0.5 * (x @ w - y) ** 2)


def oracle(previous, models, x, y):
    """Computes the weights of the models and their mixture."""
    signed_weights = np.zeros(len(models))
    for n, model in enumerate(models):
        distance = np.linalg.norm(model - previous)
        if distance > 0:
            signed_weights[n] = (loss(previous, x, y) - loss(model, x, y)) / distance
    positive = np.maximum(signed_weights, 0)
    shares = positive / positive.sum() if positive.any() else positive
    return signed_weights, previous + shares @ (models - previous)


@pytest.mark.parametrize(
    ("start", "models", "positive"),
    [
        # The start of the last training or None, the client's and the peers' models, positive w
        ([2.0, -2.0], STORED, [True, True, False, True]),
        (None, STORED, [False, True, False, True]),
        (None, [BEST, *STORED[:3]], [False] * 4),  # θ_prev stays
        (BEST, STORED, [False] * 4),
        (STORED[1], [BEST, *(STORED[2] + n for n in range(3))], [True] + [False] * 3),  # Local
        (STORED[0], STORED[[0, 0, 1, 0]], [False, False, True, False]),  # equal models: no 0/0
    ],
)
def test_mixture_and_local_training_equal_numpy(start, models, positive):
    algorithm, data = setting(validation=3, reference="last" if start is None else "start")
    models = np.array(models)
    previous = models[0] if start is None else np.array(start)
    payload = {**variables(models[0]), "peers": stacked(models[1:]), "ids": jnp.arange(3)}
    client = Client(() if start is None else variables(start), ())
    upload, _, new_client, _ = algorithm.train(payload, client, context(data))
    signed_weights, mixed = oracle(previous, models, X[:3], Y[:3])
    # All of the start that is not the server's copy of the client's last model.
    shares = np.maximum(signed_weights, 0) / max(np.maximum(signed_weights, 0).sum(), 1e-9)
    kept = 1 - shares[0] if start is not None else shares[1:].sum()
    share = algorithm.kept_change(payload, client, context(data))
    np.testing.assert_allclose(share, kept, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(signed_weights > 0, positive)
    np.testing.assert_allclose(upload["weights"], signed_weights[1:], rtol=1e-5, atol=1e-7)
    if start is not None:
        tolerance = 1e-5 if any(positive) else 0
        np.testing.assert_allclose(weights(new_client.start), np.float32(mixed), rtol=tolerance)
    trained = mixed - 0.1 * X.T @ (X @ mixed - Y) / len(X)
    np.testing.assert_allclose(weights(upload), trained, rtol=1e-5)


def test_the_mixture_keeps_the_dtype():
    models = {"w": jnp.bfloat16([[1.0], [3.0]])}
    mixed, share = mixture({"w": jnp.bfloat16([0.0])}, models, jnp.float32([1.0, 1.0]))
    np.testing.assert_array_equal(mixed["w"], jnp.bfloat16([2.0]))
    assert mixed["w"].dtype == jnp.bfloat16
    assert share.dtype == jnp.float32


AFFINITY = jnp.array([0.5, 9.0, 3.0, -1.0, 7.0, 0.0])
OPEN = jnp.array([True, False, True, True, True, True])


def select(epsilon, affinity=AFFINITY):
    keys = jax.random.split(KEY, 500)
    sample = jax.jit(jax.vmap(lambda key: select_peers(affinity, OPEN, 2, epsilon, key)))
    return np.asarray(sample(keys))


def test_selection_of_peers():
    """The best peers; each is replaced by a random one with probability ε; ties are random."""
    assert (select(0.0) == [4, 2]).all()
    share = (select(0.3)[:, 0] == 4).mean()
    np.testing.assert_allclose(share, 0.7 + 0.3 / 5, atol=0.06)
    for ids in (select(1.0), select(0.0, jnp.zeros(6))):
        assert (ids[:, 0] != ids[:, 1]).all()
        counts = np.bincount(ids.ravel(), minlength=6)
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


def test_exploration_decays_to_zero_in_a_phase():
    algorithm, _ = setting(epsilon=1.0, epsilon_decay=0.25, peers=1, begin=20)
    state = algorithm.init(KEY)
    rows = state.rows._replace(affinity=state.rows.affinity.at[0, 3].set(1.0))
    state = state._replace(rows=rows)
    shares = [(np.asarray(sends(algorithm, state, 0, t)["ids"]) == 3).mean() for t in (20, 24, 28)]
    assert shares[0] < 0.6
    assert shares[1:] == [1.0, 1.0]


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
    # The download has the client's own model and those of the peers.
    download = algorithm.send(State((), rows, ()), ClientContext(3, None, T, KEY))
    np.testing.assert_array_equal(weights(download), models[3])
    peer_models = models[np.asarray(download["ids"])]
    np.testing.assert_array_equal(weights(download["peers"]), peer_models)


def test_evaluation_uses_the_peers_with_the_largest_affinity():
    """Only `send` explores. The own model has no share here."""
    algorithm, data = setting(peers=1, epsilon=1.0)
    rows = algorithm.init(KEY).rows._replace(models=stacked(STORED))
    for best in (1, 3):
        rows = rows._replace(affinity=jnp.zeros((4, 4)).at[0, best].set(1.0))
        client = Client(variables(STORED[0]), ())
        served = algorithm.personalize(State((), rows, ()), client, context(data))
        np.testing.assert_allclose(weights(served), STORED[best], rtol=1e-5)
