"""FedPAC against NumPy, on the network (x A) B with features x A."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.fedpac import Momentum, mixtures
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.fedproto_test import HAS_PROTOTYPE, PAYLOAD, PENALTY, PROTOTYPES, RATE, STEPS
from tests.algorithms.linear import HEAD, A, X, Y, deep, kernels, train_client
from tests.core.simplex_test import by_supports

pytestmark = pytest.mark.slow("programs of a method beside the four systems")

NONE = Momentum((), ())


def make(**settings):
    _, data = linear.make_classifier()
    _, federation = linear.federated([X] * 3, [Y] * 3)
    training = local_training.sgd(learning_rate=RATE, batch_size=4, epochs=STEPS)
    federation = federation._replace(outputs=3, task=linear.CLASSES)
    return algorithms.fedpac(linear.Deep(3, 2), training, federation, **settings), data


def by_logit(z, head):
    return (linear.softmax(z @ head) - np.eye(3)[Y]) / 4


def test_local_training_by_hand():
    """Three examples of class 0, one of class 2 without a prototype; two epochs of the head."""
    algorithm, data = make(penalty=PENALTY, head_epochs=2)
    result = train_client(algorithm, {**deep(A, HEAD), **PAYLOAD}, NONE, data)
    z = X @ A
    h = np.stack([0.75 * z[Y == 0].mean(0), [0, 0], 0.25 * z[Y == 2].mean(0)])
    np.testing.assert_allclose(result.upload["h"], h, rtol=1e-5)
    # V_k is the trace of the covariance of what h is the mean of, in parts of n
    products = np.einsum("bc,bd->bcd", np.eye(3)[Y], z).reshape(4, -1)
    variance = np.square(products - products.mean(0)).mean(0).sum() / 4
    np.testing.assert_allclose(result.upload["variance"], variance, rtol=1e-5)
    a, head = A, HEAD
    for _ in range(2):
        head = head - RATE * (X @ a).T @ by_logit(X @ a, head)
    for _ in range(STEPS):
        z = X @ a
        distance_grad = np.where(HAS_PROTOTYPE[Y][:, None], z - PROTOTYPES[Y], 0.0) * 2 / 2 / 4
        a = a - RATE * X.T @ (by_logit(z, head) @ head.T + PENALTY * distance_grad)
    got = kernels(result.variables)
    np.testing.assert_allclose(got[0], a, rtol=1e-5)
    np.testing.assert_allclose(got[1], head, rtol=1e-5)
    z = X @ a
    np.testing.assert_allclose(result.upload["prototypes"][0], z[Y == 0].mean(0), rtol=1e-5)
    np.testing.assert_allclose(result.upload["prototypes"][2], z[Y == 2].mean(0), rtol=1e-5)
    np.testing.assert_allclose(result.upload["prototypes"][1], PROTOTYPES[1])  # no change there
    np.testing.assert_array_equal(result.upload["counts"], [3, 0, 1])
    chex.assert_trees_all_equal({"params": result.upload["params"]}, result.variables)


def upload(scale, h, variance, counts):
    model = deep(scale * A, scale * HEAD)
    statistics = {"prototypes": scale * PROTOTYPES, "counts": counts, "h": h, "variance": variance}
    return {**model, **{name: jnp.float32(leaf) for name, leaf in statistics.items()}}


def test_the_server_by_hand():
    """Three clients, the last one absent; the others have no example of class 1."""
    algorithm, _ = make()
    h = np.random.default_rng(0).normal(size=(3, 3, 2))
    variances, scales, arrived = np.array([0.4, 2.0, 1e-6]), [1.0, 3.0, 99.0], [True, True, False]
    counts = [[3, 0, 2], [1, 0, 0], [9, 9, 9]]
    heads = trees.repeat(trees.split(deep(A, HEAD), {"head"})[0], 3)
    start = State({**trees.split(deep(A, HEAD), {"body"})[0], **PAYLOAD}, heads, ())
    uploads = [upload(*products) for products in zip(scales, h, variances, counts, strict=True)]
    state = linear.receive(algorithm, start, [5, 1, 27], uploads, arrived)
    flat = h.reshape(3, -1)
    for i in (0, 1):
        gaps = flat[i] - flat
        a = by_supports(gaps @ gaps.T + np.diag(variances), np.zeros(3), np.array(arrived))
        assert 0.01 < a[0] < 0.99
        got = np.asarray(state.rows["params"]["head"]["kernel"])[i]
        np.testing.assert_allclose(got, (a[0] + 3 * a[1]) * HEAD, rtol=1e-4)
        served = algorithm.personalize(state, None, linear.ClientContext(i, None, 0, linear.KEY))
        np.testing.assert_array_equal(kernels(served)[1], got)
        assert set(served) == {"params"}
    np.testing.assert_array_equal(state.rows["params"]["head"]["kernel"][2], np.float32(HEAD))
    body = state.server["params"]["body"]["kernel"]
    np.testing.assert_allclose(body, (5 * A + 1 * 3 * A) / 6, rtol=1e-5)
    expected = PROTOTYPES * np.array([[(3 * 1 + 1 * 3) / 4], [1], [1]])
    np.testing.assert_allclose(state.server["prototypes"], expected, rtol=1e-5)
    np.testing.assert_array_equal(state.server["seen"], [True, True, True])


@pytest.mark.parametrize("counts", [[5, 0], [0, 0]])
def test_the_head_of_a_client_without_examples_is_not_mixed_in(counts):
    """Its statistics are zeros, which look like those of a client with no variance."""
    algorithm, _ = make()
    heads = trees.repeat(trees.split(deep(A, HEAD), {"head"})[0], 2)
    start = State({**trees.split(deep(A, HEAD), {"body"})[0], **PAYLOAD}, heads, ())
    uploads = [upload(1.0, np.ones((3, 2)), 2.0, [3, 0, 2])]
    uploads.append(upload(50.0, np.zeros((3, 2)), 0.0, [0, 0, 0]))
    state = linear.receive(algorithm, start, counts, uploads, [True, True])
    kernel = state.rows["params"]["head"]["kernel"][0]
    np.testing.assert_allclose(kernel, HEAD, rtol=1e-6)


def test_mixtures_of_equal_and_of_distant_clients():
    """Equal h give weights 1/V. Distant h give the client's own head."""
    h, arrived = jnp.zeros((3, 2, 2)), jnp.ones(3, bool)
    variances = jnp.array([1.0, 2.0, 4.0])
    equal_weights = mixtures(h, variances, arrived)
    np.testing.assert_allclose(equal_weights, np.tile(np.array([4, 2, 1]) / 7, (3, 1)), atol=1e-6)
    separate_weights = mixtures(100.0 * jnp.eye(3).reshape(3, 1, 3), variances, arrived)
    np.testing.assert_allclose(separate_weights, np.eye(3), atol=1e-3)
