"""FedFomo's weights against NumPy, the mixture they make, and who is sent to whom."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.fedfomo.method import Client, mixture
from fedjax_pfl.algorithms.shared.matching import leading
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import ClientContext, State
from fedjax_pfl.core.errors import UsageError
from tests import tiny
from tests.algorithms import linear
from tests.algorithms.linear import KEY, T, client, variables, weights

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 2))
Y = X @ [0.2, -0.1] + 0.1 * RNG.normal(size=5)  # so that [1, −1] is neither best nor worst
STORED = np.array([[1.0, -1.0], [0.3, 0.1], [5.0, 5.0], [0.0, -0.5]])


def setting(clients=4, validation=5, peers=3, rate=0.0, active=None, begin=0, **settings):
    """Clients that train with rate 0, so that what they upload is the mixture."""
    more = [X[:validation]] * clients, [Y[:validation]] * clients
    data, federation = linear.federated([X] * clients, [Y] * clients, more)
    if active is not None:
        federation = federation._replace(active=np.asarray(active))
    training = local_training.sgd(learning_rate=rate, batch_size=8, steps=1, first_round=begin)
    made = algorithms.fedfomo(linear.Linear(), training, federation, peers=peers, **settings)
    return made, data


def stacked(models):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *map(variables, models))


def payload(own, peers):
    return {**variables(own), "peers": stacked(peers), "ids": jnp.arange(len(peers))}


def home(start=None):
    return Client(() if start is None else variables(start), ())


def loss(w, x=X, y=Y):
    return np.mean(0.5 * (x @ w - y) ** 2)


def oracle(previous, models, x=X, y=Y):
    """The weights of the models and what they are mixed to."""
    distances = np.linalg.norm(models - previous, axis=1)
    signed = np.array([loss(previous, x, y) - loss(m, x, y) for m in models]) / distances
    positive = np.maximum(signed, 0)
    return signed, previous + positive / positive.sum() @ (models - previous)


def test_weights_and_mixture_equal_numpy():
    """θ_prev [2, −2], own model [1, −1], and three peers, of which one is worse than θ_prev."""
    made, data = setting(validation=3)
    previous, sent = np.array([2.0, -2.0]), payload(STORED[0], STORED[1:])
    upload, trained, stays, _ = made.train(
        sent, home(previous), ClientContext(0, client(data, 0), T, KEY)
    )
    signed, mixed = oracle(previous, STORED, X[:3], Y[:3])
    np.testing.assert_array_equal(signed > 0, [True, True, False, True])
    np.testing.assert_allclose(upload["weights"], signed[1:], rtol=1e-5)
    np.testing.assert_allclose(weights(upload), mixed, rtol=1e-5)
    np.testing.assert_array_equal(weights(trained), weights(upload))
    np.testing.assert_array_equal(weights(stays.start), weights(upload))  # trained with rate 0


def test_against_the_last_model_only_peers_have_a_share():
    made, data = setting(validation=3, reference="last")
    sent = payload(STORED[0], STORED[1:])
    upload, _, stays, _ = made.train(sent, home(), ClientContext(0, client(data, 0), T, KEY))
    signed, mixed = oracle(STORED[0], STORED[1:], X[:3], Y[:3])
    np.testing.assert_allclose(upload["weights"], signed, rtol=1e-5)
    np.testing.assert_allclose(weights(upload), mixed, rtol=1e-5)
    assert stays == home()


def test_a_worse_peer_has_no_share_and_shares_sum_to_one():
    given = jnp.array([2.0, -9.0, 6.0])
    mixed, share = mixture(variables(STORED[0]), stacked(STORED[1:]), given)
    np.testing.assert_allclose(share, [0.25, 0.0, 0.75], rtol=1e-6)
    expected = 0.25 * STORED[1] + 0.75 * STORED[3]
    np.testing.assert_allclose(weights(mixed), expected, rtol=1e-5)


def test_where_all_are_worse_the_previous_model_stays():
    best = np.linalg.lstsq(X, Y, rcond=None)[0]
    for reference, own, at_home in (("last", best, home()), ("start", STORED[0], home(best))):
        made, data = setting(reference=reference)
        upload, *_ = made.train(
            payload(own, STORED[:3]), at_home, ClientContext(0, client(data, 0), T, KEY)
        )
        assert (upload["weights"] < 0).all()
        np.testing.assert_array_equal(weights(upload), best.astype(np.float32))


def test_without_better_peers_the_own_model_stays():
    """Own training helped and no peer does: θ is the own model, as in Local."""
    best = np.linalg.lstsq(X, Y, rcond=None)[0]
    made, data = setting(peers=2)
    sent = payload(best, [STORED[2], STORED[2] + 1])
    upload, *_ = made.train(sent, home(STORED[1]), ClientContext(0, client(data, 0), T, KEY))
    np.testing.assert_allclose(weights(upload), best, rtol=1e-5)


def test_an_equal_model_has_weight_zero():
    """At distance zero there is neither gain nor 0/0."""
    made, data = setting()
    peers = [STORED[0], STORED[1], STORED[0]]
    sent = payload(STORED[0], peers)
    upload, *_ = made.train(sent, home(STORED[0]), ClientContext(0, client(data, 0), T, KEY))
    np.testing.assert_array_equal(upload["weights"][jnp.array([0, 2])], 0.0)
    np.testing.assert_allclose(weights(upload), STORED[1], rtol=1e-5)


def test_local_training_follows_the_mixture():
    made, data = setting(rate=0.1)
    previous, sent = np.array([2.0, -2.0]), payload(STORED[0], STORED[1:])
    upload, _, stays, _ = made.train(
        sent, home(previous), ClientContext(0, client(data, 0), T, KEY)
    )
    _, mixed = oracle(previous, STORED)
    np.testing.assert_allclose(weights(stays.start), mixed, rtol=1e-5)
    expected = mixed - 0.1 * X.T @ (X @ mixed - Y) / len(X)
    np.testing.assert_allclose(weights(upload), expected, rtol=1e-5)


AFFINITY = jnp.array([0.5, 9.0, 3.0, -1.0, 7.0, 0.0])
OPEN = jnp.array([True, False, True, True, True, True])


def picked(epsilon, affinity=AFFINITY, peers=2):
    keys = jax.random.split(KEY, 500)
    draw = jax.jit(jax.vmap(lambda key: leading(affinity, OPEN, peers, jnp.float32(epsilon), key)))
    return np.asarray(draw(keys))


def test_without_exploration_the_best_are_sent():
    assert (picked(0.0) == [4, 2]).all()


def test_exploration_is_uniform_over_those_that_are_open():
    ids = picked(1.0)
    assert (ids[:, 0] != ids[:, 1]).all()
    counts = np.bincount(ids.ravel(), minlength=6)
    assert counts[1] == 0
    np.testing.assert_allclose(counts[[0, 2, 3, 4, 5]], 200, atol=45)


def test_each_slot_explores_by_itself():
    """The best of five goes first with probability 1 − ε + ε/5."""
    share = (picked(0.3)[:, 0] == 4).mean()
    np.testing.assert_allclose(share, 0.7 + 0.3 / 5, atol=0.06)


def test_ties_are_broken_at_random():
    counts = np.bincount(picked(0.0, jnp.zeros(6)).ravel(), minlength=6)
    assert counts[1] == 0
    np.testing.assert_allclose(counts[[0, 2, 3, 4, 5]], 200, atol=45)


def sends(made, state, i, t=0, draws=40):
    send = jax.jit(
        jax.vmap(lambda key: made.send(state, ClientContext(i, None, jnp.int32(t), key)))
    )
    return send(jax.random.split(KEY, draws))


def test_nobody_is_sent_to_itself_and_no_novel_client_to_anyone():
    made, _ = setting(5, peers=2, active=[True, True, False, True, True])
    state = made.init(KEY)
    for i, others in ((0, {1, 3, 4}), (4, {0, 1, 3}), (2, {0, 1, 3, 4})):
        assert set(np.asarray(sends(made, state, i)["ids"]).ravel()) == others


@pytest.mark.slow("a run")
@pytest.mark.parametrize("begin", [0, 20])
def test_exploration_decays_to_nothing_within_the_phase(begin):
    made, _ = setting(epsilon=1.0, epsilon_decay=0.25, peers=1, begin=begin)
    state = made.init(KEY)
    rows = state.rows._replace(affinity=state.rows.affinity.at[0, 3].set(1.0))
    state = state._replace(rows=rows)
    shares = [
        (np.asarray(sends(made, state, 0, begin + t)["ids"]) == 3).mean() for t in range(0, 9, 2)
    ]
    assert shares[0] < 0.6
    assert shares[2:] == [1.0, 1.0, 1.0]


def test_the_payload_holds_the_own_model_and_those_of_the_peers():
    made, _ = setting()
    state = made.init(KEY)
    state = state._replace(rows=state.rows._replace(models=stacked(STORED)))
    got = made.send(state, ClientContext(2, None, T, KEY))
    stored = STORED.astype(np.float32)
    np.testing.assert_array_equal(weights(got), stored[2])
    np.testing.assert_array_equal(weights(got["peers"]), stored[np.asarray(got["ids"])])


def test_the_server_stores_models_and_adds_up_weights():
    made, _ = setting(peers=2)
    state = made.init(KEY)
    rows = jax.tree.map(jnp.asarray, state.rows._replace(models=stacked(STORED)))
    ids, here = jnp.array([1, 4, 3]), jnp.array([True, False, True])  # the second is absent
    payloads = {"ids": jnp.array([[0, 2], [1, 3], [0, 1]])}
    given = jnp.array([[1, 2], [0, 0], [3, -4.0]])
    uploads = {**stacked([[7, 7], [0, 0], [8, 8]]), "weights": given}
    for _ in range(2):
        _, rows = made.receive(
            State((), rows, ()), tiny.cohort(tiny.TRAIN, ids, here, payloads, uploads, T)
        )
    wanted = np.zeros((4, 4))
    wanted[1, [0, 2]], wanted[3, [0, 1]] = [2, 4], [6, -8]
    np.testing.assert_array_equal(rows.affinity, wanted)
    models = np.float32([STORED[0], [7, 7], STORED[2], [8, 8]])
    np.testing.assert_array_equal(weights(rows.models), models)


def test_personal_mixes_the_peers_of_highest_affinity():
    """Exploration is for `send`; here the own model has no share."""
    made, data = setting(peers=1, epsilon=1.0)
    rows = made.init(KEY).rows._replace(models=stacked(STORED))
    for best in (1, 3):
        rows = rows._replace(affinity=jnp.zeros((4, 4)).at[0, best].set(1.0))
        served = made.personalize(
            State((), rows, ()), home(STORED[0]), ClientContext(0, client(data, 0), T, KEY)
        )
        np.testing.assert_allclose(weights(served), STORED[best], rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"clients": 1, "peers": 1}, "one other"),
        ({"active": [True, False, False, False], "peers": 1}, "one other"),
        ({"peers": 4}, "choose 1 to 3"),
        ({"peers": 0}, "choose 1 to 3"),
        ({"validation": 0}, "validation_fraction"),
        ({"reference": "first"}, "start or last"),
        ({"epsilon": 1.5}, "epsilon"),
        ({"epsilon_decay": -0.1}, "epsilon_decay"),
    ],
)
def test_wrong_settings(settings, word):
    with pytest.raises(UsageError, match=word):
        setting(**settings)
