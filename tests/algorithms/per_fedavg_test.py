"""Per-FedAvg on quadratics, with both directions in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.per_fedavg import meta_gradient
from fedjax_pfl.core import batches, local_training
from fedjax_pfl.core.algorithm import State
from tests import tiny
from tests.algorithms import linear
from tests.algorithms.linear import T, context, variables, weights

ALPHA, BETA = 0.2, 0.05
X = np.array([[1.0, 2.0], [0.5, -1.0], [2.0, 0.0]])
A = X.T @ X / len(X)  # the loss is ½ wᵀAw, because every target is zero
START = np.array([1.0, -2.0])


def make(variant, clients=1, batch_size=4, **settings):
    data, federation = linear.federated([X] * clients, [np.zeros(3)] * clients)
    training = local_training.sgd(learning_rate=BETA, batch_size=batch_size, steps=1)
    settings = {"alpha": ALPHA, "delta": 1e-2, **settings}
    algorithm = algorithms.per_fedavg(
        linear.Linear(), training, federation, variant=variant, **settings
    )
    return algorithm, data


def expected_upload(variant):
    inner = np.eye(2) - ALPHA * A
    outer = inner if variant == "hf" else np.eye(2)
    return START - BETA * outer @ A @ inner @ START


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_one_step_on_a_quadratic(variant):
    """Each batch has all examples."""
    algorithm, data = make(variant)
    upload, trained, client_state, metrics = algorithm.train(variables(START), (), context(data))
    w = expected_upload(variant)
    np.testing.assert_allclose(weights(upload), w, atol=2e-6)
    np.testing.assert_allclose(weights(trained), w - ALPHA * A @ w, atol=2e-6)
    adapted = START - ALPHA * A @ START
    np.testing.assert_allclose(metrics["loss"], 0.5 * adapted @ A @ adapted, rtol=1e-5)
    assert client_state == ()


def test_the_directions_differ():
    assert np.abs(expected_upload("hf") - expected_upload("fo")).max() > 0.02


def test_the_served_model_is_one_inner_step():
    algorithm, data = make("fo")
    served = algorithm.personalize(State(variables(START), (), ()), (), context(data))
    np.testing.assert_allclose(weights(served), START - ALPHA * A @ START, rtol=1e-5)


def test_alpha_0_equals_sgd():
    algorithm, data = make("hf", alpha=0.0)
    upload, trained, _, _ = algorithm.train(variables(START), (), context(data))
    np.testing.assert_allclose(weights(upload), START - BETA * A @ START, rtol=1e-5)
    np.testing.assert_array_equal(weights(trained), weights(upload))


def test_the_server_averages_by_examples():
    data, federation = linear.federated([X, X[:1]], [np.zeros(3), np.zeros(1)])
    del data
    training = local_training.sgd(steps=1)
    algorithm = algorithms.per_fedavg(linear.Linear(), training, federation)
    uploads = jax.tree.map(lambda *leaves: jnp.stack(leaves), variables([4, 0]), variables([0, 8]))
    ids, arrived = jnp.arange(2), jnp.ones(2, bool)
    server, _ = algorithm.receive(
        State(variables(START), (), ()),
        tiny.cohort(federation.counts, ids, arrived, uploads, uploads, T),
    )
    np.testing.assert_allclose(weights(server), [3.0, 2.0], rtol=1e-6)


def test_batches_are_independent_and_both_sides_share_b3():
    """Four passes: B1 at w, B2 (given) at w', then B3 on both sides with the same noise."""
    x = np.arange(1.0, 41.0)[:, None]
    data, _ = linear.federated([x], [np.zeros(40)])
    data, first_inputs, noise = context(data).data, [], []

    def inner(params, model_state, batch, key):
        first_inputs.append(float(batch.x[0, 0]))
        noise.append(tuple(np.asarray(jax.random.key_data(key)).tolist()))
        return (jnp.zeros(()), model_state), params

    meta = meta_gradient(inner, data, 1, variant="hf", alpha=0.1, delta=1e-2)
    batch2 = batches.sample_batch(data, data.train, 1, jax.random.key(0))
    firsts, thirds = set(), set()
    for k in range(12):
        first_inputs.clear()
        noise.clear()
        meta(variables([1.0])["params"], {}, batch2, jax.random.key(k))
        b1, b2, b3, b3_again = first_inputs
        assert b2 == float(batch2.x[0, 0])
        assert b3 == b3_again
        assert noise[2] == noise[3]
        assert len(set(noise)) == 3
        firsts.add(b1)
        thirds.add(b3)
    assert len(firsts) > 6
    assert len(thirds) > 6
    assert firsts != thirds
