"""kNN-Per against NumPy, on the network (x A) B with features x A."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import HEAD, A, X, Y, deep

pytestmark = pytest.mark.slow("programs of a method beside the four systems")

QUERIES = np.array([[0.9, 0.4], [0.0, -0.2], [-2.0, 1.0], [0.1, 1.5]])
NEIGHBOURS, WEIGHT, SCALE = 3, 0.3, 0.4


def probabilities(a, head, neighbours=NEIGHBOURS, weight=WEIGHT):
    """Returns the mixture as the paper writes it, for each query in turn."""
    mixtures = []
    for z in QUERIES @ a:
        distances = np.sum((z - X @ a) ** 2, 1) / (2 * SCALE)
        nearest = np.argsort(distances)[:neighbours]
        similarities = np.exp(-distances[nearest])
        labels = similarities @ np.eye(3)[Y[nearest]] / similarities.sum()
        mixtures.append(weight * labels + (1 - weight) * linear.softmax(z[None] @ head)[0])
    return np.array(mixtures)


def make(**settings):
    return linear.make_classifier("knn_per", scale=SCALE, **settings)


def predict(algorithm, variables):
    return np.exp(jax.jit(algorithm.predict)(variables, QUERIES.astype(np.float32)))


def test_predictions_by_hand():
    algorithm, data = make(neighbours=NEIGHBOURS, weight=WEIGHT)
    ctx = linear.context(data)
    served = jax.jit(algorithm.personalize)(State(deep(A, HEAD), (), ()), (), ctx)
    expected = probabilities(A, HEAD)
    np.testing.assert_allclose(predict(algorithm, served), expected, rtol=1e-5)
    # After training: the client's model, and the features that it computes.
    result = linear.train_client(algorithm, deep(A, HEAD), (), data)
    fedavg, _ = linear.make_classifier("fedavg")
    trained = linear.train_client(fedavg, deep(A, HEAD), (), data)
    chex.assert_trees_all_equal(result.upload, trained.upload)
    expected = probabilities(*linear.kernels(trained.upload))
    np.testing.assert_allclose(predict(algorithm, result.variables), expected, rtol=1e-5)
    # The traffic is FedAvg's: examples and features stay on the client.
    assert algorithm.traffic(deep(A, HEAD), result.upload) == fedavg.traffic(
        deep(A, HEAD), trained.upload
    )


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_only_the_network_or_only_the_neighbours(weight):
    """With more neighbours than examples, all four examples are neighbours."""
    algorithm, data = make(neighbours=9, weight=weight)
    served = algorithm.personalize(State(deep(A, HEAD), (), ()), (), linear.context(data))
    expected = np.maximum(probabilities(A, HEAD, 4, weight), 1e-9)
    np.testing.assert_allclose(predict(algorithm, served), expected, rtol=1e-5)


def test_padding_is_never_near():
    """Squared distances are up to 1e11; the second client has one example, of class 2."""
    examples = [1e5 * X, 1e5 * X[:1]]
    data, federation = linear.federated(examples, [Y, [2]])
    data = data._replace(y=data.y.astype(jnp.int32))
    federation = federation._replace(outputs=3, task=linear.CLASSES)
    network, training = linear.Deep(3, 2), local_training.sgd(steps=1)
    algorithm = algorithms.knn_per(network, training, federation, weight=1.0)
    ctx = linear.context(data, 1)
    served = algorithm.personalize(State(deep(A, HEAD), (), ()), (), ctx)
    x = jnp.float32(1e5 * QUERIES)
    np.testing.assert_array_equal(algorithm.predict(served, x).argmax(1), [2, 2, 2, 2])


@pytest.mark.parametrize("labels", [[0, 1, 1, 1], [0, 1, 0, 2], [0, 0, 0, 2]])
def test_a_client_selects_its_weight_on_validation_examples(labels):
    """The queries are the validation examples; the best weights are 0, 0.5 and 1."""
    data, federation = linear.federated([X], [Y], validation=([QUERIES], [labels]))
    data = data._replace(y=jnp.asarray([*Y, *labels], jnp.int32))
    algorithm = algorithms.knn_per(
        linear.Deep(3, 2),
        local_training.sgd(steps=1),
        federation._replace(outputs=3, task=linear.CLASSES),
        neighbours=NEIGHBOURS,
        select_weight=True,
        scale=SCALE,
    )
    served = algorithm.personalize(State(deep(A, HEAD), (), ()), (), linear.context(data))
    weights = np.arange(11) / 10
    mixtures = np.array([probabilities(A, HEAD, weight=w) for w in weights])
    losses = -np.log(np.maximum(mixtures[:, np.arange(4), labels], 1e-9)).sum(1)
    np.testing.assert_allclose(served["weight"], [weights[np.argmin(losses)]], rtol=1e-6)


def test_padding_does_not_select_a_weight():
    """The only validation example of the second client has a class that no neighbour has."""
    validation = ([QUERIES, QUERIES[:1]], [[0] * 4, [1]])
    data, federation = linear.federated([X, X], [Y, Y], validation=validation)
    data = data._replace(y=data.y[:, 0].astype(jnp.int32))
    federation = federation._replace(outputs=3, task=linear.CLASSES)
    network, training = linear.Deep(3, 2), local_training.sgd(steps=1)
    algorithm = algorithms.knn_per(network, training, federation, select_weight=True, scale=SCALE)
    ctx = linear.context(data, 1)
    served = algorithm.personalize(State(deep(A, HEAD), (), ()), (), ctx)
    np.testing.assert_array_equal(served["weight"], [0])


def test_batches_of_stored_examples_and_other_clients_padding():
    """The second client's rows are padded to 300, more than one batch of features."""
    rng = np.random.default_rng(0)
    xs, ys = [rng.normal(size=(300, 2)), X, np.zeros((0, 2))], [rng.integers(0, 3, 300), Y, Y[:0]]
    algorithm, data = make(xs=xs, ys=ys, neighbours=NEIGHBOURS, weight=WEIGHT)
    personalize = partial(algorithm.personalize, State(deep(A, HEAD), (), ()), ())
    served = personalize(linear.context(data, 1))
    np.testing.assert_allclose(predict(algorithm, served), probabilities(A, HEAD), rtol=1e-5)
    memory = personalize(linear.context(data))["memory"]
    np.testing.assert_allclose(memory["features"][:300], xs[0] @ A, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(memory["labels"][:300], ys[0])
    # A client without examples uses the network alone.
    served = personalize(linear.context(data, 2))
    expected = probabilities(A, HEAD, weight=0.0)
    np.testing.assert_allclose(predict(algorithm, served), expected, rtol=1e-5)
