"""FedCP against NumPy, on the network (x A) B with features x A."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.fedcp import Client
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.errors import UsageError
from tests.algorithms import linear
from tests.algorithms.linear import HEAD, A, X, Y, deep, kernels, train_client

pytestmark = pytest.mark.slow("programs of a method beside the four systems")

RATE, STEPS, PENALTY = 0.2, 3, 0.7
PERSONAL = np.array([[0.2, 0.0, 0.1], [0.3, -0.1, 0.2]])
RNG = np.random.default_rng(0)
POLICY = {
    "linear": {"kernel": RNG.normal(size=(2, 4)), "bias": RNG.normal(size=4)},
    "norm": {"scale": RNG.normal(size=4), "bias": RNG.normal(size=4)},
}


def outputs(z, policy, personal, v):
    """Returns logits as the paper writes them, with the softmax of two numbers per feature."""
    a = v * z @ policy["linear"]["kernel"] + policy["linear"]["bias"]
    a = (a - a.mean(1, keepdims=True)) / np.sqrt(a.var(1, keepdims=True) + 1e-5)
    a = np.maximum(a * policy["norm"]["scale"] + policy["norm"]["bias"], 0)
    r = np.exp(a[:, :2]) / (np.exp(a[:, :2]) + np.exp(a[:, 2:]))
    return (r * z) @ HEAD + ((1 - r) * z) @ personal


def direction(personal):
    return personal.sum(1) / np.linalg.norm(personal.sum(1))


def discrepancy(a, b):
    """Returns the mean of the kernel over pairs, in loops."""

    def kernel(a, b):
        squares = [np.sum((p - q) ** 2) for p in a for q in b]
        return np.mean([sum(np.exp(-s / 2 / w) for w in (10, 15, 20, 50)) for s in squares])

    return kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)


def objective(model):
    z = X @ model["a"]
    logits = outputs(z, model["policy"], model["personal"], direction(PERSONAL))
    cross_entropy = -np.log(linear.softmax(logits)[np.arange(4), Y])
    return np.mean(cross_entropy) + PENALTY * discrepancy(z, X @ A)


def server(policy):
    parameters = deep(A, HEAD)["params"]
    return {"params": {**parameters, "policy": jax.tree.map(jnp.float32, policy)}}


def client_head(kernel=PERSONAL):
    return Client({"params": {"head": {"kernel": jnp.float32(kernel)}}}, ())


def test_one_round_by_hand():
    algorithm, data = linear.make_classifier("fedcp", penalty=PENALTY)
    model = {"a": A.copy(), "personal": PERSONAL.copy(), "policy": jax.tree.map(np.copy, POLICY)}
    losses = []
    for _ in range(STEPS):
        losses.append(objective(model))
        slopes = linear.central_differences(partial(objective, model), model)
        model = jax.tree.map(lambda value, slope: value - RATE * slope, model, slopes)
    payload, client = server(POLICY), client_head()
    result = train_client(algorithm, payload, client, data)
    assert algorithm.kept_change == {"head": 1.0}  # half of the uploaded head is the client's own
    expected = server(model["policy"])
    expected["params"].update(deep(model["a"], (HEAD + model["personal"]) / 2)["params"])
    chex.assert_trees_all_close(result.upload, expected, rtol=1e-6, atol=1e-7)
    personal = result.client.head["params"]["head"]["kernel"]
    np.testing.assert_allclose(personal, model["personal"], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(result.metrics["loss"], np.mean(losses), rtol=1e-6)
    # The policy of the current personal head splits the features for predictions.
    served = algorithm.personalize(State(payload, (), ()), client, None)
    logits = outputs(X @ A, POLICY, PERSONAL, direction(PERSONAL))
    np.testing.assert_allclose(algorithm.predict(served, jnp.float32(X)), logits, rtol=1e-5)
    logits = outputs(
        X @ model["a"], model["policy"], model["personal"], direction(model["personal"])
    )
    np.testing.assert_allclose(
        algorithm.predict(result.variables, jnp.float32(X)), logits, rtol=3e-5
    )


def test_with_all_features_for_the_personal_head_it_is_fedper():
    """A normalised number of 200 more makes s exactly 1 and its gradient 0."""
    algorithm, data = linear.make_classifier("fedcp", penalty=0.0)
    policy = {**POLICY, "norm": {"scale": np.zeros(4), "bias": np.array([0.0, 0, 200, 200])}}
    result = train_client(algorithm, server(policy), client_head(), data)
    fedper, _ = linear.make_classifier("fedper")
    personal = client_head().head
    body = trees.split(deep(A, HEAD), {"body"})[0]
    state = fedper.init(linear.KEY)
    client = trees.row(state.clients, 0)._replace(personal=personal)
    expected = train_client(fedper, body, client, data)
    chex.assert_trees_all_equal(result.client.head, expected.client.personal)
    chex.assert_trees_all_equal(result.upload["params"]["body"], expected.upload["params"]["body"])
    chex.assert_trees_all_equal(
        result.upload["params"]["policy"], server(policy)["params"]["policy"]
    )


def test_payload_and_client_side_state():
    algorithm, data = linear.make_classifier("fedcp")
    state = algorithm.init(linear.KEY)
    payload = algorithm.send(state._replace(clients=()), linear.context(data))
    head = state.server["params"]["head"]["kernel"]
    np.testing.assert_array_equal(state.clients.head["params"]["head"]["kernel"][0], head)
    result = train_client(algorithm, payload, trees.row(state.clients, 0), data)
    traffic = algorithm.traffic(payload, result.upload)
    policy = {"policy/linear": 4 * (8 + 4), "policy/norm": 4 * 8}
    assert traffic.down == traffic.up == {"body": 4 * 4, "head": 4 * 6, **policy}
    second_upload = {**server(POLICY)["params"], **deep(3 * A, HEAD)["params"]}
    uploads = [result.upload, {"params": second_upload}]
    after = linear.receive(algorithm, state, [4, 1], uploads, [True, True])
    expected = (4 * kernels(trees.split(result.upload, {"body"})[0])[0] + 3 * A) / 5
    np.testing.assert_allclose(after.server["params"]["body"]["kernel"], expected, rtol=1e-6)


def test_phases_continue_the_method_or_start_from_a_model():
    algorithm, _ = linear.make_classifier("fedcp")
    state = algorithm.init(linear.KEY)
    chex.assert_trees_all_equal(algorithm.init(jax.random.key(9), state), state)
    start = State(deep(A, HEAD), (), ())
    state = algorithm.init(linear.KEY, start)
    chex.assert_trees_all_equal(kernels(trees.split(state.server, {"body"})[0])[0], jnp.float32(A))
    np.testing.assert_array_equal(
        state.clients.head["params"]["head"]["kernel"][0], jnp.float32(HEAD)
    )


def test_a_head_that_is_not_dense_is_refused():
    class Scaled(linear.Deep):
        head = "scale"

        @linear.nn.compact
        def __call__(self, x, train=False, mask=None):
            return linear.nn.LayerNorm(name="scale")(linear.nn.Dense(3, name="body")(x))

    _, federation = linear.federated([X], [Y])
    with pytest.raises(UsageError, match=r"^fedcp .* scale of this network is not Dense"):
        algorithms.fedcp(Scaled(), local_training.sgd(steps=1), federation)
