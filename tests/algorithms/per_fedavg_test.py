"""Per-FedAvg on quadratics, with both directions in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.algorithms.per_fedavg import meta_gradient
from fedjax_pfl.core import batches, local_training
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import context, variables, weights

ALPHA, BETA = 0.2, 0.05
X = np.array([[1.0, 2.0], [0.5, -1.0], [2.0, 0.0]])
A = X.T @ X / len(X)  # the loss is ½ wᵀAw, because every target is zero
START = np.array([1.0, -2.0])


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_one_step_on_a_quadratic(variant):
    """Each batch has all examples. The served model is one inner step."""
    training = local_training.sgd(learning_rate=BETA, batch_size=4, steps=1)
    settings = {"variant": variant, "alpha": ALPHA, "delta": 1e-2}
    algorithm, data = linear.make("per_fedavg", [X], [np.zeros(3)], training, **settings)
    upload, trained, client_state, metrics = algorithm.train(variables(START), (), context(data))
    inner = np.eye(2) - ALPHA * A
    outer = inner if variant == "hf" else np.eye(2)
    w = START - BETA * outer @ A @ inner @ START
    np.testing.assert_allclose(weights(upload), w, atol=2e-6)
    np.testing.assert_allclose(weights(trained), w - ALPHA * A @ w, atol=2e-6)
    adapted = START - ALPHA * A @ START
    np.testing.assert_allclose(metrics["loss"], 0.5 * adapted @ A @ adapted, rtol=1e-5)
    assert client_state == ()
    served = algorithm.personalize(State(variables(START), (), ()), (), context(data))
    np.testing.assert_allclose(weights(served), adapted, rtol=1e-5)
    uploads = [variables([4, 0]), variables([0, 8])]
    state = linear.receive(algorithm, State(variables(START), (), ()), [3, 1], uploads, [True] * 2)
    np.testing.assert_allclose(weights(state.server), [3.0, 2.0], rtol=1e-6)


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
