"""pFedFDA against NumPy: seven examples of class 0, five of class 1, two of class 2."""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import A

pytestmark = pytest.mark.slow("programs of a method beside the four systems")

RNG = np.random.default_rng(11)
Y = np.repeat([0, 1, 2], [7, 5, 2])
X = RNG.normal(size=(14, 2)) + np.array([[1.0, 0.3], [-0.5, 1.0], [0.2, -1.0]])[Y]
MEANS = np.array([[1.0, 0.0], [-0.2, 0.4], [0.3, -0.8]])
COVARIANCE = np.array([[0.6, 0.1], [0.1, 0.9]])
RATE, STEPS, RIDGE = 0.1, 3, 0.2
SHARES = (np.array([7, 5, 2]) / 14 + 1e-4) / (1 + 3e-4)


class Network(nn.Module):
    """The network (x A) B + b."""

    outputs: int = 3
    head = "head"
    layers = ("body", "head")

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        return nn.Dense(3, name="head")(nn.Dense(2, use_bias=False, name="body")(x))


def bayes_head(means, covariance):
    """Returns kernel and bias of the linear head."""
    shrunk = (1 - 1e-4) * covariance + 1e-4 * np.trace(covariance) / 2 * np.eye(2)
    kernel = np.linalg.inv(shrunk) @ means.T
    return kernel, np.log(SHARES) - np.diag(means @ kernel) / 2


def fit(z, y):
    """Returns the client's own means and covariance; class 2 has too few examples."""
    means = np.array([z[y == c].mean(0) if sum(y == c) > 2 else MEANS[c] for c in range(3)])
    residuals = z - means[y]
    return means, residuals.T @ residuals / (len(z) - 1) + RIDGE * np.eye(2)


def mix(beta, own):
    return [beta * a + (1 - beta) * b for a, b in zip(own, (MEANS, COVARIANCE), strict=True)]


def adapt(a):
    """Returns β, means and covariance of the client with body A."""
    z = X @ a
    rank = np.concatenate([np.arange(sum(c == Y)) for c in range(3)]) % 2

    def loss(beta):
        total = 0.0
        for fold in (0, 1):
            kernel, bias = bayes_head(*mix(beta, fit(z[rank != fold], Y[rank != fold])))
            p = linear.softmax(z[rank == fold] @ kernel + bias)
            total -= np.mean(np.log(p[np.arange(len(p)), Y[rank == fold]]))
        return total

    beta = min(np.arange(11) / 10, key=loss)
    return beta, *mix(beta, fit(z, Y))


def layers(body, kernel, bias):
    return {"body": {"kernel": body}, "head": {"kernel": kernel, "bias": bias}}


def test_a_round_equals_numpy():
    data, federation = linear.federated([X], [Y])
    data = data._replace(y=jnp.asarray(Y, jnp.int32))
    federation = federation._replace(outputs=3, task=linear.CLASSES)
    training = local_training.sgd(learning_rate=RATE, batch_size=14, epochs=STEPS)
    algorithm = algorithms.pfedfda(Network(), training, federation, ridge=RIDGE)
    server = {
        "params": {"body": {"kernel": jnp.asarray(A, jnp.float32)}},
        "means": jnp.asarray(MEANS, jnp.float32),
        "covariance": jnp.asarray(COVARIANCE, jnp.float32),
    }
    result = linear.train_client(algorithm, server, (), data)

    a, (kernel, bias) = A, bayes_head(MEANS, COVARIANCE)
    for _ in range(STEPS):
        error = linear.softmax(X @ a @ kernel + bias) - np.eye(3)[Y]
        a = a - RATE * X.T @ error @ kernel.T / 14
    beta, means, covariance = adapt(a)
    assert 0 < beta < 1
    np.testing.assert_allclose(result.metrics["beta"], beta, rtol=1e-6)
    upload = {"params": {"body": {"kernel": a}}, "means": means, "covariance": covariance}
    chex.assert_trees_all_close(result.upload, upload, rtol=2e-6, atol=5e-7)
    expected = layers(a, *bayes_head(means, covariance))
    chex.assert_trees_all_close(result.variables["params"], expected, rtol=2e-6, atol=5e-7)

    # The served model adapts to the features of the server's body.
    state = State(server, (), ())
    served = algorithm.personalize(state, (), linear.context(data))
    expected = layers(A, *bayes_head(*adapt(A)[1:]))
    chex.assert_trees_all_close(served["params"], expected, rtol=2e-6, atol=5e-7)

    # A phase continues an earlier one.
    chex.assert_trees_all_equal(algorithm.init(linear.KEY, state).server, server)

    # Noise on uploads may make Σ indefinite; the eigenvalues of the symmetric part are 2 and -3.
    ctx = linear.context(data)
    chex.assert_trees_all_equal(algorithm.send(state, ctx), server)
    noised = State({**server, "covariance": jnp.float32([[1, 3], [1, -2]])}, (), ())
    bounded = 2.0 * np.array([[4, 2], [2, 1]]) / 5 + RIDGE / 2 * np.array([[1, -2], [-2, 4]]) / 5
    np.testing.assert_allclose(algorithm.send(noised, ctx)["covariance"], bounded, rtol=1e-5)
    assert trees.all_finite(algorithm.personalize(noised, (), ctx))
